"""The suite's subjects: what each measures, and what that is measured with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from smkern.bench.results import Results
from smkern.bench.runtime.cases import (
    ABLATION,
    AGGREGATED,
    ALONE,
    GAP_RUNG,
    HOST,
    IDLE_CHUNK,
    MEMORY,
    MIXED_IDLE,
    OURS,
    OVERHEAD,
    PACED,
    QUEUES,
    SERVED,
    SERVED_RATE,
    STEADY,
    STOCK,
    STOCK_RUNGS,
    SWITCH,
    SWITCH_RUNGS,
    Cell,
    RuntimePlan,
    gap_name,
)
from smkern.bench.runtime.rig import Rig
from smkern.bench.runtime.rows import gains, of

if TYPE_CHECKING:
    from smkern.models import Weights


PAUSE = 1.2
"""A limit of so many steps leaves time to pause in."""


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to measure: what its first cell is called, and how it is measured."""

    name: str
    provider: str
    about: Mapping[str, Any]
    measure: Callable[[], Iterator[Cell]]
    is_once: bool = False
    """Whether the first of several rounds is enough: what it counts does not turn with the chip."""


@dataclass(slots=True)
class Tasks:
    """The tasks of one model's subjects; what they measure with is made when the first needs it."""

    plan: RuntimePlan
    seconds: float
    stack: ExitStack
    results: Results
    _rigs: dict[str, Rig] = field(default_factory=dict)
    _model: Any = None
    _weights: dict[int | None, Weights] = field(default_factory=dict)
    _chosen: list[Cell] = field(default_factory=list)

    def of(self, subject: str) -> Iterator[Task]:
        """A subject's tasks."""
        return SUBJECTS[subject](self)

    def step_ms(self, provider: str, rung: int) -> float | None:
        """Of a decode step beside prompts, where the file has it."""
        found = of(self.results.cells, STEADY, model=self.plan.model, rung=rung)
        return next((c["tbt_p50_ms"] for c in found if c["provider"] == provider), None)

    def chosen(self) -> list[Cell]:
        """The gains whose rungs and chunks serve: the same in all rounds, or a cell would be the
        median of two rungs."""
        if not self._chosen:
            self._chosen = [
                cell
                for cell in gains(self.results.cells)
                if cell["provider"] == OURS
                and cell["case"]["model"] == self.plan.model
                and not cell["paced"]
            ]
        return self._chosen

    def weights(self, layers: int | None = None) -> Weights:
        """Of the model, or of one of its widths with fewer layers."""
        from smkern.bench.runtime.setting import made_weights

        if layers is None and self._model is not None:
            return self._model.decoder.weights
        if layers not in self._weights:
            self._weights[layers] = made_weights(self.plan, layers)
        return self._weights[layers]

    def rig(self, provider: str = OURS) -> Rig:
        """The model with a provider's kernels, on a ladder where they run best."""
        from smkern.bench.runtime.setting import made_model, open_rig

        if self._model is None:
            self._model = made_model(self.plan)
        if provider not in self._rigs:
            made = open_rig(self._model, self.plan, provider, self.seconds)
            self._rigs[provider] = self.stack.enter_context(made)
        return self._rigs[provider]


def _queues(tasks: Tasks) -> Iterator[Task]:
    from smkern.bench.runtime.queues import queue_cells

    yield Task(QUEUES, OURS, {}, lambda: queue_cells(tasks.rig()), is_once=True)


def _aggregated(tasks: Tasks) -> Iterator[Task]:
    yield from _chunked(tasks, OURS)


def _chunked(tasks: Tasks, provider: str) -> Iterator[Task]:
    from smkern.bench.runtime.idle import mixed_idle
    from smkern.bench.runtime.steady import MARGINS, Chunked, alone

    made: list[Chunked] = []

    def cells(limit_ms: float) -> Iterator[Cell]:
        if not made:
            made.append(Chunked(tasks.rig(provider)))
        return made[0].cells(limit_ms)

    chunk = min(tasks.plan.chunks, key=lambda rows: abs(rows - IDLE_CHUNK))
    yield Task(MIXED_IDLE, provider, {}, lambda: mixed_idle(tasks.rig(provider), chunk))
    yield Task(ALONE, provider, {}, lambda: alone(tasks.rig(provider)))
    for limit_ms in tasks.plan.limits_ms:
        about = {"limit_ms": limit_ms, "margin": MARGINS[-1]}
        yield Task(AGGREGATED, provider, about, partial(cells, limit_ms))


def _steady(tasks: Tasks) -> Iterator[Task]:
    yield from _rungs(tasks, OURS, tasks.plan.rungs)
    yield from _paced(tasks, OURS)


def _rungs(tasks: Tasks, provider: str, rungs: tuple[int, ...]) -> Iterator[Task]:
    from smkern.bench.runtime.steady import multiplexed

    for rung in rungs:

        def cells(rung: int = rung) -> Iterator[Cell]:
            return multiplexed(tasks.rig(provider), rung)

        yield Task(STEADY, provider, {"rung": rung}, cells)


def _paced(tasks: Tasks, provider: str) -> Iterator[Task]:
    """Where a limit leaves time to pause in, as far as steps on these rungs were measured."""
    from smkern.bench.runtime.paced import paced

    known = tasks.plan.rungs if provider == OURS else STOCK_RUNGS.get(tasks.plan.model, ())
    for rung in tasks.plan.paced:
        if rung not in known:
            continue
        for limit_ms in tasks.plan.limits_ms:
            about = {"rung": rung, "limit_ms": limit_ms}
            step_ms = tasks.step_ms(provider, rung)
            if step_ms is None or limit_ms < PAUSE * step_ms:
                continue

            def cells(rung: int = rung, limit_ms: float = limit_ms) -> Iterator[Cell]:
                return paced(tasks.rig(provider), rung, limit_ms)

            yield Task(PACED, provider, about, cells)


def _gaps(tasks: Tasks) -> Iterator[Task]:
    from smkern.bench.runtime.steady import gaps

    yield Task(gap_name(2), OURS, {}, lambda: gaps(tasks.rig(), nearest(tasks.plan, GAP_RUNG)))


def _layerwise(tasks: Tasks) -> Iterator[Task]:
    from smkern.bench.runtime.overhead import layerwise

    yield Task(OVERHEAD, OURS, {}, lambda: layerwise(tasks.rig(), nearest(tasks.plan, GAP_RUNG)))


def _switch(tasks: Tasks) -> Iterator[Task]:
    from smkern.bench.runtime.switch import switch_cells

    small, large = (nearest(tasks.plan, rung) for rung in SWITCH_RUNGS)
    yield Task(SWITCH, OURS, {}, lambda: switch_cells(tasks.rig(), (small, large)))


def _stock(tasks: Tasks) -> Iterator[Task]:
    yield from _rungs(tasks, STOCK, STOCK_RUNGS.get(tasks.plan.model, tasks.plan.rungs))
    yield from _paced(tasks, STOCK)
    yield from _chunked(tasks, STOCK)


def _memory(tasks: Tasks) -> Iterator[Task]:
    from smkern.bench.runtime.served import memory_cells

    if tasks.plan.model not in SERVED:
        return

    def cells() -> Iterator[Cell]:
        return memory_cells(tasks.plan, tasks.weights())

    yield Task(MEMORY, OURS, {}, cells, is_once=True)


def _host(tasks: Tasks) -> Iterator[Task]:
    from smkern.bench.runtime.served import host_cells

    if tasks.plan.model not in SERVED:
        return

    def cells() -> Iterator[Cell]:
        return host_cells(tasks.plan, tasks.weights(), 2 * tasks.seconds)

    yield Task(HOST, OURS, {}, cells)


def _ablation(tasks: Tasks) -> Iterator[Task]:
    from smkern.bench.runtime.served import ablation_cells

    if tasks.plan.model not in SERVED:
        return

    def cells() -> Iterator[Cell]:
        return ablation_cells(tasks.plan, tasks.weights(), 2 * tasks.seconds)

    yield Task(f"{ABLATION}_tbt_p50_ms", OURS, {}, cells)


def _served(tasks: Tasks) -> Iterator[Task]:
    """Where the file has the steady state of both sides."""
    from smkern.bench.runtime.served import served_cells

    if tasks.plan.model not in SERVED:
        return
    if known := tasks.chosen():
        yield Task(
            SERVED_RATE,
            OURS,
            {},
            lambda: served_cells(tasks.plan, tasks.weights(), 1.5 * tasks.seconds, known),
        )


def nearest(plan: RuntimePlan, rung: int) -> int:
    """The plan's rung next to one."""
    return min(plan.rungs, key=lambda known: abs(known - rung))


SUBJECTS: dict[str, Callable[[Tasks], Iterator[Task]]] = {
    "queues": _queues,
    "aggregated": _aggregated,
    "steady": _steady,
    "gaps": _gaps,
    "layerwise": _layerwise,
    "switch": _switch,
    "stock": _stock,
    "memory": _memory,
    "host": _host,
    "ablation": _ablation,
    "served": _served,
}
"""Name to its tasks, in the order in which they are run."""
