"""The tables of the READMEs match the recorded results."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("benchmarks.tables")


def test_tables_are_up_to_date(tables):
    for page in tables.PAGES:
        text = page.read_text(encoding="utf-8")
        assert text.count("<!-- table ") == len(tables.BLOCK.findall(text)) > 0
        assert tables.filled(text) == text, f"run python -m benchmarks.tables to renew {page.name}"


def test_every_table_and_record_is_shown(tables):
    shown = {name for page in tables.PAGES for _, name, _ in tables.BLOCK.findall(page.read_text(encoding="utf-8"))}
    records = {path.stem for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    pages = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    assert {name for name in shown if not name.startswith("environment ")} == set(tables.TABLES)
    assert {name for name in records if f"{name}.json" not in pages} == set()


def test_changed_record_changes_its_table(tables):
    page = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    tables.results("cpu")["first call, seconds"]["S A"]["next process"] += 1  # modifies the cached copy
    try:
        assert tables.filled(page) != page
    finally:
        tables.results.cache_clear()
