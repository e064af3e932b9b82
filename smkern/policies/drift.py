"""DRIFT: four groups of SMs, blocks of prompts beside one decode step, gang by gang."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Literal

from smkern.errors import ArgumentError
from smkern.latency.predictor import Predictor
from smkern.policies.admission import Batch, chunks_of, whole_prompts
from smkern.policies.base import BasePolicy
from smkern.policies.decision import Decision
from smkern.policies.layerwise import GROUP_LAYERS, layers_left, split
from smkern.policies.order import Order
from smkern.policies.preemption import Turns, preempts
from smkern.policies.pricing import Chunks, Prices
from smkern.policies.snapshot import Snapshot, Waiting
from smkern.policies.static_split import MAX_PREFILL_TOKENS

GROUPS = (24 / 108, 36 / 108)
"""Decode's share of the SMs in each group that has two sides: (84, 24) and (72, 36) of an A100."""
AHEAD = 2
"""Decode steps launched at a time where no prompt waits."""


class Drift(BasePolicy):
    """Just enough SMs for decode, of a few groups; the prompts' blocks that fit beside its step.

    The groups are all SMs for prompts, two splits, and all SMs for decode. Each round takes the
    first whose predicted step, alone, meets the limit; the prompts run the blocks (layers) that
    last as long. Both sides wait for each other, then the next round is decided.

    Args:
        predictor: The paper's is `smkern.latency.drift.Drift`; contention is not asked for.
        tbt_slo_ms: Limit of the time between two tokens of a request.
        ttft_slo_ms: First tokens of requests that have no deadline: the headroom of a batch that
            may be preempted.
        order: In which requests wait: a name of `smkern.policies.ORDERS`, or a function.
        groups: Decode's share of the SMs in each split, ascending; the nearest rungs are taken.
        max_prefill_tokens: New tokens of a batch of prompts; a longer prompt comes alone, whole.
        join: "gang", as Algorithm 1 has it; "polled": as section 3.3 has it of joins, each side
            goes on and a batch joins when a poll sees it over.
        margin: Share of the limit that is left to launches which take longer than predicted.

    Raises:
        ArgumentError: no predictor, no limit, one or a margin that is none, shares that are none,
            or a count below 1.

    Source: DRIFT section 3.5, Algorithm 1; section 3.3 for blocks; section 4 for the groups.

    Deviations:
        - The paper's A100 has (108, 0), (84, 24), (72, 36), (0, 108) SMs; here each split has the
          rung nearest to the same share: (132, 0), (104, 28), (88, 44), (0, 132) of an H200.
        - The blocks of a round last at least as long as the step, where that meets the limit, and
          else one less; the paper does not say how it rounds.
        - Where the whole device does not meet the limit either, the last split is taken: decode
          alone would gain nothing, and prompts go on.
        - A batch that was preempted goes on by a round before it is preempted again, so that none
          without a deadline waits for ever.
        - How many prompts a batch holds is open in the paper.

    Example:
        >>> from smkern.latency import TablePredictor
        >>> from smkern.policies import Drift, Snapshot, Waiting
        >>> snapshot = Snapshot(
        ...     waiting=(Waiting(7, 0.0, 4000),), running_kv=(2000,) * 8, rungs=(16, 28, 44),
        ...     num_sms=132, num_layers=36, free_pages=500, page_size=16, max_running=32,
        ...     max_prefill=4, max_tokens=8192,
        ... )
        >>> Drift(TablePredictor.load("qwen3-8b"), tbt_slo_ms=20).decide(snapshot).rung
        28
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
        groups: Sequence[float] = GROUPS,
        max_prefill_tokens: int = MAX_PREFILL_TOKENS,
        join: Literal["polled", "gang"] = "gang",
        margin: float = 0.0,
    ) -> None:
        if not isinstance(groups, Sequence) or not _are_shares(groups):
            raise ArgumentError(
                f"groups={groups!r}: give decode's shares of the SMs, ascending, above 0 and below "
                f"1, such as {GROUPS}"
            )
        counts = {"max_prefill_tokens": max_prefill_tokens}
        shown = None if tuple(groups) == GROUPS else tuple(groups)
        super().__init__(
            predictor, tbt_slo_ms, ttft_slo_ms, order, counts, margin, groups=shown, join=join
        )
        self._groups = tuple(groups)
        self._max_tokens = max_prefill_tokens
        self._join: Literal["polled", "gang"] = join
        self._turns = Turns(self._limits)

    def decide(self, snapshot: Snapshot) -> Decision:
        """The next round."""
        running = snapshot.prefill
        if running is None and not snapshot.waiting:
            return split(snapshot, None, layers=0, steps=AHEAD)
        if self._join == "gang" and (snapshot.decode_queued or snapshot.prefill_queued):
            return Decision(pause_decode=True, steps=AHEAD, reason="a gang begins together")
        if snapshot.prefill_queued > 1:
            return split(snapshot, snapshot.rung, layers=0)
        prices = Prices(self._predictor, snapshot)
        batch, tokens = self._next(snapshot, prices)
        if not batch and running is None:
            return split(snapshot, None, layers=0, steps=AHEAD)
        rung, reason = self._partition(snapshot, prices)
        left = snapshot.num_layers if batch else layers_left(snapshot)
        if rung == snapshot.num_sms or not left:
            return Decision(join=self._join, reason=reason)
        chunks: Chunks = () if running is None else running.chunks
        if batch:
            self._turns.begins(snapshot, batch, preempt=running is not None)
            chunks = tuple(chunks_of(batch, tokens))
        return split(
            snapshot,
            rung,
            layers=min(self._blocks(snapshot, prices, chunks, rung), left),
            batch=batch,
            tokens=tokens if batch else None,
            preempt=bool(batch) and running is not None,
            join=self._join,
            reason=reason,
        )

    def _next(self, snapshot: Snapshot, prices: Prices) -> tuple[Batch, int]:
        """GeneratePB: the batch that begins now, in front of the running one or where none runs."""
        tokens = min(self._max_tokens, snapshot.max_tokens)
        running = snapshot.prefill
        if running is None:
            return whole_prompts(snapshot, tokens)
        if not self._turns.may_preempt(snapshot):
            return (), tokens
        rung, _ = self._partition(snapshot, prices)
        num_sms = snapshot.num_sms - (rung or 0) or snapshot.num_sms
        whole_us = prices.prompts_us(running.chunks, num_sms)

        def cost_us(batch: Sequence[Waiting]) -> float:
            return prices.prompts_us(chunks_of(batch, snapshot.max_tokens), num_sms)

        new, tokens = whole_prompts(snapshot, tokens)
        chosen = preempts(
            snapshot,
            left_us=whole_us * layers_left(snapshot) / snapshot.num_layers,
            deadline_us=self._turns.deadline_us(running),
            cost_us=cost_us,
            tokens=tokens,
            waiting=new,
            shorter=False,
        )
        return (chosen, tokens) if chosen == new else ((), tokens)

    def _partition(self, snapshot: Snapshot, prices: Prices) -> tuple[int | None, str]:
        """Decode's SMs in the first group that meets the limit: None, no decode; all, no prompts.

        Where neither a split nor the whole device meets it, the last split.
        """
        limit_us = self._limits.tbt_us
        if not snapshot.batch or not snapshot.rungs:
            return None, ""
        rungs = self._rungs(snapshot)
        for rung in rungs:
            if prices.step_us(rung) <= limit_us:
                return rung, f"split {rung}"
        if prices.step_us(snapshot.num_sms) <= limit_us:
            return snapshot.num_sms, "decode alone"
        return rungs[-1], f"split {rungs[-1]}: nothing meets the limit"

    def _rungs(self, snapshot: Snapshot) -> list[int]:
        """The device's rungs nearest to the groups."""
        wanted = [share * snapshot.num_sms for share in self._groups]
        return [min(snapshot.rungs, key=lambda rung: abs(rung - sms)) for sms in wanted]

    def _blocks(self, snapshot: Snapshot, prices: Prices, chunks: Chunks, rung: int | None) -> int:
        """Layers that last as long as a decode step, where the limit leaves them that time."""
        if not snapshot.batch or rung is None:
            return GROUP_LAYERS
        layer_us = prices.prompts_us(chunks, snapshot.num_sms - rung) / snapshot.num_layers
        layers = ceil(prices.step_us(rung) / layer_us)
        return layers if layers * layer_us <= self._limits.tbt_us else max(1, layers - 1)


def _are_shares(groups: Sequence[object]) -> bool:
    """Whether all are numbers between 0 and 1, ascending."""
    shares = [share for share in groups if isinstance(share, int | float) and 0 < share < 1]
    return len(shares) == len(groups) and shares == sorted(shares)
