"""Races in emulated shared memory: two warps access one word, one of them writes, and no barrier is between them.

Create `Races` before `shared_memory.emulate` is called.
"""

import numpy as np
from triton.runtime import interpreter

from . import shared_memory
from .shared_memory import SIZE, data

NONE, SEVERAL = -1, -2  # instead of the index of a warp


class Races:
    """Records, for every word, which warp has read and which has written it since the last barrier.

    Attributes
    ----------
    found : list of str
        What happened.
    begin : int
        The first byte of the program's memory.
    """

    def __init__(self, monkeypatch):
        self.readers, self.writers = np.full(SIZE // 4, NONE), np.full(SIZE // 4, NONE)
        self.found, self.begin = [], 0
        for name, size, access in (
            ("load_numbers", lambda _, dtype, count: int(data(count)) * dtype.primitive_bitwidth // 8, self.read),
            ("store_numbers", lambda _, numbers: len(numbers) * numbers[0].dtype.primitive_bitwidth // 8, self.write),
            ("load_words", lambda *_: 16, self.read),
            ("store_words", lambda *_: 16, self.write_equal),
            ("load_vector", lambda *_: 16, self.read),
            ("load_number", lambda _, dtype: dtype.primitive_bitwidth // 8, self.read),
        ):
            monkeypatch.setattr(shared_memory, name, recorded(getattr(shared_memory, name), size, access))
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_barrier", lambda _: self.synchronize())
        shared_begin = shared_memory.shared_begin

        def begin_program(size):
            self.synchronize()
            self.begin = SIZE - int(data(size))
            return shared_begin(size)

        monkeypatch.setattr(shared_memory, "shared_begin", begin_program)

    def synchronize(self):
        self.readers[:], self.writers[:] = NONE, NONE

    def accessed(self, address, size):
        """(words, warp of each)."""
        words = (data(address).astype(np.int64).ravel()[:, None] + np.arange(0, size, 4)) // 4
        if words.min() * 4 < self.begin:
            self.found.append("outside of the program's memory")
        return words.ravel(), np.repeat(np.arange(len(words)) // 32, words.shape[1])

    def read(self, address, size):
        words, warps = self.accessed(address, size)
        self.note("read after a write", self.writers[words], warps)
        before = self.readers[words]
        self.readers[words] = np.where((before == NONE) | (before == warps), warps, SEVERAL)

    def write(self, address, size):
        words, warps = self.accessed(address, size)
        if len(np.unique(words)) < len(words):
            self.found.append("two writes at once")
        self.note("write after a write", self.writers[words], warps)
        self.write_equal(address, size)

    def write_equal(self, address, size):
        """Writes of several warps, of equal values."""
        words, warps = self.accessed(address, size)
        self.note("write after a read", self.readers[words], warps)
        self.writers[words] = warps

    def note(self, what, before, warps):
        if ((before != NONE) & (before != warps)).any():
            self.found.append(what)


def recorded(function, size, access):
    """The function, which first records its accesses to `size` bytes from its first argument on."""

    def call(address, *rest):
        access(address, size(address, *rest))
        return function(address, *rest)

    return call
