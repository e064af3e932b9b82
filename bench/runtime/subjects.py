"""The suite's subjects: what each measures, and what that is measured with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from smkern.bench.runtime.cases import (
    AGGREGATED,
    ALONE,
    GAP_RUNG,
    OURS,
    OVERHEAD,
    QUEUES,
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


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to measure: what its first cell is called, and how it is measured."""

    name: str
    provider: str
    about: Mapping[str, Any]
    measure: Callable[[], Iterator[Cell]]


@dataclass(slots=True)
class Tasks:
    """The tasks of one model's subjects; what they measure with is made when the first needs it."""

    plan: RuntimePlan
    seconds: float
    stack: ExitStack
    _rigs: dict[str, Rig] = field(default_factory=dict)
    _model: Any = None

    def of(self, subject: str) -> Iterator[Task]:
        """A subject's tasks."""
        return SUBJECTS[subject](self)

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

    yield Task(QUEUES, OURS, {}, lambda: queue_cells(tasks.rig()))


def _aggregated(tasks: Tasks) -> Iterator[Task]:
    yield from _chunked(tasks, OURS)


def _chunked(tasks: Tasks, provider: str) -> Iterator[Task]:
    from smkern.bench.runtime.steady import Chunked, alone

    made: list[Chunked] = []

    def cells(limit_ms: float) -> Iterator[Cell]:
        if not made:
            made.append(Chunked(tasks.rig(provider)))
        return made[0].cells(limit_ms)

    yield Task(ALONE, provider, {}, lambda: alone(tasks.rig(provider)))
    for limit_ms in tasks.plan.limits_ms:
        about = {"limit_ms": limit_ms}
        yield Task(AGGREGATED, provider, about, partial(cells, limit_ms))


def _steady(tasks: Tasks) -> Iterator[Task]:
    yield from _rungs(tasks, OURS, tasks.plan.rungs)


def _rungs(tasks: Tasks, provider: str, rungs: tuple[int, ...]) -> Iterator[Task]:
    from smkern.bench.runtime.steady import multiplexed

    for rung in rungs:

        def cells(rung: int = rung) -> Iterator[Cell]:
            return multiplexed(tasks.rig(provider), rung)

        yield Task(STEADY, provider, {"rung": rung}, cells)


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
    yield from _chunked(tasks, STOCK)


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
}
"""Name to its tasks, in the order in which they are run."""
