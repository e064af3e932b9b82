"""DuetServe: one forward for both while it meets the limit, else a gang on two partitions."""

from __future__ import annotations

from bisect import bisect_left
from math import floor
from typing import NamedTuple

from smkern.latency.predictor import Predictor
from smkern.policies.admission import admitted, chunks_of, ids_of
from smkern.policies.base import BasePolicy
from smkern.policies.check import MAX_STEPS
from smkern.policies.decision import Decision
from smkern.policies.layerwise import layers_left
from smkern.policies.order import Order
from smkern.policies.pricing import Chunks, Prices
from smkern.policies.snapshot import Snapshot

TOKEN_BUDGET = 8192
"""New tokens of an iteration, as vLLM has it on an H100 (section 5.1)."""
AHEAD = 2
"""Forwards on their way: the next is there when one ends."""
GATHER = Decision(pause_decode=True, steps=AHEAD, reason="a gang begins together")
"""Nothing, until what runs is over."""


class Gang(NamedTuple):
    """A split for one batch of prompts and the decode steps beside it.

    Attributes:
        rung: SMs of the decode side, S_d.
        steps: Decode steps, k.
        rate: (k T_d + T_p) / max(k t_d, t_p), tokens/us.
        fits: Whether t_d meets the limit.
    """

    rung: int
    steps: int
    rate: float
    fits: bool = True


class DuetServe(BasePolicy):
    """A mixed forward while its predicted time meets the limit, else prefill and decode apart.

    Each iteration takes all decode rows and prompts' tokens up to a budget. Where that forward is
    too long, the prompts run on S - S_d SMs beside k decode steps on S_d: of all rungs with
    t_d(S_d) <= limit and k in {floor(t_p / t_d), floor(t_p / t_d) + 1} those that maximise
    (k T_d + T_p) / max(k t_d, t_p). Both sides wait for each other, so the gap in which they do
    can reach twice t_d.

    Args:
        predictor: The paper's is `smkern.latency.duetserve.DuetServe`; contention is not asked for.
        tbt_slo_ms: Limit of the time between two tokens of a request.
        ttft_slo_ms: Nothing follows from it.
        order: In which requests wait: a name of `smkern.policies.ORDERS`, or a function.
        token_budget: Tokens of an iteration, decode rows among them.
        margin: Share of the limit that is left to launches which take longer than predicted.

    Raises:
        ArgumentError: no predictor, no limit, one or a margin that is none, or a budget below 1.

    Source: DuetServe section 4.2, Algorithm 1; section 4.3 for k steps launched together.

    Deviations:
        - S_d is a rung of the device, not any even number; with rungs every 2 SMs it is the same.
        - Rungs are tried from the fewest SMs that meet the limit on, and only while one of more
          SMs could still win; the answer is that of the full loop where more SMs are not slower.
        - k is at least 1 and at most 64, what a decision can launch.
        - The paper leaves open what happens where no S_d meets the limit: the largest rung is
          taken, whose steps miss it least. Without any rung the forward is mixed all the same.
        - What another policy began is finished on the rung that it would have taken.

    Example:
        >>> from smkern.latency import TablePredictor
        >>> from smkern.policies import DuetServe, Snapshot, Waiting
        >>> snapshot = Snapshot(
        ...     waiting=(Waiting(7, 0.0, 4000),), running_kv=(300, 80), rungs=(16, 32), num_sms=132,
        ...     num_layers=36, free_pages=500, page_size=16, max_running=8, max_prefill=4,
        ...     max_tokens=8192,
        ... )
        >>> policy = DuetServe(TablePredictor.load("qwen3-8b"), tbt_slo_ms=15)
        >>> decision = policy.decide(snapshot)
        >>> decision.rung, decision.layers, decision.steps > 1, decision.join
        (16, 36, True, 'gang')
    """

    heeds = ("tbt",)
    needs_limit = True
    splits = "must"

    def __init__(
        self,
        predictor: Predictor | None = None,
        *,
        tbt_slo_ms: float | None = None,
        ttft_slo_ms: float | None = None,
        order: str | Order = "fcfs",
        token_budget: int = TOKEN_BUDGET,
        margin: float = 0.0,
    ) -> None:
        counts = {"token_budget": token_budget}
        super().__init__(predictor, tbt_slo_ms, ttft_slo_ms, order, counts, margin)
        self._budget = token_budget

    def decide(self, snapshot: Snapshot) -> Decision:
        """The next iteration."""
        if snapshot.prefill is not None:
            return self._finish(snapshot, snapshot.prefill.chunks)
        if snapshot.prefill_queued:
            return GATHER
        tokens = max(1, min(self._budget - snapshot.batch, snapshot.max_tokens))
        batch = admitted(snapshot, tokens)
        if not batch:
            return Decision(steps=AHEAD)
        ids, chunks = ids_of(batch), tuple(chunks_of(batch, tokens))
        mixed = Decision(prefill=ids, chunk_tokens=tokens, steps=AHEAD)
        if not snapshot.batch or not snapshot.rungs:
            return mixed
        prices = Prices(self._predictor, snapshot)
        if prices.mixed_us(chunks) <= self._limits.tbt_us:
            return mixed
        if snapshot.decode_queued:
            return GATHER
        gang = self._gang(snapshot, prices, chunks)
        how = f"split {gang.rung}, {gang.steps} steps"
        return Decision(
            rung=gang.rung,
            prefill=ids,
            chunk_tokens=tokens,
            layers=snapshot.num_layers,
            steps=gang.steps,
            join="gang",
            reason=how if gang.fits else f"no split meets the limit: {how}",
        )

    def _finish(self, snapshot: Snapshot, chunks: Chunks) -> Decision:
        """The rest of a batch that another policy began."""
        left = layers_left(snapshot)
        if snapshot.decode_queued or snapshot.prefill_queued:
            return GATHER
        if not snapshot.batch or not snapshot.rungs:
            return Decision(layers=left)
        gang = self._gang(snapshot, Prices(self._predictor, snapshot), chunks)
        return Decision(rung=gang.rung, layers=left, steps=gang.steps, join="gang")

    def _gang(self, snapshot: Snapshot, prices: Prices, chunks: Chunks) -> Gang:
        """The split and the steps beside the prompts with the most tokens per time."""
        rungs, limit_us = snapshot.rungs, self._limits.tbt_us
        first = bisect_left(rungs, True, key=lambda rung: prices.step_us(rung) <= limit_us)
        if first == len(rungs):
            return self._gang_on(snapshot, prices, chunks, rungs[-1])._replace(fits=False)
        new_tokens = sum(new for new, _ in chunks)
        # No split has a higher rate than its two sides that never wait.
        decode_rate = snapshot.batch / prices.step_us(rungs[-1])
        best = self._gang_on(snapshot, prices, chunks, rungs[first])
        for rung in rungs[first + 1 :]:
            prompts_us = prices.prompts_us(chunks, snapshot.num_sms - rung)
            if new_tokens / prompts_us + decode_rate <= best.rate:
                break
            gang = self._gang_on(snapshot, prices, chunks, rung)
            if gang.rate > best.rate:
                best = gang
        return best

    def _gang_on(self, snapshot: Snapshot, prices: Prices, chunks: Chunks, rung: int) -> Gang:
        """The better k on a rung."""
        step_us = prices.step_us(rung)
        prompts_us = prices.prompts_us(chunks, snapshot.num_sms - rung)
        new_tokens = sum(new for new, _ in chunks)
        fewer = floor(prompts_us / step_us)
        found = []
        for steps in (fewer, fewer + 1):
            k = min(max(steps, 1), MAX_STEPS)
            rate = (k * snapshot.batch + new_tokens) / max(k * step_us, prompts_us)
            found.append(Gang(rung, k, rate))
        return max(found, key=lambda gang: gang.rate)
