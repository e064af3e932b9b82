"""Compiling in processes, from scripts that are imported by each of them."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from smkern.errors import ArgumentError
from smkern.ops.warmup import run_all

pytestmark = pytest.mark.slow

SCRIPT = """
import multiprocessing
multiprocessing.get_context("spawn").Process(target=print).start()
"""


def test_a_script_that_processes_must_not_import_is_told_what_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that compiles by processes and has no guard begins them again in each of them."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    main = ModuleType("__main__")
    main.__file__ = str(script)
    monkeypatch.setitem(sys.modules, "__main__", main)
    tasks = [partial(print, "one"), partial(print, "two")]
    work: Any = SimpleNamespace(compile=tasks, launches=[], cells=[], choices=2, variants=2)
    bar: Any = SimpleNamespace(step=lambda name, count: lambda done: None)
    with pytest.raises(ArgumentError, match=r"workers=2: a process that compiles has") as caught:
        run_all([work], 2, bar, 0.0)
    assert "if __name__ == '__main__':" in str(caught.value)
