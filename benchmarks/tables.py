"""Write the tables of the READMEs from benchmarks/results: ``python -m benchmarks.tables``.

A table is between ``<!-- table NAME -->`` and ``<!-- end -->``; NAME is a key of `TABLES`. A test compares the pages
with the output of `filled`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from . import envelope_tables, linalg_tables
from .records import ABSENT, digits, environment, markdown, ms, results

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "benchmarks" / "README.md", ROOT / "examples" / "README.md")
BLOCK = re.compile(r"(<!-- table (.+?) -->\n).*?(<!-- end -->)", re.S)
RIVALS = ("cuBLAS fp32", "cuBLAS tf32", "cuBLAS bf16", "cuSPARSE", "index_add_")


def floor_of(rows: dict[str, dict[str, float]]) -> float | None:
    """Seconds of a memcpy of the data."""
    return next((row["seconds"] for name, row in rows.items() if name.startswith("memcpy")), None)


# ------------------------------------------------------------------------------------- README.md


def headline() -> str:
    """Six rows: three CPU cases and three GPU cases, each compared with its best-known rival."""
    cpu, gpu = results("cpu"), results("h200")
    dropout = results("dropout_h200")["cases"]
    threads, chip = cpu["environment"]["threads"], cpu["environment"]["processor"]
    rows: list[tuple[str, ...]] = []
    for title, rival, name in (
        ("X (20000, 768) fp32 → 256, nnz 8", "scikit-learn fit+transform", "scikit-learn"),
        ("CSR (20000, 100000), 100 a row → 1024 dense, nnz 8", "scikit-learn fit+transform", "scikit-learn"),
        ("S A, A (200000, 256) fp32 C-order, k=1024, nnz 4", "scipy CSR S (stored) @ A", "SciPy, S stored"),
    ):
        found = cpu["cases"][title]
        ours, theirs = found["sjlt"]["seconds"], found[rival]["seconds"]
        short = title.replace(" C-order, k=1024", ", k = 1024").replace("100 a row", "100 per row")
        rows.append((short, f"{ms(ours)} ms", "", f"{name}: {ms(theirs)} ms ({digits(theirs / ours, 2)}×)"))
    for title, rival in (
        ("X (1048576, 768) → 256, fp32, nnz 4", "cuBLAS tf32"),
        ("A (262144, 512) → 1024, fp32, nnz 4", "cuSPARSE"),
    ):
        found = gpu["cases"][title]["methods"]
        ours, theirs = found["sjlt"], found[rival]
        rows.append(
            (
                f"{title}, GPU",
                f"{digits(ours['ms'])} ms",
                f"{ours['times floor']:.2f}",
                f"{rival}, S stored: {digits(theirs['ms'])} ms ({digits(theirs['ms'] / ours['ms'], 2)}×)",
            )
        )
    ours, theirs = dropout["forward, bits=16, bfloat16"], dropout["torch forward, bfloat16"]
    rows.append(
        (
            "dropout of 2^28 elements, bf16, GPU",
            f"{digits(ours['ms'])} ms",
            f"{ours['ms'] / ours['floor_ms']:.2f}",
            f"torch: {digits(theirs['ms'])} ms ({digits(theirs['ms'] / ours['ms'], 2)}×)",
        )
    )
    about = f"CPU: {threads} cores of an {chip}; GPU: {gpu['environment']['gpu']}.\n\n"
    return about + markdown(("case", "sjlt", "× floor", "rival (ratio to sjlt)"), rows)


# ------------------------------------------------------------------------------------- CPU


def cpu() -> str:
    """Every method of every case."""
    rows: list[tuple[object, ...]] = []
    for title, methods in results("cpu")["cases"].items():
        floor = floor_of(methods)
        for i, (name, row) in enumerate(methods.items()):
            seconds = row["seconds"]
            rows.append(
                (
                    "" if i else title.replace("100 a row", "100 per row"),
                    name,
                    ms(seconds),
                    digits(seconds / methods["sjlt"]["seconds"]),
                    digits(seconds / floor) if floor else None,
                    f"{row['peak_above_data_mib']:.0f}",
                )
            )
    return markdown(("case", "method", "ms", "× sjlt", "× memcpy", "peak MiB beyond the data"), rows)


def first_calls(record: str) -> str:
    seconds = results(record)["first call, seconds"]
    rows = [(name, *(f"{v:.2f}" for v in row.values())) for name, row in seconds.items()]
    return markdown(("call", "after install, s", "next process, s"), rows)


# ------------------------------------------------------------------------------------- GPU


def gpu(record: str) -> str:
    """Every case, with the rivals' times as multiples of sjlt's."""
    rows = []
    for title, case in results(record)["cases"].items():
        methods = case["methods"]
        ours = methods["sjlt"]
        cells = [digits(ours["ms"]), f"{ours['times floor']:.2f}", case["target_ratio"]]
        cells.append(f"{ours['extra_bytes'] / 2**20:.0f}")
        for rival in RIVALS:
            row = methods.get(rival, {})
            cells.append(digits(row["ms"] / ours["ms"]) if "ms" in row else "-" if "absent" in row else "")
        rows.append((title, *cells))
    return markdown(("case", "ms", "× floor", "target", "extra MiB", *(f"{r}, × sjlt" for r in RIVALS)), rows)


def precision() -> str:
    """Time and error of fp32 projections at torch's three precision settings."""
    rows = []
    for title, case in results("h100")["cases"].items():
        methods = case["methods"]
        if "sjlt high" not in methods:
            continue
        cells = []
        for name in ("sjlt", "sjlt high", "sjlt medium"):
            cells += [f"{methods[name]['times floor']:.2f}", f"{methods[name]['error']:.0e}"]
        rows.append((title, *cells))
    names = [f"{name}, {what}" for name in ("highest", "high", "medium") for what in ("× floor", "error")]
    return markdown(("case", *names), rows)


def small_calls() -> str:
    """Host time of calls on small tensors."""
    rows = (
        (name, digits(row["us"]), row["rival"], digits(row["rival_us"]), digits(row["us"] / row["rival_us"], 2), target)
        for name, row in results("host_h200")["calls"].items()
        for target in [f"{row['target_ratio']:g}"]
    )
    return markdown(("call", "host µs", "rival", "host µs", "ratio", "target"), rows)


def iid() -> str:
    """Independent entries."""
    rows = []
    for title, row in results("iid_h200")["cases"].items():
        rival = row.get("cuBLAS, stored, ms")
        target = f"{row['target_ratio']} × cuBLAS" if row["target_ratio"] else None
        rows.append(
            (
                title,
                digits(row["ms"]),
                f"{row['times floor']:.2f}",
                f"{row['ms'] / rival:.2f}" if rival else "-",
                target or (f"{row['target_rate']}·10^12/s" if row["target_rate"] else None),
                f"{row['entries/s'] / 1e12:.2f}",
                f"{row['error']:.0e}",
            )
        )
    return markdown(("case", "ms", "× floor", "× cuBLAS", "target", "10^12 entries/s", "error"), rows)


def stream() -> str:
    """A file projected through a GPU."""
    stages = ("read", "to device", "project", "back", "write", "whole")
    rows = [
        (title, *(digits(row[s]) for s in stages), f"{100 * row['of the bus']:.0f} %")
        for title, row in results("stream_h200")["cases"].items()
    ]
    return markdown(("features to components, output", *stages, "of the bus"), rows)


def stream_processes() -> str:
    rows = [
        (name, *(f"{v:.1f}" for v in row.values()))
        for name, row in results("stream_h200")["768 to 64 in a process of its own, s"].items()
    ]
    return markdown(("sjlt project, 768 to 64", "--device cuda, s", "--device cpu, s"), rows)


# ------------------------------------------------------------------------------------- files

FILES = (  # title, case, rival, the rival's name, target of the ratio
    ("parquet, fixed-size lists", "parquet_fixed_sjlt", "parquet_fixed_sklearn", "pyarrow, scikit-learn", "≥ 5"),
    ("", "parquet_fixed_sjlt", "parquet_fixed_bare", "bare read and write", "≤ 1.5"),
    ("parquet, lists", "parquet_list_sjlt", "parquet_list_sklearn", "pyarrow, scikit-learn", "≥ 5"),
    ("", "parquet_list_sjlt", "parquet_list_bare", "bare read and write", "≤ 1.5"),
    ("parquet, a quarter of the rows", "parquet_quarter_sjlt", None, "", ""),
    ("folder of 16 .npy files, 2 processes", "shards_two_workers", "shards_one_process", "one process", "≥ 1.6"),
    ("the same, a quarter of the rows", "shards_quarter", None, "", ""),
    ("1,000 parts of 300 rows, one process", "small_parts_plan", "small_parts_loop", "plain loop", "≤ 1.3"),
    ("dask, blocks of 64 MB, 2 workers", "dask_sjlt", "dask_sklearn", "scikit-learn in map_blocks", "≥ 4"),
    (".h5ad CSR (200000, 20000) at 5 % → 512", "h5ad_sjlt", "h5ad_sklearn", "loaded whole, scikit-learn", "≥ 3"),
    ("quality of (500000, 768)", "quality", None, "", "≤ 90 s"),
)


def files() -> str:
    """Whole processes compared with their rivals, and peak memory."""
    try:
        cases = results("files")["cases"]
    except FileNotFoundError:
        return ABSENT
    rows = []
    for title, name, rival, beside, target in FILES:
        ours, ratio, peak = cases[name], None, f"{cases[name]['peak_mb']:.0f}"
        if "blocks" in ours:
            peak = f"{ours['blocks']:.1f} blocks"
        if rival:
            theirs = cases[rival]["seconds"]
            ratio = digits(ours["seconds"] / theirs if "≤" in target else theirs / ours["seconds"])
        shown = f"{beside}: {digits(cases[rival]['seconds'])} s" if rival else ""
        if title and "source_gb" in ours:
            title = f"{title}, {ours['source_gb']:.1f} GB"
        rows.append((title, digits(ours["seconds"]), shown, ratio, target, peak))
    return markdown(("case", "sjlt, s", "rival", "ratio", "target", "peak MB"), rows)


# ------------------------------------------------------------------------------------- dropout


def dropout_gpu() -> str:
    """The speed of every case as a fraction of the copy's, for both dtypes."""
    cases = results("dropout_h200")["cases"]
    names = dict.fromkeys(title.rpartition(", ")[0] for title in cases)
    rows = []
    for name in names:
        both = [cases[f"{name}, {dtype}"] for dtype in ("bfloat16", "float32")]
        speeds = (f"{row['floor_ms'] / row['ms']:.2f}" for row in both)
        rows.append((name, *speeds, both[0]["target_speed"]))
    held = results("dropout_h200")["bytes per element held for backward"]
    last = f"\nBytes per element held for the backward pass: torch {held['torch']:.0f}, sjlt {held['sjlt']:.0f}.\n"
    return markdown(("2^28 elements", "bf16", "fp32", "target"), rows) + last


def dropout_cpu() -> str:
    seconds = results("dropout_cpu")["seconds"]
    rows = [(name, ms(value), digits(value / seconds["memcpy"])) for name, value in seconds.items()]
    return markdown(("2^24 elements, fp32", "ms", "× memcpy"), rows)


# ------------------------------------------------------------------------------------- distances


def distances(k: int, quantity: str, gaussian: bool) -> str:
    """One quantity for every law and data set, at k components."""
    record = results("distances")
    names = list(dict.fromkeys(sketch["name"] for data in record.values() for sketch in data["sketches"]))
    rows = []
    for title, data in record.items():
        found = {s["name"]: s[quantity] for s in data["sketches"] if s["n_components"] == k}
        theory = [f"{data['theory'][str(k)]:.3f}"] if gaussian else []
        rows.append((f"{title}, {data['features']:,}", *theory, *(f"{found[name]:.3f}" for name in names)))
    return markdown(("data, features", *(["Gaussian"] if gaussian else []), *names), rows)


def distances_std() -> str:
    return distances(256, "ratio_std", gaussian=True)


def distances_tail() -> str:
    return distances(1024, "99.9 %", gaussian=False)


# ------------------------------------------------------------------------------------- pages


def gradients(record: str) -> str:
    """Every value recorded by `benchmarks.gradients`, case by case."""
    try:
        cases = {name: row for name, row in results(record).items() if name != "environment"}
    except FileNotFoundError:
        return ABSENT
    rows = (
        (name.replace("_", " ") if i == 0 else "", what, digits(value))
        for name, row in cases.items()
        for i, (what, value) in enumerate(row.items())
    )
    return markdown(("case", "quantity", "ms, or as stated"), rows)


TABLES: dict[str, Callable[[], str]] = {
    "headline": headline,
    "cpu": cpu,
    "first calls": lambda: first_calls("cpu"),
    "first calls gpu": lambda: first_calls("first_calls_h200"),
    "gpu h200": lambda: gpu("h200"),
    "gpu h100": lambda: gpu("h100"),
    "precision": precision,
    "small calls": small_calls,
    "iid": iid,
    "stream": stream,
    "stream processes": stream_processes,
    "files": files,
    "least squares": linalg_tables.least_squares,
    "low rank": linalg_tables.low_rank,
    "linalg file": linalg_tables.file,
    "least squares h100": lambda: linalg_tables.least_squares("linalg_h100"),
    "linalg file h100": lambda: linalg_tables.file("linalg_h100"),
    "low rank h100": lambda: linalg_tables.low_rank("linalg_h100"),
    "dropout gpu": dropout_gpu,
    "dropout cpu": dropout_cpu,
    "gradients cpu": lambda: gradients("gradients_cpu"),
    "gradients h200": lambda: gradients("gradients_h200"),
    "envelope h200": envelope_tables.envelope,
    "envelope portable h200": lambda: envelope_tables.envelope("envelope_portable_h200"),
    "envelope cpu named": envelope_tables.cpu_named,
    "envelope cpu": envelope_tables.cpu_random,
    "gradients h100": lambda: gradients("gradients_h100"),
    "distances": distances_std,
    "distances tail": distances_tail,
}


def table(name: str) -> str:
    """The content of a block: a table of `TABLES`, or "environment RECORD"."""
    kind, _, record = name.partition(" ")
    return environment(record) if kind == "environment" else TABLES[name]()


def filled(page: str) -> str:
    """The page with every table block regenerated from the records."""
    return BLOCK.sub(lambda block: f"{block[1]}{table(block[2])}{block[3]}", page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
