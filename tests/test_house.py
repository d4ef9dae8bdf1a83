"""Layout rules of the code: no import cycles, no oversized modules, a README of bounded length."""

import ast
import re
from fnmatch import fnmatch
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_MODULE_LINES = 400
MAX_README_WORDS = 900

# The lower floors of sjlt/README.md, from the ground up. A room imports only from its own floor and those below.
FLOORS = (
    ("laws", "threads"),
    ("inputs", "kernels"),
    ("backends",),
    ("torch_ops",),
    ("frontends",),
    ("sketch", "products", "operators", "seeded_dropout"),
)


def modules():
    """Every module of the package, by its dotted name."""
    for path in sorted((ROOT / "sjlt").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def is_type_checking(node):
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def import_nodes(tree):
    """All import statements of a module, including those in functions, except under `if TYPE_CHECKING`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        elif is_type_checking(node):
            for other in node.orelse:
                yield from import_nodes(other)
        else:
            yield from import_nodes(node)


def imported(name, is_package, tree, names):
    """The modules of the package that a module imports, including lazily."""
    for node in import_nodes(tree):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        else:
            parts = name.split(".") if is_package else name.split(".")[:-1]
            base = parts[: len(parts) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found = [f"{module}.{a.name}" if f"{module}.{a.name}" in names else module for a in node.names]
        yield from (f for f in found if f in names and f != name)


def import_graph():
    files = dict(modules())
    return {
        name: set(imported(name, path.name == "__init__.py", ast.parse(path.read_text()), files))
        for name, path in files.items()
    }


def test_no_import_cycles():
    try:
        TopologicalSorter(import_graph()).prepare()
    except CycleError as error:
        pytest.fail("import circle: " + " -> ".join(error.args[1]))


def test_lower_floors_do_not_import_upper_ones():
    floor_of = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
    graph = {name.removeprefix("sjlt."): sorted(found) for name, found in import_graph().items()}
    assert floor_of.keys() <= {name.split(".")[0] for name in graph}
    for name, found in graph.items():
        floor = floor_of.get(name.split(".")[0], len(FLOORS))
        for other in found:
            room = other.removeprefix("sjlt.").split(".")[0]
            assert room == "sjlt" or floor_of.get(room, len(FLOORS)) <= floor, f"sjlt.{name} imports {other}"
            assert room != "cli" or name.split(".")[0] in ("cli", "__main__"), f"sjlt.{name} imports {other}"


def test_import_graph_sees_lazy_imports_and_cycles():
    tree = ast.parse(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .b import x\ndef f():\n    from . import c"
    )
    assert set(imported("p.a", False, tree, {"p.a", "p.b", "p.c"})) == {"p.c"}
    with pytest.raises(CycleError):
        TopologicalSorter({"a": {"b"}, "b": {"a"}}).prepare()


@pytest.mark.parametrize("folder", ["sjlt", "tests", "examples", "benchmarks"])
def test_modules_are_short(folder):
    lengths = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in (ROOT / folder).rglob("*.py")}
    assert lengths, folder
    assert {name: n for name, n in lengths.items() if n > MAX_MODULE_LINES} == {}


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= MAX_README_WORDS


def test_tests_do_not_import_from_the_repository_root():
    """`pytest` puts tests/ on the path, but only ``python -m pytest`` adds the working directory."""
    for path in (ROOT / "tests").rglob("*.py"):
        for node in import_nodes(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            assert not any(name.split(".")[0] == "tests" for name in names), path


def test_readme_lists_every_test_file():
    files = {path.stem for path in (ROOT / "tests").glob("test_*.py")}
    table = (ROOT / "tests/README.md").read_text().partition("## Organisation")[2].partition("## Rules")[0]
    patterns = re.findall(r"`(test_\w+\*?)`", table)
    assert {name for name in files if not any(fnmatch(name, pattern) for pattern in patterns)} == set()
    assert [pattern for pattern in patterns if not any(fnmatch(name, pattern) for name in files)] == []
