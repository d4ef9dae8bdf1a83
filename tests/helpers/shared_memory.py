"""Shared memory of the kernels in `sjlt.kernels.nvidia` for Triton's interpreter, which runs one program at a time.

Replaces the functions of `kernels.nvidia.shared_memory`, operating on the arrays behind the interpreter's tensors.
Copies happen immediately, so synchronization by barriers is not tested, but every address is.
"""

import ctypes

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from sjlt.backends.triton import partial_sums
from sjlt.kernels.nvidia import (
    encode_chunks,
    lane_rows,
    lane_sums,
    scattered_loads,
    scattered_sums,
    shared_memory,
    sparse_sums,
    staged_adjoint,
    staged_gather,
    sums,
    warp_loads,
    warp_tiles,
)

SIZE = 232448
memory = np.zeros(SIZE, np.uint8)


def data(x):
    return np.asarray(x.handle.data if hasattr(x, "handle") else getattr(x, "value", x))


def tensor(array, dtype):
    shape = list(array.shape)
    return tl.tensor(TensorHandle(array, dtype), tl.block_type(dtype, shape) if shape else dtype)


def words_of(numbers):
    return np.float64 if numbers.dtype == tl.float64 else np.float32


def shared_begin(size):
    memory[:] = 0xFF  # NaN
    loaded[:] = False
    return tensor(np.asarray(SIZE - int(data(size)), np.int32).reshape(1), tl.int32)


def copy_async(address, source, count, BYTES):
    size = int(data(BYTES))
    to, start, kept = (a.ravel() for a in np.broadcast_arrays(data(address), data(source), data(count)))
    assert (to % size == 0).all()
    assert (start % size == 0).all()  # even where nothing is copied
    assert ((kept >= 0) & (kept <= size)).all()
    place = np.arange(size)
    memory[to[:, None] + place] = 0
    to, start, kept = (a[kept > 0] for a in (to.astype(np.int64), start.astype(np.int64), kept))
    if len(to):
        first = int(start.min())
        given = np.frombuffer(ctypes.string_at(first, int((start + kept).max()) - first), np.uint8)
        which, byte = np.nonzero(place < kept[:, None])
        memory[to[which] + byte] = given[start[which] - first + byte]


def at(address, dtype):
    """Indices of elements of a dtype, viewing the memory as an array of that dtype."""
    places, item = data(address).astype(np.int64), np.dtype(dtype).itemsize
    assert (places % item == 0).all()
    assert (places >= 0).all()
    return places // item


def load_word(address):
    return tensor(memory.view(np.int32)[at(address, np.int32)], tl.int32)


def load_half(address):
    return tensor(memory.view(np.uint16)[at(address, np.uint16)].astype(np.uint32), tl.uint32)


def hide(word):
    return word


def ballot(keep):
    kept = data(keep).astype(np.uint64).reshape(-1, 32)
    words = (kept << np.arange(32, dtype=np.uint64)).sum(1).astype(np.uint32).view(np.int32)
    return tensor(np.repeat(words, 32), tl.int32)


def count_bits(word):
    return tensor(np.bitwise_count(data(word).view(np.uint32)).astype(np.int32), tl.int32)


def permute_bytes(low, high, selector):
    low, high, selector = np.broadcast_arrays(data(low), data(high), data(selector))
    both = low.astype(np.uint32).astype(np.uint64) | high.astype(np.uint32).astype(np.uint64) << np.uint64(32)
    result = np.zeros(both.shape, np.uint64)
    for byte in range(4):
        place = (selector.astype(np.uint64) >> np.uint64(4 * byte)) & np.uint64(7)
        result |= (both >> (8 * place) & np.uint64(255)) << np.uint64(8 * byte)
    return tensor(result.astype(np.uint32), tl.uint32)


def multiply_add_high(a, b, c):
    a, b, c = (np.asarray(data(each)).astype(np.int64).astype(np.uint64) for each in (a, b, c))
    return tensor(((a * b >> np.uint64(32)) + c).astype(np.uint32), tl.uint32)


def numbers_of_pairs(words, bf16):
    """The 16-bit numbers in 32-bit words, the lower ones first, in fp64: [..., 2]."""
    halves = np.stack([words & 0xFFFF, words >> 16], -1).astype(np.uint32)
    if bf16:
        return (halves << 16).view(np.float32).astype(np.float64)
    return halves.astype(np.uint16).view(np.float16).astype(np.float64)


def multiply_add(left, b0, b1, z, BF16):
    """`mma.sync.m16n8k16` of each warp: a lane has rows r and r + 8 of a, columns r of b, and 2q, 2q + 1 of z."""
    bf16, shape = bool(data(BF16)), data(z[0]).shape
    halves = [numbers_of_pairs(np.broadcast_to(data(words), shape).reshape(-1, 32), bf16) for words in (*left, b0, b1)]
    lane = np.arange(32)
    r, q = lane // 4, lane % 4
    warps = len(halves[0])
    a, b, sums = np.zeros((warps, 16, 16)), np.zeros((warps, 16, 8)), np.zeros((warps, 16, 8))
    for e in range(2):
        for i in range(4):
            a[:, r + 8 * (i % 2), 2 * q + 8 * (i // 2) + e] = halves[i][..., e]
        for i in range(2):
            b[:, 2 * q + 8 * i + e, r] = halves[4 + i][..., e]
    for i, numbers in enumerate(z):
        sums[:, r + 8 * (i // 2), 2 * q + i % 2] = data(numbers).reshape(-1, 32)
    sums += a @ b
    parts = (sums[:, r + 8 * (i // 2), 2 * q + i % 2].astype(np.float32).reshape(shape) for i in range(4))
    return tuple(tensor(part, tl.float32) for part in parts)


def store_word(address, word):
    memory.view(np.int32)[at(address, np.int32)] = data(word)


def store_byte(address, word):
    memory[at(address, np.uint8)] = data(word).astype(np.uint8)


def store_byte_where(address, word, keep):
    keep = data(keep).astype(bool)
    places = data(address)[keep]
    assert (places >= 0).all()
    memory[places] = data(word)[keep].astype(np.uint8)


def store_number(address, value):
    memory.view(words_of(value))[at(address, words_of(value))] = data(value)


def load_number(address, DTYPE):
    dtype = np.float64 if DTYPE.primitive_bitwidth == 64 else np.float32
    return tensor(memory.view(dtype)[at(address, dtype)], tl.float64 if dtype == np.float64 else tl.float32)


def add_number(address, value, keep):
    kept = data(keep).astype(bool)
    places = at(address, words_of(value))[kept]
    assert len(set(places.tolist())) == len(places), "two lanes add to one number"
    memory.view(words_of(value))[places] += data(value)[kept]


def load_vector(address, DTYPE):
    dtype = np.float64 if DTYPE.primitive_bitwidth == 64 else np.float32
    first = at(address, dtype)
    assert (data(address) % 16 == 0).all()
    kind = tl.float64 if dtype == np.float64 else tl.float32
    return tuple(tensor(memory.view(dtype)[first + e], kind) for e in range(16 // np.dtype(dtype).itemsize))


def store_vector(address, vector):
    dtype = words_of(vector[0])
    first = at(address, dtype)
    assert (data(address) % 16 == 0).all()
    for e, numbers in enumerate(vector):
        memory.view(dtype)[first + e] = data(numbers)


def load_words(address):
    first = at(address, np.uint32)
    assert (data(address) % 16 == 0).all()
    return tuple(tensor(memory.view(np.uint32)[first + e], tl.uint32) for e in range(4))


def store_words(address, *words):
    first = at(address, np.uint32)
    assert (data(address) % 16 == 0).all()
    for e, word in enumerate(words):
        memory.view(np.uint32)[first + e] = data(word)


def read_words(first, dtype, count):
    """`count` adjacent words of global memory from each of some addresses on, along a last axis."""
    size = np.dtype(dtype).itemsize
    assert (first % (count * size) == 0).all()
    begin = int(first.min())
    words = np.frombuffer(ctypes.string_at(begin, int(first.max()) - begin + count * size), np.uint8)
    places = (first - begin)[..., None] + np.arange(count * size)
    return words[places].view(dtype)


def words_at(pointer, dtype, count):
    """`count` adjacent words of global memory from each pointer on."""
    words = read_words(data(pointer).astype(np.int64), dtype, count)
    long = words.itemsize == 8
    kind, width = (tl.int64, np.int64) if long else (tl.int32, np.int32)
    return tuple(tensor(words[..., e].astype(width), kind) for e in range(count))


def write_words(pointer, words, keep):
    words = np.stack(np.broadcast_arrays(*map(data, words)), -1)
    kept, first = (np.broadcast_to(data(a), words.shape[:-1]) for a in (keep, pointer))
    assert (first.astype(np.int64) % (words.shape[-1] * words.itemsize) == 0).all()
    for place, run in zip(first[kept.astype(bool)].tolist(), words[kept.astype(bool)], strict=True):
        ctypes.memmove(place, run.tobytes(), run.nbytes)


def words_where(pointer, keep):
    """Four words of global memory from each pointer on where `keep`, otherwise zeros."""
    kept = np.broadcast_to(data(keep), data(pointer).shape).astype(bool)
    words = np.zeros((*kept.shape, 4), np.uint32)
    if kept.any():
        words[kept] = read_words(data(pointer)[kept].astype(np.int64), np.uint32, 4)
    return tuple(tensor(words[..., e], tl.uint32) for e in range(4))


GLOBAL = {
    "load_four": lambda pointer: words_at(pointer, np.int32, 4),
    "load_two": lambda pointer: words_at(pointer, np.int32, 2),
    "load_two_long": lambda pointer: words_at(pointer, np.int64, 2),
    "load_long": lambda pointer: words_at(pointer, np.int64, 1)[0],
    "load_word_or_less": lambda pointer, BYTES: words_at(pointer, np.uint16 if BYTES == 2 else np.int32, 1)[0],
    "store_four": write_words,
    "store_two": write_words,
}


loaded = np.zeros(SIZE // 4, bool)  # numbers between `load_numbers` and `store_numbers`


def words_of_numbers(address, dtype, count):
    """Indices of the 32-bit words of `count` numbers at each address; no word occurs twice."""
    size = count * np.dtype(dtype).itemsize
    assert (data(address) % size == 0).all()
    places = (data(address).astype(np.int64).ravel()[:, None] + np.arange(0, size, 4)) // 4
    assert (places >= 0).all()
    assert len(np.unique(places)) == places.size, "two lanes add to one number"
    return places


def load_numbers(address, DTYPE, COUNT):
    count = int(data(COUNT))
    dtype = np.float64 if DTYPE.primitive_bitwidth == 64 else np.float32
    places = words_of_numbers(address, dtype, count)
    assert not loaded[places].any(), "a number is added to twice at a time"
    loaded[places] = True
    first, kind = at(address, dtype), tl.float64 if dtype == np.float64 else tl.float32
    return tuple(tensor(memory.view(dtype)[first + e], kind) for e in range(count))


def store_numbers(address, numbers):
    dtype = words_of(numbers[0])
    places = words_of_numbers(address, dtype, len(numbers))
    assert loaded[places].all()
    loaded[places] = False
    for e, number in enumerate(numbers):
        memory.view(dtype)[at(address, dtype) + e] = data(number)


def prefetch(pointer, keep):
    assert data(pointer).shape == data(keep).shape


MODULES = (
    encode_chunks,
    lane_rows,
    lane_sums,
    staged_gather,
    staged_adjoint,
    scattered_loads,
    scattered_sums,
    sparse_sums,
    sums,
    warp_loads,
    warp_tiles,
)


NAMES = ("shared_begin", "copy_async", "load_word", "store_number", "load_number", "add_number")
NAMES += ("load_vector", "load_words", "store_vector", "store_words", "store_word", "load_half")
NAMES += ("load_numbers", "store_numbers", "store_byte", "store_byte_where", "prefetch")
NAMES += ("ballot", "count_bits", "permute_bytes", "multiply_add", "multiply_add_high", "hide")


def emulate(monkeypatch):
    """Make the kernels use this memory."""
    for module in MODULES:
        for name in NAMES:
            if hasattr(module, name):
                monkeypatch.setattr(module, name, globals()[name])
        for name in ("commit_copies", "wait_for_copies", "synchronize_warp"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda *_: None)
    monkeypatch.setattr(scattered_loads, "load_four_where", words_where)
    for name, function in GLOBAL.items():
        monkeypatch.setattr(staged_adjoint, name, function)
    assert hasattr(shared_memory, "LIBRARIES")
    # Few large programs add the partial sums, which other tests are about: each takes the interpreter 20 ms.
    monkeypatch.setattr(partial_sums, "FEW_ELEMENTS", 4096)
