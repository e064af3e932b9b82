"""`smkern bench engines`: the same load served by stock vLLM, vLLM with smkern, and smkern."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import click
from rich.progress import Progress

from smkern.bench.engines.cases import (
    BACKENDS,
    DECODE,
    ENGINES,
    OURS,
    PREFILL,
    SERVED,
    TRY,
    Cell,
    EngineLoad,
)
from smkern.bench.engines.rows import summarize
from smkern.bench.engines.search import last_kept
from smkern.bench.engines.steps import Steps
from smkern.bench.results import Results, cell_key
from smkern.bench.suite import (
    TIME_LIMIT_OPTION,
    Output,
    Run,
    UnknownNameError,
    conclude,
    suite_command,
)
from smkern.measure.options import IntList
from smkern.measure.timing import first_line

TRY_STEPS, STEPS = 100, 256
"""Steps of a try while a budget is searched, and of a figure."""
STEPS_BACK = 3
"""Budgets that a search goes back where more steps miss the limit that a try had kept."""
POLICY = "adaptive"
OUR_RUNGS = (16, 24, 32, 40, 48, 52, 56, 64, 80)

Task = tuple[str, Callable[[], Iterator[Cell]]]


class Watching(Protocol):
    """An engine whose token budget is searched."""

    def watch(self, budget: int | None, steps: int) -> Steps: ...
    def prefill_rate(self) -> float: ...


@dataclass(slots=True)
class VllmTasks:
    """What is measured of vLLM.

    Attributes:
        load: What is served.
        provider: "vllm" or "vllm+smkern".
        engine: Makes the engine, when the first task needs it.
        results: Has the tries of earlier runs.
        steps: Steps of a figure.
        budget: The only token budget that serves; None: the best one is searched.
    """

    load: EngineLoad
    provider: str
    engine: Callable[[], Watching]
    results: Results
    steps: int = STEPS
    budget: int | None = None
    _made: list[Watching] = field(default_factory=list)

    def tasks(self) -> Iterator[Task]:
        yield DECODE, self._decode
        yield PREFILL, self._prefill
        for limit_ms in self.load.limits_ms:
            yield _served(limit_ms), partial(self._under, limit_ms)

    def _running(self) -> Watching:
        if not self._made:
            self._made.append(self.engine())
        return self._made[0]

    def _decode(self) -> Iterator[Cell]:
        found = self._running().watch(None, self.steps)
        figures = found.figures()
        cell = self.load.cell(DECODE, self.provider, figures["tbt_p50_ms"], "ms")
        yield cell | figures

    def _prefill(self) -> Iterator[Cell]:
        rate = self._running().prefill_rate()
        yield self.load.cell(PREFILL, self.provider, round(rate, 3), "tokens/ms")

    def _under(self, limit_ms: float) -> Iterator[Cell]:
        """The best budget under a limit; in front of it the tries that were needed."""
        tries: list[Cell] = []

        def keeps(budget: int) -> bool:
            key = cell_key(self._cell(TRY, Steps(), budget=budget))
            known = self.results.by_key.get(key)
            if known is None:
                known = self._cell(TRY, self._running().watch(budget, TRY_STEPS), budget=budget)
                self.results.add(known)
                tries.append(known)
            return bool(known["tbt_p99_ms"] <= limit_ms)

        budgets = self.load.budgets
        best = last_kept(budgets, keeps)
        yield from tries
        for budget in reversed(budgets[max(best - STEPS_BACK, 0) : best + 1]):
            found = self._running().watch(budget, self.steps)
            cell = self._cell(SERVED, found, limit=f"{limit_ms:g}ms") | {"budget": budget}
            if found.p99_ms <= limit_ms:
                break
        yield cell

    def _cell(self, name: str, found: Steps, **case: Any) -> Cell:
        figures = found.figures() if found.times_ms else {}
        rate = figures.get("tokens_per_ms", 0.0)
        return self.load.cell(name, self.provider, rate, "tokens/ms", **case) | figures


def vllm_tasks(load: EngineLoad, provider: str, results: Results, steps: int) -> Iterator[Task]:
    """Tasks of stock vLLM, or of vLLM with smkern's attention."""

    def make() -> Watching:
        from smkern.bench.engines.vllm_engine import VllmEngine

        return VllmEngine(load, BACKENDS[provider])

    yield from VllmTasks(load, provider, make, results, steps).tasks()


def our_tasks(load: EngineLoad, stack: ExitStack, seconds: float) -> Iterator[Task]:
    """Tasks of smkern's `Multiplexer`, told the limit."""
    from smkern.bench.runtime.cases import plans_named
    from smkern.bench.runtime.served_load import WORKLOAD, open_load, policy_named
    from smkern.models import Weights, preset

    plan = replace(plans_named([load.model])[0], rungs=OUR_RUNGS, served_chunks=(), chunk_rows=())
    opened: list[Any] = []

    def under(limit_ms: float) -> Iterator[Cell]:
        if not opened:
            weights = Weights.random(preset(load.model), device="cuda")
            workload = replace(
                WORKLOAD, running=load.rows, context=load.context, prompt=load.prompt
            )
            opened.append(stack.enter_context(open_load(plan, weights, workload=workload)))
        policy = policy_named(POLICY, plan, limit_ms)
        figures = opened[0].watch(policy, seconds).figures()
        rate, limit = figures["tokens_per_ms"], f"{limit_ms:g}ms"
        cell = load.cell(SERVED, OURS, rate, "tokens/ms", limit=limit)
        yield cell | figures | {"policy": repr(policy)}

    for limit_ms in load.limits_ms:
        yield _served(limit_ms), partial(under, limit_ms)


def _served(limit_ms: float) -> str:
    return f"{SERVED} {limit_ms:g}ms"


def measure_engine(
    name: str, load: EngineLoad, results: Results, output: Output, steps: int
) -> int:
    """Measure what the file lacks of one engine; how many tasks are left."""
    with ExitStack() as stack, Progress(auto_refresh=False) as progress:
        given = (
            our_tasks(load, stack, steps * 0.02)
            if name == OURS
            else vllm_tasks(load, name, results, steps)
        )
        wanted = iter([task for task in given if not _is_there(results, name, task[0])])

        def measure(task: Task) -> Iterator[Cell]:
            began = time.monotonic()
            try:
                for cell in task[1]():
                    shown = {k: v for k, v in cell.items() if k not in ("op", "unit", "policy")}
                    progress.console.print(str(shown), markup=False, soft_wrap=True)
                    yield cell
            except Exception as error:  # noqa: BLE001  one failed task is a cell, not the end
                progress.console.print_exception()
                yield _failed(load, name, task[0], first_line(error))
            progress.console.print(f"{name} {task[0]}: {time.monotonic() - began:.1f} s")

        Run(results, output, summarize, progress).through(wanted, measure)
        return sum(1 for _ in wanted)


def _failed(load: EngineLoad, provider: str, task: str, error: str) -> Cell:
    name, _, limit = task.partition(" ")
    case = {"limit": limit} if limit else {}
    return load.cell(name, provider, 0.0, "", **case) | {"error": error}


def _is_there(results: Results, provider: str, task: str) -> bool:
    name, _, limit = task.partition(" ")
    return any(
        cell["provider"] == provider
        and cell["case"]["name"] == name
        and cell["case"].get("limit", "") == limit
        and not cell.get("error")
        for cell in results.cells
    )


def engines_named(text: str | None) -> tuple[str, ...]:
    """Engines by name, apart by commas; all where none is named.

    Raises:
        UnknownNameError: one that there is not.
    """
    names = ENGINES if text is None else tuple(name for name in text.split(",") if name)
    for name in names:
        if name not in ENGINES:
            raise UnknownNameError(f"no engine is named {name!r}; there are {', '.join(ENGINES)}")
    return names


def each_by_itself(names: Sequence[str], more: Sequence[str]) -> None:
    """Measure engines one after another in a process each: each takes the GPU's memory."""
    for name in names:
        command = [sys.executable, "-m", "smkern", "bench", "engines", "--engines", name]
        code = subprocess.run([*command, "--resume", *more], check=False).returncode
        if code:
            click.echo(f"{name}: its process ended with {code}", err=True)


@suite_command(
    "engines",
    click.option("--engines", default=None, help=f"Who serves, among: {','.join(ENGINES)}"),
    click.option("--limits", type=IntList(), default=None, help="TBT limits, ms: 15,20,30"),
    click.option("--steps", type=int, default=STEPS, show_default=True, help="Of a figure."),
    TIME_LIMIT_OPTION,
    quick="Few steps a figure.",
)
def command(
    output: Output, *, engines: str | None, limits: tuple[int, ...] | None, steps: int
) -> None:
    """Measure prompt tokens a millisecond under TBT limits: vLLM's and smkern's, one load."""
    names = engines_named(engines)
    steps = 64 if output.quick else steps
    load = EngineLoad()
    load = replace(load, limits_ms=tuple(limits)) if limits else load
    if len(names) > 1:
        more = ["--steps", str(steps), "--out", str(output.path)]
        more += ["--limits", ",".join(f"{limit:g}" for limit in load.limits_ms)]
        each_by_itself(names, more)
        return
    results = output.open()
    left = measure_engine(names[0], load, results, output, steps)
    conclude(results, output.path, left, of="tasks")


if __name__ == "__main__":
    command()
