"""Packages that may be missing, there or not."""

from __future__ import annotations

import pytest

from smkern.kernels.cute import compile as cute


def set_cutlass(monkeypatch: pytest.MonkeyPatch, is_there: bool) -> None:
    """Whether CUTLASS's package is here, and what it compiles may run."""
    monkeypatch.setattr(cute, "absent", lambda: "" if is_there else "it is not installed")
    monkeypatch.setattr(cute, "is_there", lambda: is_there)
