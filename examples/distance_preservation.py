"""For which data exactly sparse sketches preserve distances better than independent entries, and where all laws agree.

There are three kinds of data: patches of photographs, tf-idf vectors of the docstrings of installed Python packages,
and adversarial inputs whose mass is in few features. On spread-out data every law behaves like a dense Gaussian matrix
(Achlioptas 2003). On sparse data, independent entries of low density are worse (Li, Hastie, Church 2006), because the
number of nonzeros that a large coordinate meets varies, while an exact sketch has `nnz` in every column.

    python examples/distance_preservation.py [PLOT.png [RECORD.json]]
"""

from __future__ import annotations

import ast
import json
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
from rich.console import Console
from rich.text import Text
from sklearn.feature_extraction.text import TfidfVectorizer

import sjlt
from sjlt.evaluation import demo, figures
from sjlt.evaluation.report import tables
from sjlt.evaluation.results import Report
from sjlt.evaluation.sketches import standard_sketches


def patches(stride: int = 6) -> np.ndarray:
    """Overlapping 16 x 16 patches of scikit-learn's two photographs, (n, 768)."""
    with tempfile.TemporaryDirectory() as directory:
        demo.write_patches(Path(directory) / "patches.npy", stride)
        return np.load(Path(directory) / "patches.npy")


def docstrings(least_words: int = 12) -> Iterator[str]:
    """Docstrings of the standard library and installed packages, whose sources are parsed but not imported."""
    paths = sysconfig.get_paths()
    for root in dict.fromkeys((paths["purelib"], paths["platlib"], paths["stdlib"])):
        for path in sorted(Path(root).rglob("*.py")):
            if "tests" in path.parts or "test" in path.parts:
                continue
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # warnings about third-party sources
                    tree = ast.parse(path.read_bytes())
            except (OSError, SyntaxError, ValueError):  # such as templates and other versions of Python
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    text = ast.get_docstring(node)
                    if text and len(text.split()) >= least_words:
                        yield text


def text(documents: int = 6000) -> scipy.sparse.csr_matrix:
    """tf-idf of distinct docstrings, (documents, words), rows of norm 1."""
    distinct: dict[str, None] = {}
    for docstring in docstrings():
        distinct[docstring] = None
        if len(distinct) == documents:
            break
    return TfidfVectorizer(sublinear_tf=True, min_df=2, dtype=np.float32).fit_transform(distinct)


def two_sparse(rows: int = 600, features: int = 16_384) -> scipy.sparse.csr_array:
    """Two entries of equal magnitude per row, so that each distance depends on four columns of the sketch."""
    rng = np.random.default_rng(0)
    first = rng.integers(0, features, rows)
    second = (first + rng.integers(1, features, rows)) % features
    return _sparse(np.stack([first, second], axis=1), features)


def local(rows: int = 600, features: int = 16_384, width: int = 64) -> scipy.sparse.csr_array:
    """Rows with `width` neighbouring nonzero features, like signals of limited support."""
    start = np.random.default_rng(0).integers(0, features - width, (rows, 1))
    return _sparse(start + np.arange(width), features)


def power_law(rows: int = 400, features: int = 4096) -> np.ndarray:
    """Rows with the entries 1, 1/2, 1/3, ... at shuffled positions: few features have most of the mass."""
    return np.random.default_rng(0).permuted(np.tile(1 / np.arange(1, features + 1), (rows, 1)), axis=1)


def _sparse(columns: np.ndarray, features: int) -> scipy.sparse.csr_array:
    """Random signs at the given columns of each row."""
    rows, stored = columns.shape
    signs = np.random.default_rng(1).choice([-1.0, 1.0], columns.size)
    starts = np.arange(0, columns.size + 1, stored)
    return scipy.sparse.csr_array((signs, columns.ravel(), starts), shape=(rows, features))


def datasets() -> dict[str, Any]:
    return {
        "image patches": patches(),
        "docstrings, tf-idf": text(),
        "2-sparse": two_sparse(),
        "local, 64 wide": local(),
        "power law": power_law(),
    }


def main(
    plot: Path,
    data: dict[str, Any] | None = None,
    n_components: tuple[int, ...] = (64, 256, 1024),
    rows: int = 500,
    pairs: int = 5000,
    queries: int = 100,
    seeds: int = 20,
) -> dict[str, Report]:
    """Print a table for each data set and number of components, and draw all tails in one figure."""
    console, reports = Console(), {}
    for name, X in (datasets() if data is None else data).items():
        sketches = [sketch for k in n_components for sketch in standard_sketches(X.shape[1], k)]
        report = sjlt.quality(X, sketches, rows=rows, pairs=pairs, queries=queries, seeds=seeds)
        console.rule(Text(f"{name}: {X.shape[0]:,} x {X.shape[1]:,}"))
        console.print(tables(report))
        reports[name] = report
    title = f"Squared distances, after / before: {pairs:,} pairs, {seeds} seeds"
    figures.plot_datasets(reports, plot, title)
    console.print(f"Plot: {plot}", markup=False)
    return reports


def record(reports: dict[str, sjlt.evaluation.quality.Report]) -> dict[str, Any]:
    """The record from which the tables in examples/README.md are generated."""
    kept = ("name", "n_components", "ratio_std", "ratio_std_error", "outside", "recall")
    return {
        name: {
            "features": report.shape[1],
            "theory": {theory.n_components: theory.ratio_std for theory in report.theory},
            "sketches": [
                {**{key: getattr(sketch, key) for key in kept}, "99.9 %": sketch.ratio_quantiles[-1]}
                for sketch in report.sketches
            ],
        }
        for name, report in reports.items()
    }


if __name__ == "__main__":
    reports = main(Path(sys.argv[1] if len(sys.argv) > 1 else "distance_preservation.png"))
    if len(sys.argv) > 2:
        Path(sys.argv[2]).write_text(json.dumps(record(reports), indent=1) + "\n")
