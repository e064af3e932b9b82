"""Run small calls of every kernel under compute-sanitizer; exit 0 when clean.

python -m tests.gpu.sanitizer [--tools memcheck,racecheck] [--cases gemm-tma,append]

Each (tool, case) is a process of its own. A table then says which kernel a tool supports. The
planted write past a buffer must be reported, or memcheck's silence means nothing; torch's caching
allocator is off, so that every tensor has bounds of its own.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import click
import torch

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
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "5"]
    # cuda-bindings asks for functions of newer drivers: failed look-ups are no memory errors
    options += ["--report-api-errors", "no"]
    command = [sanitizer, *options, sys.executable, "-m", "tests.gpu.sanitizer", "--inside", case]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
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
        return False, "errors found"
    if status:
        return False, f"failed with {status}"
    if "right values" not in output:
        return False, "ran nothing"
    return True, "clean"


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
