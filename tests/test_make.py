"""What `make` runs: the set-up script's refusals, both processes of tests, the user's own path."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

Script = Callable[[str], Path]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """script(lines): an executable shell script in the place of a venv's python."""

    def written(lines: str) -> Path:
        path = tmp_path / "bin" / "python"
        path.parent.mkdir()
        path.write_text(f"#!/bin/sh\n{lines}\n")
        path.chmod(0o755)
        return path

    return written


def run(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True, timeout=60
    )


def test_a_python_that_does_not_run_is_told_from_an_old_one(script: Script) -> None:
    absent = run(".ci/venv", PYTHON="/nowhere/python3", VENV="/nowhere/venv")
    assert absent.returncode == 1
    assert "PYTHON=/nowhere/python3 does not run" in absent.stderr
    old = script('case "$2" in *exit*) exit 1 ;; *) echo 3.9 ;; esac')
    found = run(".ci/venv", PYTHON=str(old), VENV="/nowhere/venv")
    assert found.returncode == 1
    assert "is Python 3.9; smkern needs 3.11 or later" in found.stderr


FAKE = """case "$*" in
  *xdist*|*torch*) exit 1 ;;
esac
echo "${TRITON_INTERPRET:-0} $PYTHONPATH $*"
case "$*" in
  *tests/interpreter) exit $SECOND ;;
  *) exit $FIRST ;;
esac"""


@pytest.mark.parametrize(
    ("first", "second", "status"), [(0, 0, 0), (3, 0, 3), (0, 4, 4), (1, 4, 1)]
)
def test_the_interpreters_tests_run_in_any_case(script, tmp_path, first, second, status) -> None:
    script(FAKE)
    settings = {"FIRST": str(first), "SECOND": str(second), "PYTHONPATH": "/mine"}
    done = run(".ci/test", VENV=str(tmp_path), TRITON_INTERPRET="0", **settings)
    assert done.stdout.splitlines() == [
        "0 .:/mine -m pytest",
        "1 .:/mine -m pytest tests/interpreter",
    ]
    assert done.returncode == status
    assert "minutes on two idle cores" in done.stderr


def test_quick_tests_leave_the_slow_ones_out(script: Script, tmp_path: Path) -> None:
    script(FAKE)
    done = run(".ci/test", "quick", VENV=str(tmp_path), FIRST="3", SECOND="0", PYTHONPATH="")
    assert done.stdout.splitlines() == ["0 . -m pytest -m not slow"]
    assert done.returncode == 3
    assert "a minute and a half on two idle cores" in done.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(("own", "seen"), [("/mine", ".:/mine"), ("", ".")])
def test_make_keeps_the_users_own_path(script: Script, tmp_path: Path, own: str, seen: str) -> None:
    script('echo "$PYTHONPATH"')
    ready = tmp_path / ".ready"
    done = run("make", "-s", "-o", str(ready), "demo", f"VENV={tmp_path}", PYTHONPATH=own)
    assert done.stdout == f"{seen}\n"
