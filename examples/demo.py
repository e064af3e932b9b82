"""`smkern demo`: what smkern does, seen on this machine; the other examples one after another.

With a GPU: a trace under every policy, partitions verified, our GEMM and
cuBLAS inside them, pictures. Without one: the same trace simulated, the plan for an H200, the
kernel in Triton's interpreter, the picture of committed results, and what could not run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import click
from rich.console import Console

import smkern
from smkern import doctor
from smkern.bench.results import COMMITTED as COMMITTED_GPU
from smkern.bench.results import FOLDER, load_results
from smkern.cli import writable
from smkern.errors import DeviceError, SmkernError
from smkern.examples import gemm_budgets, partitions, policies

COMMITTED = FOLDER / COMMITTED_GPU / "gemm.json"

COULD_NOT_RUN = (
    "the model behind the policies: its times are those of a table, its tokens those of a formula",
    "partitions: green contexts need a GPU and a driver",
    "verification by %smid: the interpreter has no SMs",
    "timings against cuBLAS: the figures above are predicted or committed, not measured here",
    "bf16 values: Triton's interpreter gets bf16 wrong, so fp16 was checked",
)
Part = tuple[str, Callable[[Console, Path], object]]


def interpret() -> str:
    """Our kernel in Triton's interpreter, in a process of its own; its report, a line a check.

    Raises:
        SmkernError: a value was wrong, or the process failed.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", "smkern.examples.interpreted_gemm"],
            env={**os.environ, "TRITON_INTERPRET": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
    except subprocess.TimeoutExpired as late:
        raise SmkernError(f"the interpreted GEMM did not end within {late.timeout:g} s") from None
    if done.returncode:
        raise SmkernError(
            f"the interpreted GEMM exited with {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    return done.stdout.rstrip()


def show_committed(console: Console, out: Path) -> None:
    """The picture of committed results, and what could not run here."""
    missing = []
    if COMMITTED.exists():
        results = load_results(COMMITTED)
        console.print(f"Results committed from an {results.meta['gpu']}:")
        gemm_budgets.draw(console, results, out)
    else:
        missing = ["the picture of committed results: they are in the checkout alone"]
    console.print("\n[bold]What could not run here:[/]")
    for line in (*COULD_NOT_RUN, *missing):
        console.print(f"  - {line}", markup=False, highlight=False)


def parts() -> list[Part]:
    """What there is to show on this machine: titles, and what shows them."""
    try:
        info = smkern.device_info()
    except DeviceError:
        profile = smkern.load_profile()
        return [
            (
                "every policy on a trace, simulated",
                lambda console, out: policies.show(console, out, None),
            ),
            (
                "the plan of a GEMM",
                lambda console, out: console.print(gemm_budgets.plan_table(profile)),
            ),
            (
                "our GEMM kernel in Triton's interpreter, fp16, 77 x 150 x 136",
                lambda console, out: console.print(interpret(), markup=False, highlight=False),
            ),
            ("committed results", show_committed),
        ]
    return [
        ("every policy on a trace", lambda console, out: policies.show(console, out, info.name)),
        ("partitions", lambda console, out: partitions.show(console)),
        (
            "a GEMM inside partitions",
            lambda console, out: gemm_budgets.show(console, out, info.num_sms),
        ),
    ]


@click.command("demo")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("demo"),
    show_default=True,
    callback=writable,
    help="Folder for the pictures and results.",
)
def command(out: Path) -> None:
    """See it: every policy serves a trace; partitions that confine, a GEMM inside them.

    Without a GPU: the policies simulated, the plan, the kernel interpreted, the committed results;
    and what could not run.
    """
    out.mkdir(parents=True, exist_ok=True)
    console = doctor.make_console()
    report = doctor.examine()
    doctor.render(report, console)
    shown = parts()
    for number, (title, show) in enumerate(shown, 1):
        console.print(f"\n[bold]{number}/{len(shown)}: {title}[/]", highlight=False)
        began = perf_counter()
        show(console, out)
        console.print(f"[dim]({perf_counter() - began:.1f} s)[/]", highlight=False)
    if report.failed:
        raise SystemExit(1)


if __name__ == "__main__":
    command()
