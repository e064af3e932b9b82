"""`smkern demo`: what smkern does, seen on this machine.

With a GPU: bursts of prompts beside decode under two policies, partitions verified, our GEMM and
cuBLAS inside them, pictures. Without one: the same bursts simulated, the plan for an H200, the
kernel in Triton's interpreter, the picture of committed results, and what could not run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import click
from rich.console import Console
from rich.table import Table

import smkern
from smkern import doctor
from smkern.bench import demo_runtime
from smkern.bench.results import COMMITTED as COMMITTED_GPU
from smkern.bench.results import FOLDER, Results, load_results
from smkern.device import Budget
from smkern.errors import DeviceError, SmkernError
from smkern.measure.provenance import collect_meta
from smkern.ops.gemm.dispatch import Explanation, offline_dispatcher
from smkern.profile import Profile
from smkern.tuning.config import STREAM_K, GemmConfig, GemmProblem
from smkern.tuning.select import GEMM

SHAPE = (6144, 4096)
"""(n, k) of an 8B model's QKV projection."""
MS = (64, 2048)
BUDGETS = (16, 32, 60, 84, 116, 132)
SWITCHES = 1000

COMMITTED = FOLDER / COMMITTED_GPU / "gemm.json"

COULD_NOT_RUN = (
    "the model behind the policies: its times are those of a table, its tokens those of a formula",
    "partitions: green contexts need a GPU and a driver",
    "verification by %smid: the interpreter has no SMs",
    "timings against cuBLAS: the figures above are predicted or committed, not measured here",
    "bf16 values: Triton's interpreter gets bf16 wrong, so fp16 was checked",
)


def plan_table(profile: Profile, ms: Sequence[int] = MS, shape: tuple[int, int] = SHAPE) -> Table:
    """What dispatch picks for each M and SM budget of a device that may be absent."""
    n, k = shape
    name = profile.info.name
    dispatcher = offline_dispatcher(profile, GEMM.load(name))
    table = Table(title=f"smkern.gemm, n {n}, k {k}, bf16, as planned for an {name}", box=None)
    for column in ("M", "SMs", "kernel", "tile", "K split", "waves", "us", "TFLOP/s", "chosen by"):
        left = column in ("kernel", "tile", "K split", "chosen by")
        table.add_column(column, justify="left" if left else "right")
    for m in ms:
        problem = GemmProblem(m, n, k)
        for num_sms in (count for count in BUDGETS if count <= profile.info.num_sms):
            budget = Budget(num_sms, "mask", clusters=num_sms > profile.info.num_sms // 2)
            found = dispatcher.explain(problem, budget)
            table.add_row(*_plan_row(found), end_section=num_sms == BUDGETS[-1])
    return table


def _plan_row(found: Explanation) -> list[str]:
    problem, config = found.problem, found.config
    rate = problem.flops / found.predicted_us / 1e6
    return [
        str(problem.m),
        str(found.budget.num_sms),
        config.kernel + (", swapped" if config.swap else ""),
        f"{config.block_m}x{config.block_n}x{config.block_k}",
        _split_name(config),
        f"{found.waves:.2f}",
        f"{found.predicted_us:.1f}",
        f"{rate:.0f}",
        found.source,
    ]


def _split_name(config: GemmConfig) -> str:
    return {1: "whole", STREAM_K: "stream-K"}.get(config.split, f"in {config.split}")


def interpret() -> str:
    """Our kernel in Triton's interpreter, in a process of its own; its report, a line a check.

    Raises:
        SmkernError: a value was wrong, or the process failed.
    """
    done = subprocess.run(
        [sys.executable, "-m", "smkern.bench.interpreted"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        raise SmkernError(
            f"the interpreted GEMM exited with {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    return done.stdout.rstrip()


def show_partitions(console: Console, decodes: Sequence[int] = (16, 32, 64)) -> None:
    """Make a ladder, verify both sides of some of its splits, and time a switch."""
    start = perf_counter()
    with smkern.ladder() as ladder:
        console.print(
            f"A ladder of {len(ladder.rungs)} splits in {1e3 * (perf_counter() - start):.0f} ms."
        )
        for decode in decodes:
            split = ladder.split(decode=decode)
            for side in (split.decode, split.prefill):
                side.verify()
            console.print(
                f"  decode {split.decode.num_sms:3} SMs, prefill {split.prefill.num_sms:3} SMs: "
                "every CTA stayed inside, eagerly and replayed from a graph"
            )
        console.print(
            f"  a switch between two partitions: {_switch_us(ladder):.1f} us of host time"
        )


def _switch_us(ladder: Any) -> float:
    """Host time to make another partition's stream current, microseconds."""
    first, *_, last = (ladder.split(decode=rung).decode for rung in ladder.rungs)
    start = perf_counter()
    for _ in range(SWITCHES // 2):
        with first:
            pass
        with last:
            pass
    return 1e6 * (perf_counter() - start) / SWITCHES


def measure(path: Path, ms: Sequence[int], budgets: Sequence[int]) -> Results:
    """A short GEMM benchmark inside partitions, written to `path`."""
    from smkern.bench.cases import gemm_groups
    from smkern.bench.gemm import Deadline, run

    results = Results(meta=collect_meta())
    groups = gemm_groups((SHAPE,), tuple(ms), tuple(budgets))
    run(groups, results, path, Deadline.after(None), again=False)
    return results


def rates_table(results: Results) -> Table:
    """TFLOP/s by provider: rows of M and budget."""
    providers = {"smkern": "smkern", "cublas": "cuBLAS", "wrong-budget": "told all SMs"}
    best: dict[tuple[int, int], dict[str, float]] = {}
    for cell in results.cells:
        if cell["op"] == "gemm" and cell["provider"] in providers and cell.get("tflops"):
            row = best.setdefault((cell["case"]["m"], cell["group_sms"]), {})
            row[cell["provider"]] = max(cell["tflops"], row.get(cell["provider"], 0.0))
    table = Table(title="TFLOP/s inside the partition, cuBLAS in its better one", box=None)
    for column in ("M", "SMs", *providers.values(), "smkern / cuBLAS"):
        table.add_column(column, justify="right")
    for (m, num_sms), row in sorted(best.items()):
        figures = [f"{row[name]:.0f}" if name in row else "" for name in providers]
        ratio = row["smkern"] / row["cublas"] if row.keys() >= {"smkern", "cublas"} else None
        table.add_row(str(m), str(num_sms), *figures, "" if ratio is None else f"{ratio:.2f}")
    return table


def demo_with_gpu(console: Console, out: Path, num_sms: int) -> None:
    """Partitions, then the GEMM inside them, then the picture."""
    show_partitions(console)
    budgets = [count for count in BUDGETS if count <= num_sms]
    console.print("\nOur GEMM and cuBLAS inside partitions (compiles first, then measures) ...")
    results = measure(out / "gemm.json", MS, budgets)
    console.print(rates_table(results))
    draw(console, results, out)


def demo_without_gpu(console: Console, out: Path) -> None:
    """The plan, the interpreted kernel's values, the committed picture, what was left out."""
    console.print(plan_table(smkern.load_profile()))
    console.print("\n[bold]Our GEMM kernel in Triton's interpreter[/], fp16, 77 x 150 x 136:")
    console.print(interpret(), markup=False, highlight=False)
    if COMMITTED.exists():
        results = load_results(COMMITTED)
        console.print(f"\nResults committed from an {results.meta['gpu']}:")
        draw(console, results, out)
    console.print("\n[bold]What could not run here:[/]")
    missing = () if COMMITTED.exists() else (f"the picture: there is no {COMMITTED.name} yet",)
    for line in (*COULD_NOT_RUN, *missing):
        console.print(f"  - {line}", markup=False, highlight=False)


def draw(console: Console, results: Results, out: Path) -> None:
    """TFLOP/s over SM budget: ours, cuBLAS and the ideal line."""
    from smkern.bench.plots import gemm

    for path in gemm.draw(results, out):
        console.print(f"Picture: {path}")


@click.command("demo")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("demo"),
    show_default=True,
    help="Folder for the picture and its results.",
)
def command(out: Path) -> None:
    """See it: two policies serve a crowd; partitions that confine, a GEMM inside them.

    Without a GPU: the policies simulated, the plan, the kernel interpreted, the committed results;
    and what could not run.
    """
    console = doctor.make_console()
    out.mkdir(parents=True, exist_ok=True)
    report = doctor.examine()
    doctor.render(report, console)
    console.print()
    try:
        info = smkern.device_info()
    except DeviceError:
        demo_runtime.show(console, out, None)
        console.print()
        demo_without_gpu(console, out)
    else:
        demo_runtime.show(console, out, info.name)
        console.print()
        demo_with_gpu(console, out, info.num_sms)
    if report.failed:
        raise SystemExit(1)


if __name__ == "__main__":
    command()
