"""Compiling in processes, from scripts that are imported by each of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
from functools import partial
from types import SimpleNamespace
from smkern.ops.warmup import run_all
tasks = [partial(print, "one"), partial(print, "two")]
work = SimpleNamespace(compile=tasks, launches=[], cells=[], choices=2, variants=2)
bar = SimpleNamespace(step=lambda name, count: lambda done: None)
{guard}run_all([work], 2, bar, 0.0)
"""


def run(folder: Path, guard: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(SCRIPT.format(guard=guard))
    return subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)


def test_a_script_that_processes_must_not_import_is_told_what_to_write(tmp_path: Path) -> None:
    found = run(tmp_path, "")
    assert found.returncode == 1
    last = found.stderr.strip().splitlines()[-1]
    assert last.startswith("smkern.errors.ArgumentError: workers=2: a process that compiles has")
    assert "if __name__ == '__main__':" in last


def test_under_the_guard_each_task_runs_once(tmp_path: Path) -> None:
    found = run(tmp_path, "if __name__ == '__main__':\n    ")
    assert found.returncode == 0, found.stderr
    assert sorted(found.stdout.split()) == ["one", "two"]
