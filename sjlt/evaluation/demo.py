"""The comparison behind ``sjlt demo``: real vectors projected by sjlt and by scikit-learn's SparseRandomProjection.

The vectors are overlapping 16 x 16 patches (768 values in [0, 1]) of the two photographs that ship with scikit-learn.
Each library reads them from a file and writes its result to another file, in a separate process; sjlt uses a GPU if
there is one. Distances are compared on the CPU, with the same sketches.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from rich.table import Table

Result = TypeVar("Result")

PATCH = 16
FEATURES = PATCH * PATCH * 3
N_COMPONENTS, NNZ = 256, 4
RUNS = 3  # from file to file, with seeds 0, 1, ...
MATRICES = 400  # for distances, with seeds 0, 1, ...; the results of a few would depend too much on chance
PAIRS, PAIRS_SEED = 2_000, 1
QUERIES, QUERIES_SEED = 500, 2
NEIGHBOURS = 10
QUANTILES = (0.001, 0.025, 0.5, 0.975, 0.999)
MAX_STRIDE = 32  # gives 520 vectors, enough for the queries
FILES = ("patches.npy", "first.npy", "sjlt.npy", "sjlt.npy.json", "scikit-learn.npy")
FIRST_ROWS = 4096  # of the first call, which compiles or loads machine code


@dataclass(frozen=True)
class Run:
    """One projection of the whole file, in a separate process."""

    first_seconds: float  # imports and a first call on FIRST_ROWS vectors
    seconds: float  # from file to file
    peak_bytes: int


@dataclass(frozen=True)
class Side:
    """The results of one library."""

    name: str  # with the GPU, if one was used
    nonzeros: str  # per column of its matrix
    runs: tuple[Run, ...]
    recalls: tuple[float, ...]  # share of nearest neighbours kept, per run
    ratios: np.ndarray  # |Sx - Sy| / |x - y|, of shape (MATRICES, pairs)


@dataclass(frozen=True)
class Report:
    """The results of the demo."""

    n: int  # number of vectors
    sides: tuple[Side, ...]


# ------------------------------------------------------------------------------------- the vectors


def write_patches(path: Path, stride: int) -> int:
    """Write the patches whose corners lie on a grid of `stride` pixels, in fp32; return their number."""
    from numpy.lib.stride_tricks import sliding_window_view
    from sklearn.datasets import load_sample_images

    grids = [
        sliding_window_view(image, (PATCH, PATCH), axis=(0, 1))[::stride, ::stride].transpose(0, 1, 3, 4, 2)
        for image in load_sample_images().images  # (427, 640, 3) uint8
    ]
    n = sum(int(grid.shape[0] * grid.shape[1]) for grid in grids)
    header = {"descr": np.dtype(np.float32).str, "fortran_order": False, "shape": (n, FEATURES)}
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        for row in itertools.chain(*grids):
            file.write((row.reshape(-1, FEATURES) / np.float32(255)).tobytes())
    return n


# ------------------------------------------------------------------------------------- the two libraries


class _Sjlt:
    name, nonzeros = "sjlt", f"{NNZ}, exactly"

    @staticmethod
    def project_file(source: Path, out: Path, seed: int) -> None:
        from ..files.projection import project_file

        project_file(source, out, N_COMPONENTS, nnz=NNZ, seed=seed, device="auto", force=True)

    @staticmethod
    def title(out: Path) -> str:
        """The name of the library, and the GPU that wrote the file, if any."""
        from ..files.description import read_description

        device = read_description(out.with_name(out.name + ".json"))["device"]
        return "sjlt" if device == "cpu" else f"sjlt on {device}"

    @staticmethod
    def project(vectors: np.ndarray, seed: int) -> np.ndarray:
        from ..sketch import project

        return np.asarray(project(vectors, N_COMPONENTS, nnz=NNZ, seed=seed))


class _ScikitLearn:
    name, nonzeros = "scikit-learn", f"{N_COMPONENTS / FEATURES**0.5:.1f} on average"

    @staticmethod
    def project_file(source: Path, out: Path, seed: int) -> None:
        np.save(out, _ScikitLearn.project(np.load(source), seed))

    @staticmethod
    def title(out: Path) -> str:
        return "scikit-learn"

    @staticmethod
    def project(vectors: np.ndarray, seed: int) -> np.ndarray:
        from sklearn.random_projection import SparseRandomProjection

        return np.asarray(SparseRandomProjection(N_COMPONENTS, random_state=seed).fit_transform(vectors))


_LIBRARIES = (_Sjlt, _ScikitLearn)


def _run(library: type[_Sjlt | _ScikitLearn], first: Path, source: Path, out: Path, seed: int) -> Run:
    """Project two files and measure time and memory, in a process that has done nothing else."""
    times = [time.perf_counter()]
    for path in (first, source):
        library.project_file(path, out, seed)
        times.append(time.perf_counter())
    return Run(times[1] - times[0], times[2] - times[1], _peak_bytes())


def _peak_bytes() -> int:
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss would include the memory of the parent process at the time of the spawn
        peak = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(peak.split()[1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _alone(function: Callable[..., Result], *arguments: Any) -> Result:
    """Call the function in a new process and return its result."""
    from ..plans.running import Processes

    with Processes(1) as process:
        return process.submit(function, *arguments).result()  # type: ignore[no-any-return]


# ------------------------------------------------------------------------------------- the measures


def _neighbours(vectors: np.ndarray, queries: np.ndarray) -> list[set[int]]:
    """The nearest other rows of each query; queries are row numbers."""
    from sklearn.neighbors import NearestNeighbors

    search = NearestNeighbors(n_neighbors=NEIGHBOURS + 1, algorithm="brute").fit(vectors)
    found = search.kneighbors(vectors[queries], return_distance=False)
    return [set(row[row != query][:NEIGHBOURS].tolist()) for row, query in zip(found, queries, strict=True)]


def compare(directory: Path, stride: int, say: Callable[[str], None]) -> Report:
    """Run the demo. It replaces the files FILES in `directory`."""
    source, first = directory / "patches.npy", directory / "first.npy"
    say("cutting photographs into patches")
    n = _alone(write_patches, source, stride)
    vectors = np.load(source, mmap_mode="r")
    np.save(first, vectors[:FIRST_ROWS])

    say(f"searching {n:,} vectors for the neighbours of {QUERIES} queries")
    queries = np.random.default_rng(QUERIES_SEED).choice(n, QUERIES, replace=False)
    near = _neighbours(vectors, queries)
    i, j = np.random.default_rng(PAIRS_SEED).integers(0, n, (2, PAIRS))
    apart = vectors[i] - vectors[j]
    before = np.linalg.norm(apart, axis=1)
    apart, before = apart[before > 0], before[before > 0]

    sides = []
    for library in _LIBRARIES:
        out = directory / f"{library.name}.npy"
        runs, recalls = [], []
        for seed in range(RUNS):
            say(f"{library.name}: projecting the file, run {seed + 1} of {RUNS}")
            runs.append(_alone(_run, library, first, source, out, seed))
            say(f"{library.name}: searching neighbours again")
            found = _neighbours(np.load(out, mmap_mode="r"), queries)
            recalls.append(sum(len(a & b) for a, b in zip(near, found, strict=True)) / (NEIGHBOURS * QUERIES))
        say(f"{library.name}: distances through {MATRICES} matrices")
        ratios = [np.linalg.norm(library.project(apart, seed), axis=1) / before for seed in range(MATRICES)]
        sides.append(Side(library.title(out), library.nonzeros, tuple(runs), tuple(recalls), np.array(ratios)))
    return Report(n, tuple(sides))


def band() -> tuple[float, float]:
    """The range that contains 95 % of distance ratios in theory: for unit x, |Sx|^2 has mean 1 and variance 2/k."""
    spread = 1.96 * math.sqrt(2 / N_COMPONENTS)
    return math.sqrt(1 - spread), math.sqrt(1 + spread)


# ------------------------------------------------------------------------------------- the report


def table(report: Report) -> Table:
    """The comparison as a table with one column per library, at most 60 characters wide."""
    from rich.filesize import decimal
    from rich.table import Table
    from rich.text import Text

    title = Text(f"{report.n:,} image patches, {FEATURES} dimensions to {N_COMPONENTS}", style="bold")
    grid = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False, width=60)
    grid.add_column("")
    for side in report.sides:
        grid.add_column(Text(side.name), justify="right")

    def row(name: str, value: Callable[[Side], str], last: bool = False) -> None:
        grid.add_row(name, *map(value, report.sides), end_section=last)

    row("nonzeros per column", lambda side: side.nonzeros, last=True)
    row("time, file to file", lambda side: f"{median(run.seconds for run in side.runs):.2f} s")
    row("slowest first call", lambda side: f"{max(run.first_seconds for run in side.runs):.2f} s")
    row("peak memory (host)", lambda side: decimal(max(run.peak_bytes for run in side.runs)), last=True)
    for q in QUANTILES:
        row(f"ratio, {100 * q:g} % quantile", partial(_quantile, q=q))
    low, high = band()
    row(f"ratios from {low:.3f} to {high:.3f}", _within_band, last=True)
    row(f"{NEIGHBOURS} neighbours kept", lambda side: f"{100 * fmean(side.recalls):.1f} %")
    row("", lambda side: f"({100 * min(side.recalls):.1f} to {100 * max(side.recalls):.1f})")
    grid.caption = (
        f"Time: median of {RUNS} runs. First call: with imports and compilation. Memory: maximum. Neighbours: mean "
        f"(range). All with seeds 0 to {RUNS - 1} and {QUERIES} queries (seed {QUERIES_SEED}). Ratio: distance after / "
        f"before, for {PAIRS:,} pairs (seed {PAIRS_SEED}) and {MATRICES} matrices (seeds 0 to {MATRICES - 1}). In "
        "theory, 95 % of them lie in the range shown."
    )
    grid.caption_justify = "left"
    return grid


def _quantile(side: Side, q: float) -> str:
    return f"{np.quantile(side.ratios, q):.3f}"


def _within_band(side: Side) -> str:
    low, high = band()
    return f"{100 * np.mean((side.ratios >= low) & (side.ratios <= high)):.1f} %"


def plot(report: Report, path: Path, replace: bool = True) -> None:
    """Save the distributions of distance ratios as a figure."""
    from matplotlib.figure import Figure

    from ..files.atomic import whole_file

    low, high = band()
    figure = Figure(figsize=(7.2, 4.0), dpi=200, layout="constrained")
    axes = figure.subplots()
    axes.axvspan(low, high, color="0.94", zorder=0)
    axes.axvline(1, color="0.6", linewidth=0.8, zorder=1)
    bins = np.linspace(0.82, 1.18, 121)
    for side, color in zip(report.sides, ("#0b6e99", "#d9730d"), strict=True):
        density, _ = np.histogram(side.ratios, bins, density=True)
        axes.stairs(density, bins, fill=True, color=color, alpha=0.18)
        axes.stairs(density, bins, color=color, linewidth=1.4, label=side.name)
    axes.set(xlim=(bins[0], bins[-1]), ylim=(0, None), yticks=[], xlabel="distance after / distance before")
    axes.spines[["left", "top", "right"]].set_visible(False)
    axes.set_title(
        f"Distances between image patches, {FEATURES} to {N_COMPONENTS} dimensions\n",
        loc="left", fontsize=11, fontweight="bold",
    )  # fmt: skip
    axes.text(
        0, 1.03, f"{PAIRS:,} random pairs of {report.n:,} patches, through {MATRICES} matrices of each library",
        transform=axes.transAxes, fontsize=9, color="0.35",
    )  # fmt: skip
    axes.text(
        high - 0.002, 0.97, f"{low:.2f} to {high:.2f}:\n95 % in theory",
        transform=axes.get_xaxis_transform(), fontsize=9, color="0.35", ha="right", va="top",
    )  # fmt: skip
    axes.legend(frameon=False, loc="upper left")
    with whole_file(path, replace=replace) as file:
        figure.savefig(file, format=path.suffix[1:].lower())
