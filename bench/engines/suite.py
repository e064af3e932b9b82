"""`smkern bench engines`: the same load served by stock vLLM, vLLM with smkern, and smkern."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
from rich.progress import Progress

from smkern.bench.engines.cases import LIMITS_MS, OWN, PROVIDERS, Cell, EngineLoad
from smkern.bench.engines.rows import summarize
from smkern.bench.engines.tasks import QUICK_STEPS, STEPS, Task, our_tasks, vllm_tasks
from smkern.bench.engines.turns import Turns, run_by_turns
from smkern.bench.engines.window import window_tasks
from smkern.bench.replay.cases import checked_traces, trace_named
from smkern.bench.replay.grid import TRACES_OPTION
from smkern.bench.results import Results, load_results, merge_files
from smkern.bench.rows import has_cell
from smkern.bench.suite import TIME_LIMIT_OPTION, Output, Run, conclude, known_names, suite_command
from smkern.device import device_info
from smkern.measure.options import IntList
from smkern.measure.timing import first_line


def measure_engine(
    provider: str, load: EngineLoad, results: Results, output: Output, steps: int,
    window: tuple[str, Path] | None = None, turns: Turns | None = None,
) -> int:  # fmt: skip
    """Measure what the file lacks of one engine; how many tasks are left.

    Args:
        steps: Of a figure.
        window: A trace and the folder of recorded ones: its goodput is measured instead.
        turns: Those of engines beside it, which it takes its own among.
    """
    with ExitStack() as stack, Progress(auto_refresh=False) as progress:
        given = (
            window_tasks(load, provider, *window, results, stack)
            if window
            else our_tasks(load, provider, stack, steps)
            if provider in OWN
            else vllm_tasks(load, provider, results, steps)
        )
        of = {"model": load.model}
        lacking = [
            x for x in given.tasks() if not has_cell(results.cells, provider, _case_of(x[0]) | of)
        ]
        wanted = iter(lacking)
        if turns and lacking:
            given.engine()
            turns.wait()

        def measure(task: Task) -> Iterator[Cell]:
            began = time.monotonic()
            try:
                for cell in turns.each(task[1]()) if turns else task[1]():
                    shown = {k: v for k, v in cell.items() if k not in ("op", "unit", "policy")}
                    progress.console.print(str(shown), markup=False, soft_wrap=True)
                    yield cell
            except Exception as error:  # noqa: BLE001  one failed task is a cell, not the end
                progress.console.print_exception()
                case = _case_of(task[0])
                yield load.cell(provider=provider, value=0.0, unit="", **case) | {
                    "error": first_line(error)
                }
            progress.console.print(f"{provider} {task[0]}: {time.monotonic() - began:.1f} s")

        Run(results, output, summarize, progress).through(wanted, measure)
        return sum(1 for _ in wanted)


def _case_of(task: str) -> dict[str, Any]:
    name, _, limit = task.partition(" ")
    return {"name": name, "limit": limit} if limit else {"name": name}


def in_processes(
    names: Sequence[str], output: Output, more: Sequence[str], *, by_turns: bool
) -> None:
    """Measure engines in a process each: one after another, as each takes the GPU's memory, or
    beside each other by turns."""

    def command(name: str, out: Path) -> list[str]:
        program = [sys.executable, "-m", "smkern", "bench", "engines", "--engines", name]
        program += ["--out", str(out), "--resume", *more]
        at_s = output.deadline.at_s
        left_s = [] if at_s is None else ["--time-limit-s", f"{at_s - time.monotonic():.0f}"]
        return program + left_s

    out, codes = output.path, dict[str, int]()
    if by_turns:
        parts = {name: out.with_name(f"{out.stem}.{name}{out.suffix}") for name in names}
        before = [out] if out.exists() else []
        if before:
            for name, part in parts.items():
                results_of(name, out).save(part)
        codes = run_by_turns({name: command(name, part) for name, part in parts.items()})
        if written := [part for part in parts.values() if part.exists()]:
            merge_files([*before, *written], out)
        for part in written:
            part.unlink()
    else:
        for name in names:
            codes[name] = subprocess.run(command(name, out), check=False).returncode
    for name, code in codes.items():
        if code:
            click.echo(f"{name}: its process ended with {code}", err=True)


def results_of(provider: str, path: Path) -> Results:
    """What a file has of one engine."""
    found = load_results(path)
    found.drop(lambda cell: bool(cell["provider"] != provider))
    return found


@suite_command(
    "engines",
    click.option("--engines", default=None, help=f"Who serves, among: {','.join(PROVIDERS)}"),
    click.option("--model", type=click.Choice([*LIMITS_MS]), default="qwen3-8b", show_default=True),
    click.option("--limits", type=IntList(), default=None, help="TBT limits, ms: 15,20,30"),
    click.option("--window", default=None, help="Goodput of a trace's window instead, by name."),
    click.option(
        "--by-turns", is_flag=True, help="Engines beside each other: all fit in the GPU's memory."
    ),
    click.option("--turns", type=click.Path(path_type=Path), default=None, hidden=True),
    TRACES_OPTION,
    TIME_LIMIT_OPTION,
    quick="Few steps a figure.",
)
def command(
    output: Output, *, engines: str | None, model: str, limits: tuple[int, ...] | None,
    window: str | None, by_turns: bool, turns: Path | None, traces_folder: Path,
) -> None:  # fmt: skip
    """Measure prompt tokens a millisecond under TBT limits: vLLM's and smkern's, one load."""
    names = known_names(engines, PROVIDERS, "engine")
    if window:
        trace_named(*checked_traces([window]), traces_folder)  # there, before minutes of loading
    device_info()  # without a GPU an error, before a file is made
    load = EngineLoad(model, limits_ms=tuple(limits or LIMITS_MS[model]))
    if len(names) > 1:
        more = ["--model", model, *(["--quick"] if output.quick else [])]
        more += ["--limits", ",".join(f"{limit:g}" for limit in load.limits_ms)]
        more += ["--window", window, "--traces-folder", str(traces_folder)] if window else []
        in_processes(names, output, more, by_turns=by_turns)
        return
    results = output.open()
    at = (window, traces_folder) if window else None
    steps = QUICK_STEPS if output.quick else STEPS
    among = Turns(turns, names[0]) if turns else None
    left = measure_engine(names[0], load, results, output, steps, at, among)
    conclude(results, output.path, left, of="tasks")
