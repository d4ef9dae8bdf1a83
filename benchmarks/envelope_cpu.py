"""Time products of random shapes on the CPU: ``python -m benchmarks.envelope_cpu SEED [SECONDS] [--save]`` (Linux).

Shapes are drawn from SEED: one vector or a small batch, embeddings and their adjoints, tall matrices, few long vectors;
k a power of two, a multiple of 64, or anything; nnz 1 to 8; fp32, bf16, fp16, fp64; contiguous, sliced or transposed
data; 1 KB to 200 MB. Results are compared with the product with the stored sketch before they are timed.

A row has the time of sjlt, which generates the entries, over the best rival, whose matrix is stored: SciPy's CSR,
scikit-learn's fitted transformer, and torch's GEMM in the data's precision and in bf16 (of data that is bf16 already).
Before these, the products of `NAMED` are timed, each beside what it must keep up with.

Libraries run in processes of their own, in turns, since their thread pools disturb each other; a time is the least of
several calls. With ``--save`` the results go to benchmarks/results as well.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import random
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from scipy.linalg import clarkson_woodruff_transform

import sjlt

from .envelope import log_uniform, product_of
from .envelope_tables import SLOWER, quantile
from .run import environment, save

RESULTS = Path(__file__).parent / "results"
MIN_BYTES, MAX_BYTES = 1 << 10, 200e6
MAX_STORED = 200e6  # bytes of a rival's dense matrix
LIMITS = {"float64": 1e-13, "float32": 1e-6, "float16": 1e-3, "bfloat16": 1e-2}  # of the error, relative to the norm
CALL_SECONDS, ROUNDS = 0.15, 2  # of one method at a time; turns of each method
RIVALS = ("scipy", "scikit-learn", "gemm", "gemm bf16")
OTHERS = ("clarkson-woodruff", "memcpy")  # memcpy of the data, on one thread; both beside the products of `NAMED` only


@dataclass(frozen=True)
class Shape:
    """A product. kind : one of the names in `draw`.  padding : of rows, in numbers; None for transposed data."""

    kind: str
    n: int
    d: int
    k: int
    nnz: int
    dtype: str
    padding: int | None
    stacks: int = 1

    @property
    def bytes(self) -> int:
        return self.n * max(self.d, self.k) * {"float64": 8, "float32": 4}.get(self.dtype, 2)


class Named(NamedTuple):
    """A product, what its time is compared with (a method, the best rival, another product), and the most it may be."""

    shape: Shape
    beside: str | Shape
    most: float


def _named() -> Iterator[Named]:
    embed = Shape("embed", 20_000, 768, 256, 8, "float32", 0)
    yield Named(replace(embed, dtype="float16"), embed, 1.5)
    for n in (64, 1):
        yield Named(Shape("batch", n, 768, 256, 4, "float32", 0), "best", 1.05)
    for d, k in ((384, 64), (768, 128)):
        yield Named(Shape("embed", 20_000, d, k, 4, "float32", 0), "gemm bf16", 1.05)
    for nnz, copies in ((1, 5), (4, 8)):
        yield Named(Shape("few", 1, 10_000_000, 4096, nnz, "float32", 0), "memcpy", copies)
    for m, n, k in ((200_000, 50, 400), (1_000_000, 20, 200)):
        yield Named(Shape("tall", n, m, k, 1, "float64", None), "clarkson-woodruff", 1 / 1.5)
    tall = Shape("tall", 256, 200_000, 1024, 4, "float32", None)
    yield Named(replace(tall, stacks=4), "scipy", 1 / 2.5)
    yield Named(replace(tall, stacks=4), tall, 1.4)


NAMED = tuple(_named())


def draw(rng: random.Random) -> Shape:
    """A random shape within the sizes that are measured."""
    while True:
        kind = rng.choice(["batch", "embed", "embed", "adjoint", "tall", "few"])
        k = rng.choice([2 ** rng.randint(4, 11), 64 * rng.randint(1, 16), log_uniform(rng, 16, 2048)])
        nnz = min(rng.choice([1, 2, 3, 4, 4, 4, 8]), k // -(-k // 128))
        dtype = rng.choice(["float32", "float32", "float32", "bfloat16", "float16", "float64"])
        d = rng.choice([384, 512, 768, 1000, 1024, 1536, 3072, 4096, log_uniform(rng, 64, 8192)])
        if kind == "batch":
            n = rng.choice([1, 2, 8, 16, 32, 64, 100, 128])
        elif kind in ("embed", "adjoint"):
            n = log_uniform(rng, 200, 50_000)
        elif kind == "tall":
            d, n = log_uniform(rng, 10_000, 1_000_000), rng.choice([1, 8, 20, 50, 64, 100, 256, 300])
        else:
            d, n = log_uniform(rng, 100_000, 10_000_000), rng.choice([1, 2, 4, 8])
        padding = None if kind == "tall" else rng.choice([0, 0, 0, rng.choice([1, 8, 13]), None])
        shape = Shape(kind, n, d, k, nnz, dtype, padding)
        if MIN_BYTES <= shape.bytes <= MAX_BYTES:
            return shape


def data_of(shape: Shape, seed: int) -> torch.Tensor:
    """Normal numbers: the vectors in rows."""
    width = shape.k if shape.kind == "adjoint" else shape.d
    rows = (width, shape.n) if shape.padding is None else (shape.n, width + shape.padding)
    data = torch.randn(*rows, generator=torch.Generator().manual_seed(seed)).to(getattr(torch, shape.dtype))
    return data.T if shape.padding is None else data[:, :width]


def sketch_of(shape: Shape, seed: int) -> sjlt.Sketch:
    return sjlt.Sketch(shape.d, shape.k, nnz=shape.nnz, stacks=shape.stacks, seed=seed)


def array_of(x: torch.Tensor) -> np.ndarray:
    return x.numpy() if x.dtype != torch.bfloat16 else x.float().numpy()


def calls(shape: Shape, seed: int) -> dict[str, Callable[[], Any]]:
    """The methods that can compute the product: results have the vectors in rows, or for "tall" in columns."""
    S, x = sketch_of(shape, seed), data_of(shape, seed)

    def product(matrix: Any, data: Any) -> Callable[[], Any]:
        return partial(product_of(shape.kind, matrix), data)

    methods = {"sjlt": product(S, x)}
    if shape.dtype != "bfloat16":
        methods["memcpy"] = partial(np.copyto, np.empty_like(x.numpy()), x.numpy())
    if shape.kind == "tall":
        methods["clarkson-woodruff"] = partial(clarkson_woodruff_transform, array_of(x).T, shape.k, seed)
    if shape.dtype in ("float32", "float64"):
        array, stored = array_of(x), S.to_scipy("csr", dtype=shape.dtype)
        methods["scipy"] = product(stored, array)
        if shape.kind != "adjoint":
            methods["scikit-learn"] = scikit_learn(stored, array)
    if shape.d * shape.k * x.itemsize <= MAX_STORED:
        dense = torch.from_numpy(S.toarray(np.float32))
        methods["gemm"] = product(dense.to(x.dtype), x)
        methods["gemm bf16"] = product(dense.bfloat16(), x.bfloat16())
    return methods


def scikit_learn(stored: Any, x: np.ndarray) -> Callable[[], Any]:
    from sklearn.random_projection import SparseRandomProjection

    transformer = SparseRandomProjection(stored.shape[0], dense_output=True)
    transformer.components_, transformer.n_features_in_ = stored, stored.shape[1]
    return lambda: transformer.transform(x)


def check(shape: Shape, seed: int, call: Callable[[], Any]) -> None:
    """Compare a sample of the vectors with fp64 products."""
    x = array_of(data_of(shape, seed)[:20].to(torch.float64))
    S = sketch_of(shape, seed).to_scipy("csr")
    want = x @ S if shape.kind == "adjoint" else (S @ x.T).T
    result = torch.as_tensor(call())
    result = (result.T if shape.kind == "tall" else result)[:20].to(torch.float64).numpy()
    error = np.linalg.norm(result - want) / np.linalg.norm(want)
    if not error <= LIMITS[shape.dtype]:
        raise RuntimeError(f"{shape}: the relative error is {error:.1e}, allowed is {LIMITS[shape.dtype]:.0e}")


_kept: dict[str, Any] = {}  # a worker's methods for the shape at hand


def time_of(shape: Shape, seed: int, name: str) -> float | None:
    """The least seconds of a call of one method, in the process that calls this; None if there is no such method."""
    if _kept.get("shape") != (shape, seed):
        _kept.clear()
        _kept.update(shape=(shape, seed), calls=calls(shape, seed))
        if "sjlt" in name:
            check(shape, seed, _kept["calls"]["sjlt"])
    call = _kept["calls"].get(name)
    if call is None:
        return None
    call()
    least, end = math.inf, time.perf_counter() + CALL_SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        call()
        least = min(least, time.perf_counter() - start)
    return least


def least_times(shape: Shape, seed: int, pools: dict[str, Any], names: Iterable[str]) -> dict[str, float]:
    """The least seconds of each method that there is, in turns."""
    times: dict[str, float] = {}
    for _ in range(ROUNDS):
        for name in names:
            seconds = pools[name].apply(time_of, (shape, seed, name))
            if seconds is not None:
                times[name] = min(seconds, times.get(name, math.inf))
    return times


def measure(shape: Shape, seed: int, pools: dict[str, Any]) -> dict[str, Any]:
    times = least_times(shape, seed, pools, ("sjlt", *RIVALS))
    rivals = {name: seconds for name, seconds in times.items() if name != "sjlt"}
    best = min(rivals, key=rivals.__getitem__) if rivals else None
    precise = [s for name, s in rivals.items() if name != "gemm bf16" or shape.dtype == "bfloat16"]
    ratios = {"of best": rivals[best] if best else math.nan, "of best as precise": min(precise, default=math.nan)}
    return {**asdict(shape), "seconds": times, "best": best} | {name: times["sjlt"] / s for name, s in ratios.items()}


def measure_named(named: Named, seed: int, pools: dict[str, Any]) -> dict[str, Any]:
    """The row of `measure`, with what is compared, the ratio of the times, and the most it may be."""
    shape, beside, most = named
    if isinstance(beside, Shape):
        times = {"sjlt": math.inf}
        other = math.inf
        for _ in range(ROUNDS):
            times["sjlt"] = min(times["sjlt"], *least_times(shape, seed, pools, ["sjlt"]).values())
            other = min(other, *least_times(beside, seed, pools, ["sjlt"]).values())
        name = f"the same in {beside.dtype}" if beside.dtype != shape.dtype else "the same, one stack"
    else:
        names = RIVALS if beside == "best" else (beside,)
        times = least_times(shape, seed, pools, ("sjlt", *names))
        name = min((n for n in names if n in times), key=times.__getitem__)
        other = times[name]
    return {**asdict(shape), "seconds": times, "best": name, "of best": times["sjlt"] / other, "most": most}


def describe(row: dict[str, Any]) -> str:
    layout = "transposed" if row["padding"] is None else f"padded by {row['padding']}"
    shape = f"{row['kind']} ({row['n']}, {row['d']}) -> {row['k']} nnz {row['nnz']} {row['dtype']} {layout}"
    if row["stacks"] > 1:
        shape += f", {row['stacks']} stacks"
    return f"{shape}: {row['seconds']['sjlt'] * 1e3:.3f} ms, {row['of best']:.2f} of {row['best']}" + (
        f", at most {row['most']:.2f}" if "most" in row else ""
    )


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table by kind and dtype, and the ten worst shapes."""
    sides = {"of best": "of the best rival", "of best as precise": "of the best in the data's precision"}
    columns = [column for side in sides.values() for column in (f"{side}: median, 90 %, worst", "slower")]
    table = Table("shapes", "number", *columns, box=box.SIMPLE)
    groups: dict[str, Callable[[dict[str, Any]], bool]] = {"all": lambda row: True}
    for column in ("kind", "dtype"):
        for value in sorted({row[column] for row in rows}):
            groups[value] = lambda row, column=column, value=value: row[column] == value
    for name, belongs in groups.items():
        members = [row for row in rows if belongs(row) and row["best"]]
        cells = []
        for side in sides:
            ratios = [row[side] for row in members if row[side] == row[side]]
            cells.append(" ".join(f"{quantile(ratios, share):.2f}" for share in (0.5, 0.9, 1)) if ratios else "")
            cells.append(f"{sum(ratio > SLOWER for ratio in ratios)} of {len(ratios)}")
        table.add_row(name, str(len(members)), *cells)
    console = Console(width=120)
    console.print(table)
    for row in sorted((row for row in rows if row["best"]), key=lambda row: -row["of best"])[:10]:
        console.print(describe(row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int)
    parser.add_argument("seconds", type=float, nargs="?", default=300)
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    rng, rows = random.Random(arguments.seed), []
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as ours, context.Pool(1) as stored, context.Pool(1) as gemm:
        pools = {"sjlt": ours, "gemm": gemm, "gemm bf16": gemm}
        pools |= dict.fromkeys(("scipy", "scikit-learn", *OTHERS), stored)
        named = [measure_named(each, arguments.seed, pools) for each in NAMED]
        print(*map(describe, named), sep="\n", flush=True)
        end = time.monotonic() + arguments.seconds
        while time.monotonic() < end:
            rows.append(measure(draw(rng), rng.getrandbits(32), pools))
            print(describe(rows[-1]), flush=True)
    show(rows)
    if arguments.save:
        save(RESULTS / "envelope_cpu.json", {**environment(), "seed": arguments.seed, "named": named, "rows": rows})


if __name__ == "__main__":
    main()
