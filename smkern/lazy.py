"""Public names that import their module when first used, listed once: in the package's stub."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def attach_stub(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """A package's `__getattr__`, `__dir__` and `__all__`, from the `.pyi` beside its `__init__.py`.

    The stub is what type checkers read, so it cannot lack a name that the package has. Each of its
    lines is `from module import name as name`.

    Args:
        package: `__name__` of the package.
        file: `__file__` of the package.
    """
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text())
    module_of = {
        alias.name: str(node.module)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def resolve(name: str) -> Any:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if module_of[name] == package:
            return import_module(f"{package}.{name}")
        value = getattr(import_module(module_of[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of})

    return resolve, names, list(module_of)
