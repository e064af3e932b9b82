"""Run small calls of every kernel under compute-sanitizer; exit 0 when clean.

python -m tests.gpu.sanitizer [--tools memcheck,racecheck] [--cases gemm-tma,append]

Each (tool, case) is a process of its own. A table then says which kernel a tool supports. The
planted write past a buffer must be reported, or memcheck's silence means nothing; torch's caching
allocator is off, so that every tensor has bounds of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import torch

import smkern
from tests.gpu.every_lane import ROOT, copy_checkout
from tests.gpu.planted import write_past_the_end
from tests.gpu.sanitizer_cases import CASES

TIMEOUT_S = 300
"""Limit of one case under one tool."""
FOUND = 99
"""Exit status by which compute-sanitizer says that it found something."""

PLACES = (
    "/usr/local/cuda/bin",
    "/usr/local/cuda/compute-sanitizer",
    "/opt/nvidia/compute-sanitizer",
)
RACE = re.compile(r"Race reported between (.*)")
"""One report of racecheck: `Read access at gemm_ws+0x100 in gemm_ws.py:267`, then its writes."""
READ = re.compile(r"Read access at (\w+)\+0x[0-9a-f]+ in (\w+\.py):(\d+)")
SUMMARY = re.compile(r"RACECHECK SUMMARY: (\d+) hazards? displayed \((\d+) errors?")


def find_sanitizer() -> str | None:
    """Path of compute-sanitizer, from PATH, CUDA's folders or installed packages."""
    found = shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=os.pathsep.join(PLACES)
    )
    if found:
        return found
    for folder in sys.path:
        for path in Path(folder).glob("nvidia/**/compute-sanitizer"):
            if path.is_file() and os.access(path, os.X_OK):
                return str(path)
    return None


def sanitized(
    sanitizer: str, tool: str, case: str, timeout_s: int = TIMEOUT_S
) -> tuple[int | None, str]:
    """Exit status (None: out of time) and output of one case under one tool."""
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20"]
    # cuda-bindings asks for functions of newer drivers: failed look-ups are no memory errors
    options += ["--report-api-errors", "no"]
    command = [sanitizer, *options, sys.executable, "-m", "tests.gpu.sanitizer", "--inside", case]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with tempfile.TemporaryDirectory() as folder:
        if tool == "racecheck":
            copy_checkout(Path(folder))
        try:
            done = subprocess.run(
                command, cwd=folder if tool == "racecheck" else ROOT, env=environment,
                capture_output=True, text=True, timeout=timeout_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as late:
            return None, str(late.stdout or "")
    return done.returncode, done.stdout + done.stderr


def verdict(tool: str, case: str, status: int | None, output: str) -> tuple[bool, str]:
    """Whether a run is as it should be, and in words what happened."""
    caught = "Invalid __global__ write" in output
    if case == "planted":
        return caught, "caught" if caught else "NOT CAUGHT: this tool's silence means nothing"
    if status is None:
        return False, "out of time"
    if status == FOUND:
        handovers = only_handovers(output)
        if not handovers or "right values" not in output:
            return False, "errors found"
        return True, f"clean but for {handovers} hand-overs between Triton's warps"
    if status:
        return False, f"failed with {status}"
    if "right values" not in output:
        return False, "ran nothing"
    return True, "clean"


def only_handovers(output: str) -> int:
    """Reports of racecheck, where all are of one kind that is known to be none; else 0.

    The warps of `gl.warp_specialize` are told what to run in a byte of shared memory each, written
    and read on two sides of a named barrier that Triton's compiler puts there. Racecheck does not
    follow it. Such a read is in no statement: its line is that of the kernel's `def`.
    """
    races, summary = RACE.findall(output), SUMMARY.search(output)
    if summary is None or not len(races) == int(summary[1]) == int(summary[2]):
        return 0  # some were not displayed
    return len(races) if all(map(_is_read_at_def, races)) else 0


def _is_read_at_def(race: str) -> bool:
    """Whether a report begins with a read on the line of its kernel's definition."""
    found = READ.match(race)
    if found is None:
        return False
    kernel, file, line = found[1], found[2], int(found[3])
    folder = Path(smkern.__file__).parent / "kernels"
    texts = [path.read_text().splitlines() for path in folder.rglob(file)]
    return any(f"def {kernel}(" in text[line - 1] for text in texts if line <= len(text))


def run_inside(case: str) -> None:
    """One case in this process; "planted" writes one block past its buffer."""
    if case == "planted":
        write_past_the_end[(1,)](torch.zeros(4096, device="cuda"), 4096, BLOCK=128)
        torch.cuda.synchronize()
        return
    CASES[case]()
    torch.cuda.synchronize()
    click.echo(f"{case}: right values")


@click.command(help="Check kernels with compute-sanitizer.")
@click.option("--tools", default="memcheck,racecheck", help="Tools of compute-sanitizer.")
@click.option("--cases", default=",".join(CASES), help="Cases to check.")
@click.option("--timeout-s", default=TIMEOUT_S, help="Seconds for one tool on one case.")
@click.option("--inside", default=None, help="Run one case in this process (for the tool).")
def main(tools: str, cases: str, timeout_s: int, inside: str | None) -> None:
    if inside:
        run_inside(inside)
        return
    sanitizer = find_sanitizer()
    if sanitizer is None:
        raise click.ClickException("no compute-sanitizer here: install the CUDA toolkit's")
    click.echo(sanitizer)
    good = True
    for tool in tools.split(","):
        for case in ["planted"] * (tool == "memcheck") + cases.split(","):
            started = time.perf_counter()
            status, output = sanitized(sanitizer, tool, case, timeout_s)
            fine, words = verdict(tool, case, status, output)
            good &= fine
            click.echo(f"{tool:10} {case:16} {words} ({time.perf_counter() - started:.0f} s)")
            if not fine:
                click.echo(output[-3000:])
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
