"""What is measured of an engine: decode alone, prompts alone, and both under limits."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Protocol

from smkern.bench.engines.cases import (
    DECODE,
    OWN,
    PREFILL,
    SERVED,
    TRY,
    Cell,
    EngineLoad,
    vllm_options,
)
from smkern.bench.engines.steps import Steps
from smkern.bench.results import Results, cell_key
from smkern.bench.runtime.cases import plans_named
from smkern.bench.runtime.search import last_kept
from smkern.bench.runtime.served_load import WORKLOAD, ServedLoad, open_load
from smkern.models import Weights, preset
from smkern.server import RUNGS

TRY_STEPS, STEPS, QUICK_STEPS = 100, 256, 64
"""Steps of a try while a budget is searched, and of a figure."""
ROUNDS = 7
"""Of prompts alone, 3 s each: by turns those of engines alternate."""
AROUND = 3
"""Budgets above and below the one found that more steps are spent on, the largest first: a try of
few steps errs to both sides."""
POLICY = "adaptive"

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
        provider: One of vLLM's: "vllm", "vllm+smkern", ...
        engine: The engine; called when a task needs it, made once.
        results: Has the tries of earlier runs.
        steps: Steps of a figure.
    """

    load: EngineLoad
    provider: str
    engine: Callable[[], Watching]
    results: Results
    steps: int

    def tasks(self) -> Iterator[Task]:
        yield DECODE, self._decode
        yield PREFILL, self._prefill
        for limit_ms in self.load.limits_ms:
            yield _served(limit_ms), partial(self._under, limit_ms)

    def _decode(self) -> Iterator[Cell]:
        found = self.engine().watch(None, self.steps)
        figures = found.figures()
        value = figures["tbt_p50_ms"]
        yield self.load.cell(DECODE, self.provider, value, "ms") | figures

    def _prefill(self) -> Iterator[Cell]:
        rates: list[float] = []
        for _ in range(ROUNDS):
            rates.append(round(self.engine().prefill_rate(), 3))
            value = statistics.median(rates)
            yield self.load.cell(PREFILL, self.provider, value, "tokens/ms") | {"rates": rates[:]}

    def _under(self, limit_ms: float) -> Iterator[Cell]:
        """The best budget under a limit; in front of it the tries that were needed."""

        def keeps(budget: int) -> Generator[Cell, None, bool]:
            key = cell_key(self._cell(TRY, Steps(), budget=budget))
            known = self.results.by_key.get(key)
            if known is None:
                known = self._cell(TRY, self._watched(budget, limit_ms, TRY_STEPS), budget=budget)
                yield known
            return bool(known["tbt_p99_ms"] <= limit_ms)

        budgets = self.load.budgets
        best = yield from last_kept(budgets, keeps)
        for budget in reversed(budgets[max(best - AROUND, 0) : best + AROUND]):
            found = self._watched(budget, limit_ms, self.steps)
            cell = self._cell(SERVED, found, limit=f"{limit_ms:g}ms") | {"budget": budget}
            if found.p99_ms <= limit_ms:
                break
        yield cell

    def _watched(self, budget: int, limit_ms: float, steps: int) -> Steps:
        """Steps beside prompts; the better of two watches where only a few of them miss the limit,
        as a pause of the host has them late, too."""
        found = self.engine().watch(budget, steps)
        if found.p50_ms <= limit_ms < found.p99_ms:
            found = min(found, self.engine().watch(budget, steps), key=lambda x: x.p99_ms)
        return found

    def _cell(self, name: str, found: Steps, **case: Any) -> Cell:
        figures = found.figures() if found.times_ms else {}
        rate = figures.get("tokens_per_ms", 0.0)
        return self.load.cell(name, self.provider, rate, "tokens/ms", **case) | figures


def vllm_tasks(load: EngineLoad, provider: str, results: Results, steps: int) -> VllmTasks:
    """Tasks of stock vLLM, or of vLLM with parts of smkern."""

    @cache
    def engine() -> Watching:
        from smkern.bench.engines.vllm_engine import VllmEngine

        return VllmEngine(load, **vllm_options(provider))

    return VllmTasks(load, provider, engine, results, steps)


@dataclass(slots=True)
class OurTasks:
    """What is measured of smkern's `Multiplexer`, told the limit.

    Attributes:
        load: What is served.
        provider: "smkern", or with weights in fp8.
        engine: The model behind a `Multiplexer`, made when it is first asked for.
        steps: Of a figure, as long as the limit each.
    """

    load: EngineLoad
    provider: str
    engine: Callable[[], ServedLoad]
    steps: int

    def tasks(self) -> Iterator[Task]:
        for limit_ms in self.load.limits_ms:
            yield _served(limit_ms), partial(self._under, limit_ms)

    def _under(self, limit_ms: float) -> Iterator[Cell]:
        served = self.engine()
        policy = served.told(POLICY, limit_ms)
        figures = served.watch(policy, 1e-3 * limit_ms * self.steps).figures()
        rate, limit = figures["tokens_per_ms"], f"{limit_ms:g}ms"
        cell = self.load.cell(SERVED, self.provider, rate, "tokens/ms", limit=limit)
        yield cell | figures | {"policy": repr(policy)}


def our_tasks(load: EngineLoad, provider: str, stack: ExitStack, steps: int) -> OurTasks:
    """Tasks of smkern; `stack` closes the model."""

    @cache
    def engine() -> ServedLoad:
        model = load.model + OWN[provider]
        plan = replace(plans_named([model])[0], rungs=RUNGS)
        workload = replace(WORKLOAD, running=load.rows, context=load.context, prompt=load.prompt)
        weights = Weights.random(preset(model), device="cuda")
        return stack.enter_context(open_load(plan, weights, workload=workload))

    return OurTasks(load, provider, engine, steps)


def _served(limit_ms: float) -> str:
    return f"{SERVED} {limit_ms:g}ms"
