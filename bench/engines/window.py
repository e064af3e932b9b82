"""The goodput of a window of real traffic: vLLM at its best token budget, and smkern's policies."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import cast

from smkern.bench.engines.cases import (
    OP,
    OWN,
    WINDOW,
    WINDOW_TRY,
    Cell,
    EngineLoad,
    TokenBudget,
    vllm_options,
)
from smkern.bench.engines.tasks import Task
from smkern.bench.replay.cases import Case, trace_name
from smkern.bench.replay.measure import How, goodput_cell
from smkern.bench.results import Results, cell_key
from smkern.device import device_info
from smkern.garbage import seldom_collected
from smkern.models import preset
from smkern.policies import Policy
from smkern.replay import Sizes
from smkern.replay.run import Server
from smkern.replay.sizes import kv_tokens_beside
from smkern.server import RUNGS

START_BUDGETS = {15.0: 208, 20.0: 480, 30.0: 768}
"""By the limit, ms, where a search begins."""
OTHER_BUDGET = 512
STEPS = (64, 32, 16)
"""Budgets so far above and below the best one are tried, for as long as one is better."""
FCFS = "fcfs"
SERVED_BY = (("adaptive", FCFS), ("adaptive", "slack"), ("chunked", FCFS))
"""smkern's policies and the orders in which requests wait; vLLM serves who came first."""
MAX_CONTEXT, KV_TOKENS = 16_384, 300_000
"""Tokens of a request, and of the caches where so many fit; all engines' alike."""
HOW = How(seconds=30.0, precision=0.04)
"""A goodput to 4%: a replay takes its half minute."""


@dataclass(slots=True)
class WindowTasks:
    """Searches of the highest rate at which a trace's window keeps its limits.

    Attributes:
        load: Its model and its limits are served.
        provider: Who serves.
        trace: A name of `smkern replay`'s, or a path.
        folder: Where recorded traces lie.
        results: Has the tries of earlier runs.
        engine: What serves; called when a task needs it, made once.
    """

    load: EngineLoad
    provider: str
    trace: str
    folder: Path
    results: Results
    engine: Callable[[], Server]

    def tasks(self) -> Iterator[Task]:
        under = self._ours if self.provider in OWN else self._vllms
        for limit_ms in self.load.limits_ms:
            yield f"{WINDOW} {limit_ms:g}ms", partial(under, limit_ms)

    def _ours(self, limit_ms: float) -> Iterator[Cell]:
        near = None
        for policy, order in SERVED_BY:
            cell = self._goodput(WINDOW, limit_ms, order, policy, near_rps=near)
            yield cell
            near = cell["value"] or None

    def _vllms(self, limit_ms: float) -> Iterator[Cell]:
        """The best token budget's goodput; in front of it those of the budgets that were tried."""
        best = yield from self._try(limit_ms, START_BUDGETS.get(limit_ms, OTHER_BUDGET), None)
        for step in STEPS:
            for sign in (1, -1):
                is_better = True
                while is_better:
                    found = yield from self._try(limit_ms, best["budget"] + sign * step, best)
                    is_better = found["value"] > best["value"]
                    best = found if is_better else best
        yield best | {"case": best["case"] | {"name": WINDOW, "policy": "vllm"}}

    def _try(self, limit_ms: float, budget: int, best: Cell | None) -> Generator[Cell, None, Cell]:
        """A budget's goodput; 0 where it is not above the best one's."""
        least = best["value"] if best else 0.0
        case = self._case(WINDOW_TRY, limit_ms, FCFS, f"vllm:{budget}")
        known = self.results.by_key.get(cell_key(case))
        if known is None:
            known = self._goodput(
                WINDOW_TRY, limit_ms, FCFS, f"vllm:{budget}", near_rps=least or None,
                least_rps=least, make=lambda: cast("Policy", TokenBudget(budget)),
            )  # fmt: skip
            known |= {"budget": budget}
            yield known
        return known

    def _case(self, name: str, limit_ms: float, order: str, policy: str) -> Cell:
        case = {"model": self.load.model, "name": name, "trace": trace_name(self.trace)}
        case |= {"limit": f"{limit_ms:g}ms", "order": order, "policy": policy}
        return {"op": OP, "case": case, "provider": self.provider, "unit": "requests/s"}

    def _goodput(
        self, name: str, limit_ms: float, order: str, policy: str, *, near_rps: float | None,
        least_rps: float = 0.0, make: Callable[[], Policy] | None = None,
    ) -> Cell:  # fmt: skip
        case = Case(self.load.model, self.trace, limit_ms, order, policy)
        found = goodput_cell(
            case, replace(HOW, folder=self.folder), spec=policy, near_rps=near_rps,
            least_rps=least_rps, server=self.engine(), make=make,
        )  # fmt: skip
        cell = self._case(name, limit_ms, order, policy)
        if found is None:
            return cell | {"value": 0.0, "not_above": least_rps}
        kept = {key: value for key, value in found.items() if key not in (*cell, "confirmed")}
        return cell | {"value": found["goodput_rps"]} | kept


def window_tasks(
    load: EngineLoad, provider: str, trace: str, folder: Path, results: Results, stack: ExitStack
) -> WindowTasks:
    """Tasks of an engine on a trace; `stack` closes the engine."""

    @cache
    def engine() -> Server:
        kv_tokens = min(KV_TOKENS, kv_tokens_beside(preset(load.model), device_info()))
        if provider in OWN:
            from smkern.bench.replay.gpu import open_server

            sizes = Sizes(kv_tokens, RUNGS, max_context=MAX_CONTEXT)
            return stack.enter_context(open_server(load.model + OWN[provider], RUNGS, sizes=sizes))
        from smkern.bench.engines.vllm_server import VllmServer

        made = VllmServer(load.model, MAX_CONTEXT, kv_tokens, **vllm_options(provider))
        stack.enter_context(seldom_collected())
        return made

    return WindowTasks(load, provider, trace, folder, results, engine)
