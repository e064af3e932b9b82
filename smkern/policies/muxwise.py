"""MuxWise: the fewest SMs whose worst case keeps decode under its limit, prompts on all others."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from smkern.latency.predictor import Predictor
from smkern.limits import as_flag
from smkern.policies.admission import Batch, chunks_of, whole_prompts
from smkern.policies.base import BasePolicy
from smkern.policies.decision import Decision
from smkern.policies.layerwise import GROUP_LAYERS, GROUPS_AHEAD, layers_left, split
from smkern.policies.order import Order
from smkern.policies.preemption import Turns, preempts
from smkern.policies.pricing import Chunks, Prices
from smkern.policies.search import least
from smkern.policies.snapshot import Snapshot, Waiting
from smkern.policies.static_split import MAX_PREFILL_TOKENS


class MuxWise(BasePolicy):
    """Decode gets the fewest SMs with which its worst case meets the limit; prompts, by layers,
    the others.

    N_PL = ceil(T_d N_T / T_P) layers are launched at a time, so that the prefill side is busy until
    the decode step is over; whoever ends joins when a poll sees it. A waiting batch goes before the
    running one where that keeps its own deadline, one level deep.

    Args:
        predictor: The paper's is `smkern.latency.muxwise.MuxWise`, with its contention guard
            (`worst_us`); of any other the expected slowdown is taken.
        tbt_slo_ms: Limit of the time between two tokens of a request.
        ttft_slo_ms: First tokens of requests that have no deadline.
        order: In which requests wait: a name of `smkern.policies.ORDERS`, or a function.
        max_prefill_tokens: New tokens of a batch of prompts; a longer prompt comes alone, whole.
        steps: Decode steps launched at a time; 1 while a batch is about to join.
        preempt: Whether batches go before running ones, an option in the paper too.
        margin: Share of the limit that is left to launches which take longer than predicted.

    Raises:
        ArgumentError: no predictor, no limit, one or a margin that is none, or a count below 1.

    Source: MuxWise section 3.4, figure 12; section 3.2.3 for layers and joins that are polled.

    Deviations:
        - The split is chosen from the rungs of the device, in the paper every 16 SMs.
        - Where no rung's worst case meets the limit, decode gets the largest; the paper says
          nothing.
        - A side that is alone has the whole device.
        - A batch goes first only where it is over before the running one would have been. The
          paper lets "short requests preempt long ones" and names no length.
        - A batch that was preempted goes on by a group before it is preempted again, so that none
          without a deadline waits for ever.
        - How many prompts a batch holds is open in the paper.

    Example:
        >>> from smkern.latency import TablePredictor
        >>> from smkern.policies import MuxWise, Snapshot, Waiting
        >>> snapshot = Snapshot(
        ...     waiting=(Waiting(7, 0.0, 4000),), running_kv=(300, 80), rungs=(16, 32, 48),
        ...     num_sms=132, num_layers=36, free_pages=500, page_size=16, max_running=8,
        ...     max_prefill=4, max_tokens=8192,
        ... )
        >>> predictor = TablePredictor.load("qwen3-8b")
        >>> wide, tight = (MuxWise(predictor, tbt_slo_ms=limit) for limit in (30, 7))
        >>> wide.decide(snapshot).rung < tight.decide(snapshot).rung
        True
    """

    needs_limit = True
    splits = "must"

    def __init__(
        self,
        predictor: Predictor | None = None,
        *,
        tbt_slo_ms: float | None = None,
        ttft_slo_ms: float | None = None,
        order: str | Order = "fcfs",
        max_prefill_tokens: int = MAX_PREFILL_TOKENS,
        steps: int = 2,
        preempt: bool = True,
        margin: float = 0.0,
    ) -> None:
        counts = {"max_prefill_tokens": max_prefill_tokens, "steps": steps}
        flag = as_flag("preempt", preempt)
        super().__init__(predictor, tbt_slo_ms, ttft_slo_ms, order, counts, margin, preempt=flag)
        self._max_tokens = max_prefill_tokens
        self._steps = steps
        self._preempt = preempt
        self._turns = Turns(self._limits)
        self._near = 0
        """Where the last rung was among those of the device."""

    def decide(self, snapshot: Snapshot) -> Decision:
        """Layers of the running or the next batch, and the split for them."""
        prices = Prices(self._predictor, snapshot)
        tokens = min(self._max_tokens, snapshot.max_tokens)
        running = snapshot.prefill
        if running is None:
            batch, tokens = whole_prompts(snapshot, tokens)
        else:
            batch = self._first(snapshot, prices, tokens)
        if batch:
            self._turns.begins(snapshot, batch, preempt=running is not None)
            chunks: Chunks = tuple(chunks_of(batch, tokens))
        elif running is not None:
            chunks = running.chunks
        else:
            return split(snapshot, None, layers=0, steps=self._steps)
        left = snapshot.num_layers if batch else layers_left(snapshot)
        rung, reason = self._rung(snapshot, prices, chunks)
        layers = self._layers(snapshot, prices, chunks, rung) if left else 0
        if batch:
            layers = max(layers, 1)
        return split(
            snapshot,
            rung,
            layers=min(layers, left),
            batch=batch,
            tokens=tokens if batch else None,
            preempt=bool(batch) and running is not None,
            steps=self._steps,
            reason=reason,
        )

    def _rung(self, snapshot: Snapshot, prices: Prices, chunks: Chunks) -> tuple[int | None, str]:
        """The fewest SMs whose worst case meets the limit, and why."""
        rungs, limit_us = snapshot.rungs, self._limits.tbt_us
        if not rungs:
            return None, "no rungs"
        if not snapshot.batch:  # the split that whoever decodes next will find
            return rungs[min(self._near, len(rungs) - 1)], ""

        def fits(at: int) -> bool:
            worst_us = prices.worst_step_us(rungs[at], chunks, snapshot.num_sms - rungs[at])
            return worst_us <= limit_us

        at = least(fits, len(rungs), self._near)
        if at == len(rungs):
            return rungs[-1], f"split {rungs[-1]}: no rung meets the limit"
        self._near = at
        return rungs[at], f"split {rungs[at]}"

    def _layers(self, snapshot: Snapshot, prices: Prices, chunks: Chunks, rung: int | None) -> int:
        """N_PL, or none where enough are queued."""
        if snapshot.prefill_queued >= GROUPS_AHEAD:
            return 0
        if not snapshot.batch or rung is None:
            return GROUP_LAYERS
        prefill_sms = snapshot.num_sms - rung
        step_us = prices.worst_step_us(rung, chunks, prefill_sms)
        prompts_us = prices.prompts_us(chunks, prefill_sms)
        return ceil(step_us * snapshot.num_layers / prompts_us)

    def _first(self, snapshot: Snapshot, prices: Prices, tokens: int) -> Batch:
        """The batch that goes before the running one, if any may."""
        running = snapshot.prefill
        if not self._preempt or running is None or not self._turns.may_preempt(snapshot):
            return ()
        rung = snapshot.rung or 0
        num_sms = snapshot.num_sms - rung

        def cost_us(batch: Sequence[Waiting]) -> float:
            return prices.prompts_beside_us(chunks_of(batch, tokens), num_sms, rung)

        whole_us = prices.prompts_beside_us(running.chunks, num_sms, rung)
        chosen = preempts(
            snapshot,
            left_us=whole_us * layers_left(snapshot) / snapshot.num_layers,
            deadline_us=self._turns.deadline_us(running),
            cost_us=cost_us,
            tokens=tokens,
        )
        return chosen if sum(request.tokens for request in chosen) <= tokens else chosen[:-1]
