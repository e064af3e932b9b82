"""The steady state through the `Multiplexer`, under any policy and TBT limit: each policy at its
best, from equal contexts, on a chip that is as warm for one as for another."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from smkern.bench.power import power_meter
from smkern.bench.runtime.cases import OURS, SERVED_RATE, SERVED_TRY, Cell, RuntimePlan
from smkern.bench.runtime.rows import of
from smkern.bench.runtime.search import last_kept
from smkern.bench.runtime.watch import Watched, Workload
from smkern.bench.runtime.workload import Sizes, open_executor
from smkern.latency.nearest import places_of, predictor_for
from smkern.latency.predictor import Predictor
from smkern.measure.sm_clock import Clock, clock_on
from smkern.models import Weights
from smkern.policies import Chunked, Policy, StaticSplit
from smkern.replay.named import policy_named
from smkern.runtime.model.executor import ModelExecutor
from smkern.runtime.model.sizes import FIRST_CONTEXT
from smkern.runtime.place import Place

WORKLOAD = Workload(running=64, context=2048, prompt=4096)
SIZES = Sizes((), max_running=72, max_prefill=4, max_context=4352, reuse=True)
PREHEAT_S = 5.0
TRY_S, TRY_PREHEAT_S, TRY_REACH = 3.0, 1.0, 64
"""How long a setting is tried while the best is searched, and over how many keys."""
STEPS_BACK = 2
"""Settings that a search goes back where a longer watch misses the limit that a try had kept."""

COMPARED = ("chunked", "static_split", "adaptive")
SERVED_S = 20.0

Setting = int
SEARCHED: dict[str, Callable[[Setting], Policy]] = {
    "chunked": lambda tokens: Chunked(chunk_tokens=tokens),
    "static_split": lambda rung: StaticSplit(rung, layers=1),
}
"""Policies whose one setting is searched; all others are told the limit."""


@dataclass(slots=True)
class ServedLoad:
    """A model behind a `Multiplexer`, and what was tried on it.

    Attributes:
        plan: What is measured.
        executor: Serves; its pool finds prefixes again.
        workload: Requests that decode, and prompts that come.
        preheat_s: Load that is not counted in front of each row.
        try_s: How long a setting is tried while the best is searched.
        tries: p99 of TBT in ms, by policy and setting.
        chosen: The setting of a policy under a limit, the same in all rounds: rates of two
            settings have no median.
    """

    plan: RuntimePlan
    executor: ModelExecutor
    workload: Workload = WORKLOAD
    preheat_s: float = PREHEAT_S
    try_s: float = TRY_S
    tries: dict[tuple[str, Setting], float] = field(default_factory=dict)
    chosen: dict[tuple[str, float], Setting] = field(default_factory=dict)
    _clocks: dict[int | None, Clock] = field(default_factory=dict)
    _meter: Any = None
    _predictor: Predictor | None = None

    def remember(self, cells: Sequence[Cell]) -> None:
        """Settings that a file has need no other try."""
        for cell in of(cells, SERVED_TRY, model=self.plan.model):
            key = cell["case"]["policy"], cell["case"]["setting"]
            self.tries.setdefault(key, cell["tbt_p99_ms"])

    def watch(
        self,
        policy: Policy,
        seconds: float,
        *,
        preheat_s: float | None = None,
        rung: int | None = None,
        **changes: Any,
    ) -> Watched:
        """Serve and watch; `rung`: where the clock is read, `changes`: of the workload."""
        return replace(self.workload, **changes).watch(
            self.executor,
            policy,
            seconds,
            preheat_s=self.preheat_s if preheat_s is None else preheat_s,
            clock=self.clock(rung),
            watts=self._power(),
        )

    def clock(self, rung: int | None) -> Clock:
        """A clock of the decode side of a rung; None: of wherever there is room for a warp."""
        if rung not in self._clocks:
            device, where = self.executor.device, self.executor.pool.device
            partition = None
            if rung is not None:
                partition = device.partition(Place.of("decode", rung, device.num_sms))
            stream = None if partition is None else partition.stream
            self._clocks[rung] = clock_on(where, stream)
        return self._clocks[rung]

    def row(self, name: str, limit_ms: float, seconds: float) -> Iterator[Cell]:
        """What a policy serves under a limit, in front of it what was tried for that.

        Args:
            name: The policy, as `smkern.policies.POLICIES` has it.
            limit_ms: TBT limit, in 99 of 100 steps.
        """
        settings = self.settings(name)
        if not settings:
            yield self._cell(name, limit_ms, self.told(name, limit_ms), seconds)
            return

        def keeps(setting: Setting) -> Generator[Cell, None, bool]:
            key = name, setting
            if key not in self.tries:
                cell = self._try(*key)
                self.tries[key] = cell["tbt_p99_ms"]
                yield cell
            return self.tries[key] <= limit_ms

        if (name, limit_ms) in self.chosen:
            candidates: Sequence[Setting] = [self.chosen[name, limit_ms]]
        else:
            at = yield from last_kept(settings, keeps)
            candidates = settings[max(at - STEPS_BACK, 0) : at + 1]
        for setting in reversed(candidates):
            rung = setting if name == "static_split" else None
            cell = self._cell(name, limit_ms, SEARCHED[name](setting), seconds, rung)
            if cell["tbt_p99_ms"] <= limit_ms:
                break
        self.chosen[name, limit_ms] = setting
        yield cell | {"setting": setting}

    def settings(self, name: str) -> Sequence[Setting]:
        """A searched policy's settings, steps growing longer; none of another one's."""
        if name not in SEARCHED:
            return ()
        if name == "static_split":
            return sorted(self.executor.device.rungs, reverse=True)
        most = self.executor.max_tokens
        chunks = self.plan.served_chunks or self.plan.chunks
        return sorted(chunk for chunk in chunks if chunk <= most)

    def _try(self, name: str, setting: Setting) -> Cell:
        found = self.watch(
            SEARCHED[name](setting), self.try_s, preheat_s=min(TRY_PREHEAT_S, self.preheat_s),
            reach=min(TRY_REACH, self.workload.reach),
        )  # fmt: skip
        figures = found.figures()
        cell = self.plan.cell(
            SERVED_TRY, OURS, figures["tokens_per_ms"], "tokens/ms", policy=name, setting=setting
        )
        return cell | figures

    def _cell(
        self, name: str, limit_ms: float, policy: Policy, seconds: float, rung: int | None = None
    ) -> Cell:
        found = self.watch(policy, seconds, rung=rung)
        figures = found.figures()
        case = {"policy": name, "limit": f"{limit_ms:g}ms"}
        cell = self.plan.cell(SERVED_RATE, OURS, figures["tokens_per_ms"], "tokens/ms", **case)
        made = {"steps_by_sms": found.steps_by_sms, "ms_by_keys": found.ms_by_keys}
        return cell | figures | {"how": repr(policy)} | made

    def told(self, name: str, limit_ms: float) -> Policy:
        """A policy that is told its limit, with the predictor of this model on this GPU."""
        if self._predictor is None:
            device = self.executor.device
            places = places_of(device.rungs, device.num_sms)
            self._predictor = predictor_for(self.plan.model, sms=places)
        return policy_named(name, self._predictor, tbt_slo_ms=limit_ms)

    def _power(self) -> Any:
        if self._meter is None and self.executor.pool.device.type == "cuda":
            self._meter = power_meter(self.executor.pool.device.index or 0)
        return self._meter


def sizes_of(plan: RuntimePlan, sizes: Sizes = SIZES) -> Sizes:
    """Sizes with the rungs and pages of a plan."""
    return replace(sizes, rungs=plan.rungs, num_pages=plan.served_pages)


@contextmanager
def open_load(
    plan: RuntimePlan,
    weights: Weights,
    *,
    sizes: Sizes = SIZES,
    workload: Workload = WORKLOAD,
    preheat_s: float = PREHEAT_S,
) -> Iterator[ServedLoad]:
    """A model ready to serve on every rung of a plan; closed with all that was captured."""
    sizes = sizes_of(plan, sizes)
    with open_executor(weights, sizes) as executor:
        executor.warm()
        contexts = [FIRST_CONTEXT, sizes.max_context]
        executor.capture([None, *sizes.rungs], [workload.running], contexts)
        yield ServedLoad(plan, executor, workload, preheat_s)
