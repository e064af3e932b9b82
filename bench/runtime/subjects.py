"""The suite's subjects: which cells each measures, of which provider, on what."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from smkern.bench.results import Results
from smkern.bench.runtime import served, steady_bench
from smkern.bench.runtime.cases import (
    ABLATION,
    AGGREGATED,
    ALONE,
    GAP_RUNG,
    HOST,
    MEMORY,
    OURS,
    OVERHEAD,
    PACED,
    QUEUES,
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
from smkern.bench.runtime.chunked import MARGINS, Chunked
from smkern.bench.runtime.launching import layerwise
from smkern.bench.runtime.queues import queue_cells
from smkern.bench.runtime.rows import of
from smkern.bench.runtime.served_load import COMPARED, SERVED_S, ServedLoad, open_load
from smkern.bench.runtime.steady import alone, gaps, multiplexed, paced
from smkern.bench.runtime.switch import switch_cells
from smkern.models import Weights, preset

PAUSE = 1.2
"""Least TBT limit over the time of a step that leaves time to pause."""


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to measure.

    Attributes:
        name, provider, about: Name, provider and further case of its first cell.
        measure: Gives its cells.
        is_once: Whether the first of several rounds is enough: what it counts does not depend on
            the chip's clock.
    """

    name: str
    provider: str
    about: Mapping[str, Any]
    measure: Callable[[], Iterator[Cell]]
    is_once: bool = False


@dataclass(slots=True)
class Tasks:
    """The tasks of one model's subjects; what they measure with is made when the first needs it.

    Args:
        seconds: Length of a figure of the steady state.
        stack: Closes what was made.
        policies: Names of those that serve.
        served_s: Length of a figure of served load.
    """

    plan: RuntimePlan
    seconds: float
    stack: ExitStack
    results: Results
    policies: tuple[str, ...] = COMPARED
    served_s: float = SERVED_S
    _benches: dict[str, steady_bench.SteadyBench] = field(default_factory=dict)
    _model: Any = None
    _weights: Weights | None = None
    _load: ServedLoad | None = None

    def of(self, subject: str) -> Iterable[Task]:
        """A subject's tasks."""
        return SUBJECTS[subject](self)

    def steady(
        self,
        name: str,
        measure: Callable[[steady_bench.SteadyBench], Iterator[Cell]],
        provider: str = OURS,
        *,
        is_once: bool = False,
        **about: Any,
    ) -> Task:
        """A task on the model with a provider's kernels."""
        return Task(name, provider, about, lambda: measure(self.bench(provider)), is_once)

    def served(
        self, name: str, measure: Callable[..., Iterator[Cell]], *given: Any, is_once: bool = False
    ) -> Iterator[Task]:
        """A task of serving requests; none where a model leaves no room for their pages."""
        if self.plan.served_pages:
            cells: Callable[[], Iterator[Cell]] = lambda: measure(  # noqa: E731
                self.plan, self.weights(), *given
            )
            yield Task(name, OURS, {}, cells, is_once)

    def step_ms(self, provider: str, rung: int) -> float | None:
        """Median time of a decode step beside prompts, where the file has it."""
        found = of(self.results.cells, STEADY, model=self.plan.model, rung=rung)
        return next((c["tbt_p50_ms"] for c in found if c["provider"] == provider), None)

    def load(self) -> ServedLoad:
        """The model behind a `Multiplexer`, on every rung of the plan."""
        if self._load is None:
            self._load = self.stack.enter_context(open_load(self.plan, self.weights()))
            self._load.remember(self.results.cells)
        return self._load

    def weights(self) -> Weights:
        """Weights of the model."""
        if self._model is not None:
            weights: Weights = self._model.decoder.weights
            return weights
        if self._weights is None:
            self._weights = Weights.random(preset(self.plan.model), device="cuda")
        return self._weights

    def bench(self, provider: str = OURS) -> steady_bench.SteadyBench:
        """The model with a provider's kernels, on a ladder where they run best."""
        if self._model is None:
            self._model = steady_bench.made_model(self.plan)
        if provider not in self._benches:
            made = steady_bench.open_bench(self._model, self.plan, provider, self.seconds)
            self._benches[provider] = self.stack.enter_context(made)
        return self._benches[provider]

    def nearest(self, rung: int) -> int:
        """The plan's rung closest to `rung`."""
        return min(self.plan.rungs, key=lambda known: abs(known - rung))


def _chunked(tasks: Tasks, provider: str = OURS) -> Iterator[Task]:
    yield tasks.steady(ALONE, alone, provider)
    made: list[Chunked] = []

    def cells(bench: steady_bench.SteadyBench, limit_ms: float) -> Iterator[Cell]:
        if not made:
            made.append(Chunked(bench))
        return made[0].cells(limit_ms)

    for limit_ms in tasks.plan.limits_ms:
        measure = partial(cells, limit_ms=limit_ms)
        yield tasks.steady(AGGREGATED, measure, provider, limit_ms=limit_ms, margin=MARGINS[-1])


def _rungs(tasks: Tasks, provider: str, rungs: tuple[int, ...]) -> Iterator[Task]:
    """Each rung; then paced, where a limit leaves time to pause in, as far as steps were
    measured there."""
    for rung in rungs:
        yield tasks.steady(STEADY, partial(multiplexed, rung=rung), provider, rung=rung)
    for rung in (rung for rung in tasks.plan.paced if rung in rungs):
        for limit_ms in tasks.plan.limits_ms:
            step_ms = tasks.step_ms(provider, rung)
            if step_ms is not None and limit_ms >= PAUSE * step_ms:
                measure = partial(paced, rung=rung, limit_ms=limit_ms)
                yield tasks.steady(PACED, measure, provider, rung=rung, limit_ms=limit_ms)


def _stock(tasks: Tasks) -> Iterator[Task]:
    """Of models in bf16: stock kernels read those weights."""
    if preset(tasks.plan.model).quantization is not None:
        return
    yield from _rungs(tasks, STOCK, STOCK_RUNGS.get(tasks.plan.model, tasks.plan.rungs))
    yield from _chunked(tasks, STOCK)


def _served(tasks: Tasks) -> Iterator[Task]:
    """Each policy under each limit."""
    if not tasks.plan.served_pages:
        return
    for name in tasks.policies:
        for limit_ms in tasks.plan.served_ms:
            about = {"policy": name, "limit": f"{limit_ms:g}ms"}

            def measure(name: str = name, limit_ms: float = limit_ms) -> Iterator[Cell]:
                return tasks.load().row(name, limit_ms, tasks.served_s)

            yield Task(SERVED_RATE, OURS, about, measure)


SUBJECTS: dict[str, Callable[[Tasks], Iterable[Task]]] = {
    "queues": lambda x: [x.steady(QUEUES, queue_cells, is_once=True)],
    "aggregated": _chunked,
    "steady": lambda x: _rungs(x, OURS, x.plan.rungs),
    "gaps": lambda x: [x.steady(gap_name(2), partial(gaps, rung=x.nearest(GAP_RUNG)))],
    "layerwise": lambda x: [x.steady(OVERHEAD, partial(layerwise, rung=x.nearest(GAP_RUNG)))],
    "switch": lambda x: [
        x.steady(SWITCH, partial(switch_cells, rungs=[*map(x.nearest, SWITCH_RUNGS)]))
    ],
    "stock": _stock,
    "memory": lambda x: x.served(MEMORY, served.memory_cells, is_once=True),
    "host": lambda x: x.served(HOST, served.host_cells, x.served_s / 5),
    "ablation": lambda x: x.served(f"{ABLATION}_tbt_p50_ms", served.ablation_cells, x.served_s / 2),
    "served": _served,
}
"""Name to its tasks, in the order in which they are run."""
