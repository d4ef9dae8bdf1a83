"""Time products of random shapes on a GPU: ``python -m benchmarks.envelope SEED [SECONDS] [--portable] [--save]``.

Shapes are drawn from SEED: embeddings and their adjoints, tall matrices, few vectors, and any shape; k a power of two,
a multiple of 64, or any integer; nnz 1 to 8; fp32, bf16, fp16; contiguous rows, slices with padded or odd row strides,
transposed data; 1 MB to 4 GB. Results are compared with sums over the sketch's entries before they are timed.

A row has the device time (in a CUDA graph) over the memory floor, (bytes of data read once + bytes of result written
once) / the bandwidth of a large device copy, and the time of an eager call over the best of torch: cuBLAS with a stored
dense sketch in the data's precision and, for fp32, in tf32; cuSPARSE with a stored CSR sketch, in fp32. ``--portable``
runs only the portable kernels. With ``--save`` the results also go to benchmarks/results.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton.testing
from rich import box
from rich.console import Console
from rich.table import Table

import sjlt

from .envelope_tables import HEADINGS, describe, ratios, summary, worst
from .gpu import short_name
from .run import save, versions

RESULTS = Path(__file__).parent / "results"
MIN_BYTES, MAX_BYTES = 1 << 20, 4e9
LAUNCH_MS = 0.004  # allowed for every product in addition to the floor
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}  # of the error, relative to the result's norm
RIVAL_LIMIT = 3e-2  # of a rival's error, for bf16 sums and tf32
CHECKED = 64  # maximum number of vectors, from the first to the last, whose results are checked
CHECKED_COLUMNS = 1 << 18  # maximum number of columns that are nonzero in the check


@dataclass(frozen=True)
class Shape:
    """A product. kind : one of the names in `draw`.  padding : elements between rows; None for transposed data."""

    kind: str
    n: int
    d: int
    k: int
    nnz: int
    dtype: torch.dtype
    padding: int | None

    @property
    def bytes(self) -> int:
        """Bytes of the data and of the result."""
        return self.n * (self.d + self.k) * self.dtype.itemsize


def log_uniform(rng: random.Random, low: int, high: int) -> int:
    return round(math.exp(rng.uniform(math.log(low), math.log(high))))


def draw(rng: random.Random) -> Shape:
    """A random shape within the measured range."""
    while True:
        kind = rng.choice(["embed", "embed", "tall", "few", "adjoint", "any"])
        k = rng.choice([2 ** rng.randint(4, 12), 64 * rng.randint(1, 32), log_uniform(rng, 16, 4096)])
        nnz = min(rng.choice([1, 2, 3, 4, 4, 4, 8]), k // -(-k // 128))
        dtype = rng.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
        if kind in ("embed", "adjoint"):
            d = rng.choice([384, 512, 768, 1000, 1024, 1536, 3072, 4096, log_uniform(rng, 64, 8192)])
            n = log_uniform(rng, 64, 1 << 20)
        elif kind == "tall":
            d = log_uniform(rng, 1 << 14, 1 << 22)
            n = rng.choice([1, 8, 64, 100, 256, 300, 512, 1000, 1024, log_uniform(rng, 1, 2048)])
        elif kind == "few":
            d, n = log_uniform(rng, 1 << 20, 1 << 28), rng.choice([1, 2, 4, 8, 16, 32, 64, 100])
        else:
            d, n = log_uniform(rng, 64, 1 << 20), log_uniform(rng, 1, 1 << 18)
        padding = rng.choice([0, 0, 0, rng.choice([1, 8, 13]), None])
        shape = Shape(kind, n, d, k, nnz, dtype, None if kind == "tall" else padding)
        if MIN_BYTES <= n * d * dtype.itemsize <= MAX_BYTES and n * k * dtype.itemsize <= MAX_BYTES:
            return shape


def data_of(shape: Shape) -> torch.Tensor:
    """Normal data with vectors as rows."""
    width = shape.k if shape.kind == "adjoint" else shape.d
    if shape.padding is None:
        return torch.randn(width, shape.n, device="cuda", dtype=shape.dtype).T
    return torch.randn(shape.n, width + shape.padding, device="cuda", dtype=shape.dtype)[:, :width]


def product_of(kind: str, matrix: Any) -> Callable[[Any], Any]:
    """The product of data with a sketch or a stored matrix (k, d), for a kind of `Shape`."""
    if kind == "adjoint":
        return lambda x: x @ matrix
    if kind == "tall":
        return lambda x: matrix @ x.T
    return lambda x: x @ matrix.T


def stored_csr(shape: Shape, sketch: sjlt.Sketch) -> torch.Tensor:
    rows, signs = (torch.from_numpy(a).to("cuda") for a in sketch.entries(0, shape.d))
    columns = torch.arange(shape.d, device="cuda").expand_as(rows)
    values = (signs * shape.nnz**-0.5).to(shape.dtype)
    stored = torch.sparse_coo_tensor(torch.stack([rows.flatten(), columns.flatten()]), values.flatten(), sketch.shape)
    return stored.coalesce().to_sparse_csr()


def check(shape: Shape, sketch: sjlt.Sketch, x: torch.Tensor, call: Callable[..., torch.Tensor], limit: float) -> None:
    """Compare some vectors of a result with fp64 sums over the entries of the first CHECKED_COLUMNS columns."""
    if shape.d > CHECKED_COLUMNS:
        x = x.clone()
        x[:, CHECKED_COLUMNS:] = 0
    result = call(x)
    some = torch.linspace(0, shape.n - 1, min(shape.n, CHECKED), device=x.device, dtype=torch.float64).long()
    x = x[some].double()
    result = (result.T if shape.kind == "tall" else result)[some].double()
    want, columns = torch.zeros_like(result), min(shape.d, CHECKED_COLUMNS)
    rows, signs = (torch.from_numpy(a).to("cuda") for a in sketch.entries(0, columns))
    for row, sign in zip(rows, signs.double(), strict=True):
        if shape.kind == "adjoint":
            want += x[:, row] * sign
        else:
            want.index_add_(1, row, x[:, :columns] * sign)
    want *= shape.nnz**-0.5
    error = ((result - want).norm() / want.norm()).item()
    if not error <= limit:
        raise RuntimeError(f"{shape}: the relative error is {error:.1e}, allowed is {limit:.0e}")


def time_of(call: Callable[[], Any], ms: int = 24) -> float:
    """The least of three medians. Other processes may keep the host busy for a while, which delays eager calls."""
    call()
    torch.cuda.synchronize()
    return min(float(triton.testing.do_bench(call, warmup=3, rep=ms // 3, return_mode="median")) for _ in range(3))


def graph_time(call: Callable[[], Any]) -> float:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        call()
    return time_of(graph.replay)


def copy_bandwidth() -> float:
    """Bytes read and written per millisecond of a large copy."""
    source = torch.empty(1 << 29, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / time_of(lambda: target.copy_(source), 60)


def rivals(shape: Shape, sketch: sjlt.Sketch, x: torch.Tensor) -> dict[str, float]:
    """Times of torch's alternatives, each checked first."""
    times: dict[str, float] = {}
    if shape.k * shape.d * shape.dtype.itemsize < 1e9 and shape.k * shape.d < 1e8:
        rows, signs = (torch.from_numpy(a).to("cuda") for a in sketch.entries(0, shape.d))
        dense = torch.zeros(sketch.shape, dtype=shape.dtype, device="cuda")
        dense.scatter_(0, rows, (signs * shape.nnz**-0.5).to(shape.dtype))
        call = product_of(shape.kind, dense)
        for name, precision in (("dense", "highest"), ("tf32", "high")):
            if name == "dense" or shape.dtype == torch.float32:
                torch.set_float32_matmul_precision(precision)
                check(shape, sketch, x, call, RIVAL_LIMIT)
                times[name] = time_of(lambda: call(x))
        torch.set_float32_matmul_precision("highest")
    if shape.dtype == torch.float32 and shape.kind in ("tall", "few", "any") and shape.d * shape.nnz < 2e7:
        stored = stored_csr(shape, sketch)
        times["csr"] = time_of(lambda: stored @ x.T)
    return times


def measure(shape: Shape, seed: int, bandwidth: float) -> dict[str, Any]:
    x, sketch = data_of(shape), sjlt.Sketch(shape.d, shape.k, nnz=shape.nnz, seed=seed)
    call = product_of(shape.kind, sketch)
    check(shape, sketch, x, call, LIMITS[shape.dtype])
    floor = shape.bytes / bandwidth
    device, eager, others = graph_time(lambda: call(x)), time_of(lambda: call(x)), rivals(shape, sketch, x)
    best = min(others.values(), default=math.nan)
    numbers = {"floor": floor, "device": device, "eager": eager, "rivals": others, "of floor": device / floor}
    numbers |= {"of floor and launch": device / (floor + LAUNCH_MS), "of best": eager / best}
    return {**asdict(shape), "dtype": str(shape.dtype)[6:], **numbers}


def count_kernels() -> int:
    """The number of kernels that this process has compiled or loaded for products."""
    from sjlt.backends.triton import launcher

    return len({id(compiled) for compiled, _ in launcher._compiled.values()})


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table by kind, size and k, and the shapes that are farthest from the floor."""
    table = Table(*HEADINGS, box=box.SIMPLE)
    for cells in summary(rows):
        table.add_row(*cells)
    console = Console(width=140)
    console.print(table)
    for row in worst(rows):
        console.print(f"{describe(row)}: {ratios(row)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int)
    parser.add_argument("seconds", type=float, nargs="?", default=300)
    parser.add_argument("--portable", action="store_true", help="run only the portable kernels")
    parser.add_argument("--save", action="store_true")
    arguments = parser.parse_args()
    if arguments.portable:
        from sjlt.backends.triton import device

        described = device.describe(torch.device("cuda", 0))._replace(hopper=False)
        device.describe = lambda _: described  # type: ignore[assignment]
    bandwidth = copy_bandwidth()
    rng, rows, end = random.Random(arguments.seed), [], time.monotonic() + arguments.seconds
    while time.monotonic() < end:
        shape, seed = draw(rng), rng.getrandbits(32)
        torch.manual_seed(seed)
        rows.append(measure(shape, seed, bandwidth))
        print(f"{describe(rows[-1])}: {ratios(rows[-1])}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    show(rows)
    kernels = count_kernels()
    print(f"{kernels} distinct kernels for {len(rows)} shapes")
    if arguments.save:
        name = "envelope_portable" if arguments.portable else "envelope"
        device_name = torch.cuda.get_device_name()
        record = {"device": device_name, "seed": arguments.seed, "copy bytes per ms": bandwidth, "kernels": kernels}
        record["rows"] = rows
        save(RESULTS / f"{name}_{short_name()}.json", {**versions("torch", "triton"), **record})


if __name__ == "__main__":
    main()
