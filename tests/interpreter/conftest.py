"""Triton chooses its interpreter at import: these tests are a process of their own."""

from __future__ import annotations

import os

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file named on the command line is collected all the same: say why it is not run."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    for item in items:
        if "interpreter" in item.path.parent.parts:
            item.add_marker(pytest.mark.skip(reason="needs TRITON_INTERPRET=1"))
