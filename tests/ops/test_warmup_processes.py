"""Compiling in processes, from scripts that are imported by each of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """
from functools import partial
from types import SimpleNamespace
from smkern.ops.warmup import run_all
tasks = [partial(print, "one"), partial(print, "two")]
work = SimpleNamespace(compile=tasks, launches=[], cells=[], choices=2, variants=2)
bar = SimpleNamespace(step=lambda name, count: lambda done: None)
run_all([work], 2, bar, 0.0)
"""


def test_a_script_that_processes_must_not_import_is_told_what_to_write(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    found = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    last = found.stderr.strip().splitlines()[-1]
    assert last.startswith("smkern.errors.ArgumentError: workers=2: a process that compiles has")
    assert "if __name__ == '__main__':" in last
