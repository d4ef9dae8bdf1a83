"""Python blocks and links of the READMEs, and doctests.

The blocks of a page run one after the other in one scope, as a reader would run them. The line above a block may be
``<!-- gpu -->`` if the block needs CUDA, or ``<!-- needs NAME -->`` if it needs an optional package.
"""

import doctest
import importlib
import re
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    page
    for folder in (".", ".github", "benchmarks", "examples", "sjlt", "tests")
    for page in (ROOT / folder).glob("*.md" if folder == "." else "**/*.md")
)
BLOCK = re.compile(r"^(?:<!-- (?:(gpu)|needs (\S+)) -->\n)?```python\n(.*?)^```", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")


class Block(NamedTuple):
    """A Python block: whether it needs a GPU, which optional package it needs, and its source."""

    gpu: bool
    package: str | None
    source: str


def blocks(page):
    """The blocks of a page, padded so that line numbers match the page."""
    text = page.read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        before = text.count("\n", 0, match.start(3))
        yield Block(match[1] is not None, match[2], "\n" * before + match[3])


def name_of(page):
    return str(page.relative_to(ROOT))


def run(page, tmp_path, monkeypatch, gpu):
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "readme"}
    for block in blocks(page):
        if block.package:
            pytest.importorskip(block.package)
        if gpu or not block.gpu:
            exec(compile(block.source, str(page), "exec"), scope)


@pytest.mark.parametrize("page", [p for p in PAGES if any(not b.gpu for b in blocks(p))], ids=name_of)
def test_python_blocks(page, tmp_path, monkeypatch):
    run(page, tmp_path, monkeypatch, gpu=False)


@pytest.mark.gpu
@pytest.mark.parametrize("page", [p for p in PAGES if any(b.gpu for b in blocks(p))], ids=name_of)
def test_python_blocks_on_a_gpu(page, tmp_path, monkeypatch):
    assert torch.cuda.is_available()
    run(page, tmp_path, monkeypatch, gpu=True)


def test_blocks_are_found():
    """The pattern finds every block, and the README has one for each of its uses in Python."""
    for page in PAGES:
        assert page.read_text(encoding="utf-8").count("```python") == len(list(blocks(page))), page
    assert len(list(blocks(ROOT / "README.md"))) == 5


def anchors(page):
    """The anchors of a page's headings, by GitHub's rule."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links(page):
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        if "://" in path:
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)} links {link}"
        assert not anchor or anchor in anchors(target), f"{name_of(page)} links {link}"


def modules_with_doctests():
    for path in sorted((ROOT / "sjlt").rglob("*.py")):
        if ">>> " in path.read_text(encoding="utf-8"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("name", list(modules_with_doctests()))
def test_docstrings(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried > 0
    assert failed == 0
