"""A room imports only from those above it in CONTRIBUTING's table; every module has a room."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from typing import Any

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


def imports_of(tree: ast.Module) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Imports that run, and whether one of them runs when the module is imported."""
    todo: list[tuple[Any, bool]] = [(node, True) for node in tree.body]
    while todo:
        node, at_once = todo.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, at_once
            continue
        at_once &= not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        parts: tuple[str, ...] = ("body", "orelse", "finalbody", "handlers", "cases")
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            parts = ("orelse",)
        todo += [(child, at_once) for part in parts for child in getattr(node, part, ())]


def imported(tree: ast.Module) -> Iterator[str]:
    """Dotted names below `smkern` that a module imports when it runs, inside functions too."""
    for node, _ in imports_of(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "smkern":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("smkern."))


def begin_with(tree: ast.Module, package: str) -> bool:
    """Whether importing a module imports a package."""
    names = [
        name
        for node, at_once in imports_of(tree)
        if at_once
        for name in ([str(node.module)] if isinstance(node, ast.ImportFrom)
                     else [alias.name for alias in node.names])
    ]  # fmt: skip
    return package in [name.split(".")[0] for name in names]


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
    """Nor does one load transformers before it is used: that takes seconds."""
    wrong = []
    for path in (path for path in MODULES if path.parts[0] == folder):
        row, tree = row_of(str(path)), ast.parse((ROOT / path).read_text())
        for name in imported(tree):
            other = row_of_name(name)
            if row is not None and other is not None and other > row:
                wrong.append(f"{path} imports {name}")
        if begin_with(tree, "transformers"):
            wrong.append(f"{path} imports transformers at once")
    assert wrong == []


def test_an_import_from_below_is_found():
    tree = ast.parse("def f():\n    from smkern.runtime import serve\n    import smkern.bench.gemm")
    found = {name: row_of_name(name) for name in imported(tree)}
    assert found["smkern.runtime.serve"] > row_of("smkern/ops/__init__.py")
    assert found["smkern.bench.gemm"] > found["smkern.runtime.serve"]
    assert [*imported(ast.parse("if TYPE_CHECKING:\n    import smkern.runtime"))] == []
    assert begin_with(ast.parse("try:\n    from a.b import c\nfinally:\n    pass"), "a")
    assert not begin_with(ast.parse("import b\ndef f():\n    import a"), "a")
