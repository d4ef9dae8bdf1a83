"""Time gradients, sparse tensors and tables: ``python -m benchmarks.gradients [--cpu] [--record] [CASE ...]``.

On two GPUs: ``torchrun --nproc-per-node 2 -m benchmarks.gradients --record sharded``. CASE is one of `CASES`. Results
are checked before they are timed, and recorded if all cases run, or with --record. On CUDA, times are device times
(`benchmarks.gpu`), and the floor is the time to move the bytes of data and result; on the CPU, methods take turns and
each counts with its shortest time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import scipy.sparse
import torch
import torch.distributed as dist

import sjlt
from sjlt.attribution import TrakProjector

from .baselines import normal
from .run import save

Call = Callable[[], Any]
TURNS = 7
RESULTS = Path(__file__).parent / "results"


def timed(calls: dict[str, Call], device: str, turns: int = TURNS) -> dict[str, float]:
    """Milliseconds of each call."""
    if device == "cuda":
        from .gpu import device_ms

        return {name: device_ms(lambda _, call=call: call(), [None]) for name, call in calls.items()}
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(turns):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            least[name] = min(least[name], 1e3 * (time.perf_counter() - start))
    return least


def close(result: torch.Tensor, expected: torch.Tensor, error: float) -> None:
    found = float((result.double() - expected.double()).norm() / expected.double().norm())
    assert found <= error, f"error {found:.2e}, allowed is {error:.1e}"


def peak_mib(device: str) -> float:
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


# ------------------------------------------------------------------------------------- cases


def csr(device: str) -> dict[str, float]:
    """A CSR tensor of 100 nonzeros per row to 512 components, compared with SciPy input or products with a stored S."""
    n, d, k = (200_000, 1 << 20, 512) if device == "cuda" else (20_000, 100_000, 512)
    generator = torch.Generator().manual_seed(0)
    columns = torch.randint(d, (n, 100), generator=generator).sort(1).values.flatten()
    indptr = torch.arange(0, 100 * n + 1, 100)
    x = torch.sparse_csr_tensor(indptr, columns, torch.randn(100 * n, generator=generator), (n, d)).to(device)
    S = sjlt.Sketch(d, k, seed=1)
    result = S.project(x)
    assert all(torch.equal(S.project(x), result) for _ in range(5)), "runs differ"
    calls: dict[str, Call] = {"sjlt": lambda: S.project(x)}
    host = scipy.sparse.csr_array((x.values().cpu().numpy(), columns.numpy(), indptr.numpy()), (n, d))
    close(result.cpu(), torch.from_numpy(S.project(host)), 1e-6)
    if device == "cpu":
        calls["sjlt of SciPy's matrix"] = lambda: S.project(host)
        return timed(calls, device)
    stored = torch.from_numpy(S.toarray("float32").T.copy()).cuda()
    close(torch.sparse.mm(x, stored), result, 1e-4)
    calls["cuSPARSE, dense S"] = lambda: torch.sparse.mm(x, stored)
    table = S.to_scipy("csr", "float32").T.tocsr()
    parts = (torch.from_numpy(part).cuda() for part in (table.indptr, table.indices, table.data))
    sparse_S = torch.sparse_csr_tensor(*parts, table.shape)
    calls["cuSPARSE, sparse S"] = lambda: torch.sparse.mm(x, sparse_S).to_dense()
    return {**timed(calls, device), "floor": floor_ms(x.values(), x.col_indices(), result)}


def floor_ms(*tensors: torch.Tensor) -> float:
    from .gpu import copy_bandwidth

    return sum(t.nbytes for t in tensors) / copy_bandwidth() * 1e3


def trak(device: str) -> dict[str, float]:
    """Gradients of the size of ResNet-18's, compared with TRAK's BasicProjector (a tenth of the size on the CPU)."""
    from trak.projectors import BasicProjector

    d, batch, k = (11_689_512, 32, 2048) if device == "cuda" else (1_168_951, 8, 512)
    x = normal((batch, d), torch.float32, device)
    ours = TrakProjector(d, k, seed=1, device=device)
    theirs = BasicProjector(d, k, 1, "rademacher", torch.device(device))
    for projector in (ours, theirs):  # norms are preserved up to a factor of sqrt(k)
        ratio = float(projector.project(x, 0).norm() / x.norm()) / k**0.5
        assert abs(ratio - 1) < 0.05, ratio
    calls = {"sjlt": lambda: ours.project(x, 0), "BasicProjector": lambda: theirs.project(x, 0)}
    return timed(calls, device, 2)


def fast_jl_shape(device: str) -> dict[str, float]:
    """The published shape of TRAK's CUDA kernel: a batch of 8 gradients of 1.24e8 parameters to 8192 (CUDA)."""
    x = normal((8, 124_000_000), torch.float16, device)
    projector = TrakProjector(x.shape[1], 8192, nnz=1, device=device)
    return timed({"sjlt": lambda: projector.project(x, 0)}, device)


def count_sketch(device: str) -> dict[str, float]:
    """5 x 2^20 tables of 1.24e8 elements, and the 1000 largest."""
    d = 124_000_000
    x = normal((d,), torch.float32, device)
    places = torch.randperm(d, generator=torch.Generator().manual_seed(1))[:1000].to(device)
    x[places] *= 1000
    C = sjlt.CountSketch(d, 5, 2**20, seed=1)
    C.sketch(x[: 1 << 20], offset=0)
    before = peak_mib(device)
    table = C.sketch(x)
    _, found = C.topk(table, 1000)
    more = peak_mib(device) - before
    shared = len(set(found.tolist()) & set(places[x[places].abs() > 200].tolist()))
    assert shared >= int((x[places].abs() > 200).sum()) - 5, shared
    indices = found[:1000]
    calls = {
        "sketch": lambda: C.sketch(x),
        "topk": lambda: C.topk(table, 1000),
        "query": lambda: C.query(table, indices),
    }
    return {
        **timed(calls, device, 2),
        "MiB beyond the vector": more,
        "MiB that hashes of 12 bytes need": 60 * d / 2**20,
    }


def accumulator(device: str) -> dict[str, float]:
    """16 vectors of 2^20 features in 64 blocks, compared with a single projection."""
    x = normal((16, 1 << 20), torch.float32, device)
    S = sjlt.Sketch(1 << 20, 1024, seed=1)

    def streamed() -> Any:
        total = sjlt.Accumulator(S, (16,), dtype="float32", device=device)
        for start in range(0, 1 << 20, 1 << 14):
            total.update(start, x[:, start : start + (1 << 14)])
        return total.sum

    close(streamed(), S.project(x), 1e-5)
    return timed({"in blocks": streamed, "at once": lambda: S.project(x)}, device)


def sharded(device: str) -> dict[str, float]:
    """A tree of 1.5e9 parameters (GPT-2 XL) sharded over the processes of torchrun (1/100 of the size on the CPU)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (world,))
    width, layers = (1600, 48) if device == "cuda" else (160, 48)
    shapes = [(50_304, width), *[(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * layers]
    results: dict[str, float] = {}
    for batch in (1, 8):
        for nnz in (1, 4):
            dims = [(batch, *shape) for shape in shapes]
            locals_ = [torch.full((b, n // world, m), 1.0, device=device) for b, n, m in dims]
            tree = [DTensor.from_local(t, mesh, [Shard(1)], run_check=False) for t in locals_]
            d = sum(n * m for _, n, m in dims)
            S = sjlt.Sketch(d, 4096, nnz=nnz, seed=1)
            half = sjlt.Sketch(sum(t[0].numel() for t in locals_), 4096, nnz=nnz, seed=1)
            S.project_tree(tree, batched=True)
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            before = peak_mib(device)
            y = S.project_tree(tree, batched=True)
            more = peak_mib(device) - before

            def alone(half: Any = half, tensors: Any = locals_) -> None:
                dist.all_reduce(half.project_tree(tensors, batched=True))

            def whole(S: Any = S, tree: Any = tree) -> None:
                S.project_tree(tree, batched=True)

            name = f"batch {batch}, nnz {nnz}"
            for label, ms in _walls({"sjlt": whole, "half a tree + all_reduce": alone}, device).items():
                results[f"{name}: {label}"] = ms
            results[f"{name}: MiB beyond the result"] = more - y.nbytes / 2**20
    dist.destroy_process_group()
    return results if rank == 0 else {}


def _walls(calls: dict[str, Call], device: str) -> dict[str, float]:
    """Minimum milliseconds from a barrier to the end of each call, as sums between GPUs involve the host."""
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(TURNS):
        for name, call in calls.items():
            dist.barrier()
            start = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            least[name] = min(least[name], 1e3 * (time.perf_counter() - start))
    return least


CASES = {case.__name__: case for case in (csr, trak, fast_jl_shape, count_sketch, accumulator, sharded)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gradients", description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", help=f"any of {', '.join(CASES)}; default: all for one device")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--record", action="store_true", help="add the results of the given cases to the record")
    arguments = parser.parse_args()
    if unknown := set(arguments.cases) - CASES.keys():
        parser.error(f"no such cases: {', '.join(sorted(unknown))}")
    device = "cpu" if arguments.cpu else "cuda"
    alone = ["csr", "trak", "count_sketch", "accumulator", *(["fast_jl_shape"] if device == "cuda" else [])]
    results = {}
    for name in arguments.cases or alone:
        results[name] = CASES[name](device)
        if results[name]:
            print(json.dumps({name: results[name]}, indent=1), flush=True)
    if (arguments.record or not arguments.cases) and any(results.values()):
        path = RESULTS / f"gradients_{_device_name(device)}.json"
        held = json.loads(path.read_text()) if path.exists() else {}
        save(path, {**held, **results, "environment": environment(device)})


def _device_name(device: str) -> str:
    from . import gpu

    return gpu.short_name() if device == "cuda" else "cpu"


def environment(device: str) -> dict[str, Any]:
    from . import gpu, run

    return gpu.environment() if device == "cuda" else run.environment()


if __name__ == "__main__":
    main()
