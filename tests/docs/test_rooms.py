"""A room imports only from those above it in CONTRIBUTING's table; every module has a room."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch

import pytest

from tests.docs.pages import ROOT

CHILDREN = ("autotune", "bench", "examples")
"""Folders of a checkout that are packages below `smkern`."""
SURFACE = ("smkern/__init__.py", "smkern/__main__.py")


def rooms() -> list[list[str]]:
    """The table's rows from the top, each as patterns of paths."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.partition("## Rooms")[2].partition("\n## ")[0]
    firsts = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
    return [re.findall(r"`([^`]+)`", first) for first in firsts]


ROOMS = rooms()
MODULES = [
    path.relative_to(ROOT)
    for folder in ("smkern", *CHILDREN)
    for path in sorted((ROOT / folder).rglob("*.py"))
]


def row_of(path: str) -> int | None:
    """The row of a file or folder, as a path below the checkout; None: it is in no room."""
    for row, patterns in enumerate(ROOMS):
        if any(fnmatch(path, p) or fnmatch(path, f"{p.rstrip('/')}/*") for p in patterns):
            return row
    return None


def imported(tree: ast.Module) -> Iterator[str]:
    """Dotted names below `smkern` that a module imports when it runs, inside functions too."""
    typing = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for node in ast.walk(branch)
    }
    for node in ast.walk(tree):
        if id(node) in typing:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "smkern":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("smkern."))


def row_of_name(name: str) -> int | None:
    """The row of an imported name; None: it is of the public surface."""
    first = name.split(".")[1]
    root = first if first in CHILDREN else f"smkern/{first}"
    if (ROOT / root).is_dir():
        return row_of(f"{root}/__init__.py")
    return row_of(f"{root}.py") if (ROOT / f"{root}.py").exists() else None


def test_the_table_is_read():
    assert len(ROOMS) > 15
    assert row_of("smkern/errors.py") == 0
    assert row_of_name("smkern.bench.results") == row_of("bench/results/__init__.py")


@pytest.mark.parametrize("folder", sorted({path.parts[0] for path in MODULES}))
def test_every_module_has_a_room(folder):
    paths = [str(path) for path in MODULES if path.parts[0] == folder]
    assert [p for p in paths if row_of(p) is None and p not in SURFACE] == []


@pytest.mark.parametrize("folder", sorted({path.parts[0] for path in MODULES}))
def test_rooms_import_from_above(folder):
    wrong = []
    for path in (path for path in MODULES if path.parts[0] == folder):
        row = row_of(str(path))
        for name in imported(ast.parse((ROOT / path).read_text())):
            other = row_of_name(name)
            if row is not None and other is not None and other > row:
                wrong.append(f"{path} imports {name}")
    assert wrong == []


def test_an_import_from_below_is_found():
    tree = ast.parse("def f():\n    from smkern.runtime import serve\n    import smkern.bench.gemm")
    found = {name: row_of_name(name) for name in imported(tree)}
    assert found["smkern.runtime.serve"] > row_of("smkern/ops/__init__.py")
    assert found["smkern.bench.gemm"] > found["smkern.runtime.serve"]
    assert [*imported(ast.parse("if TYPE_CHECKING:\n    import smkern.runtime"))] == []
