"""Bullet: prompts first while the time per output token holds; a few layers at a time."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from operator import attrgetter

from smkern.latency.predictor import Predictor
from smkern.limits import as_flag
from smkern.policies.admission import Batch, chunks_of, whole_prompts
from smkern.policies.base import BasePolicy
from smkern.policies.decision import Decision
from smkern.policies.layerwise import GROUPS_AHEAD, layers_left, split
from smkern.policies.order import Order
from smkern.policies.pricing import Chunks, Prices
from smkern.policies.saturation import Saturation
from smkern.policies.search import least
from smkern.policies.snapshot import Running, Snapshot, Waiting

LAYERS = 4
"""Layers of a step of prompts; the paper says that their number is fixed, and not what it is."""
LOOKED = 32
"""Requests of the queue that are reordered at a time."""
LOOK_AGAIN_US = 10_000.0
"""How long a percentile over all that decode is taken as it was: it costs 0.1 us a request."""
LEAST_PAUSE_US = 1_000.0
"""No decode step is put off for less."""


class Bullet(BasePolicy):
    """Prompts are computed first, on as many SMs as the time per output token leaves them.

    A fixed number of layers is launched at a time. Decode has the fewest SMs whose next step keeps
    P90 of the time per output token (from a request's first token on) under its limit; where first
    tokens are late and the requests that decode are ahead of their limit, decode pauses and prompts
    take the whole device; where neither limit can be met, both sides get about half. Requests that
    wait are served shortest first while nobody's first token becomes late by it, and a batch takes
    prompts until more of them are not computed faster.

    Args:
        predictor: The paper's is `smkern.latency.bullet.Bullet`.
        tbt_slo_ms: Limit of the mean time per output token of a request (TPOT), kept at P90: what
            the paper limits. Single gaps may be longer.
        ttft_slo_ms: First tokens of requests that have no deadline.
        order: In which requests wait, as long as they are not reordered: a name of
            `smkern.policies.ORDERS`, or a function.
        layers: Layers of a step of prompts.
        reorder: Whether requests are served shortest first where no deadline breaks.
        pauses: Whether decode pauses.
        margin: Share of the limit that is left to launches which take longer than predicted.

    Raises:
        ArgumentError: no predictor, no limit, one or a margin that is none, or a count below 1.

    Source: Bullet section 3.3, Algorithm 1 and figure 12.

    Deviations:
        - Decode's SMs are rungs of the device, found greedily from the last one.
        - A request's time per output token holds until first token + limit x tokens out; "P90
          holds" is that the moment which a tenth of the requests have passed is still to come. The
          next step must be over by then, and never takes longer than the limit: what requests
          are ahead is kept for pauses.
        - "Arithmetic intensity reaches its peak" where twice the tokens take twice the time, to
          5%, by the predictor: that is where a roofline turns.
        - Predicted times of waiting requests are in proportion to their new tokens, from one
          prediction, and the first 32 are looked at.
        - A request goes first, whatever its length, once it could not wait for another batch.
        - Balanced is the rung nearest to half of the device.
        - Near the last layer decode gets the next larger rung while prompts keep theirs: both share
          the difference, as section 3.4.2's masks may.
        - P90 is looked at every 10 ms.

    Example:
        >>> from smkern.latency import TablePredictor
        >>> from smkern.policies import Bullet, Snapshot, Waiting
        >>> snapshot = Snapshot(
        ...     waiting=(Waiting(7, 0.0, 4000), Waiting(8, 0.0, 3000)), running_kv=(300, 80),
        ...     rungs=(16, 32), num_sms=132, num_layers=36, free_pages=500, page_size=16,
        ...     max_running=8, max_prefill=4, max_tokens=8192,
        ... )
        >>> policy = Bullet(TablePredictor.load("qwen3-8b"), tbt_slo_ms=15, ttft_slo_ms=1000)
        >>> decision = policy.decide(snapshot)
        >>> decision.rung, decision.prefill, decision.layers
        (16, (8,), 4)
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
        layers: int = LAYERS,
        reorder: bool = True,
        pauses: bool = True,
        margin: float = 0.0,
    ) -> None:
        super().__init__(
            predictor, tbt_slo_ms, ttft_slo_ms, order, {"layers": layers}, margin,
            reorder=as_flag("reorder", reorder), pauses=as_flag("pauses", pauses),
        )  # fmt: skip
        self._layers = layers
        self._reorder = reorder
        self._pauses = pauses
        self._saturation = Saturation(self._predictor)
        self._deadlines: dict[int, float] = {}
        self._near = 0
        """Where the last rung was among those of the device."""
        self._looked_us, self._holds_until_us = -inf, inf

    def decide(self, snapshot: Snapshot) -> Decision:
        """The next layers, and the SMs of both sides."""
        prices = Prices(self._predictor, snapshot)
        running = snapshot.prefill
        batch: Batch = ()
        tokens = snapshot.max_tokens
        if running is not None:
            chunks: Chunks = running.chunks
            late = self._is_late(snapshot, prices, chunks)
        else:
            batch, tokens, late = self._next(snapshot)
            if not batch:
                return split(snapshot, None, layers=0, steps=1 if snapshot.joining else 2)
            chunks = tuple(chunks_of(batch, tokens))
            self._deadlines = {batch[0].id: min(map(self._limits.deadline_us, batch))}
        left = snapshot.num_layers if batch else layers_left(snapshot)
        layers = min(self._layers, left)
        if snapshot.prefill_queued >= GROUPS_AHEAD and not batch:
            layers = 0
        room_us = self._room_us(snapshot)
        pause = self._pause(snapshot, prices, chunks, layers, batch, tokens, room_us)
        if late and pause is not None:
            return pause
        rung, reason = self._provision(snapshot, prices, chunks, late, room_us)
        at = snapshot.rungs.index(rung) + 1 if rung in snapshot.rungs else inf
        if left <= self._layers and snapshot.batch and at < len(snapshot.rungs):
            # The smooth transition: decode spreads while the last layers run.
            return split(
                snapshot, snapshot.rungs[int(at)], layers=layers, batch=batch,
                tokens=tokens if batch else None, prefill_rung=rung, shared=True, reason=reason,
            )  # fmt: skip
        return split(
            snapshot,
            rung,
            layers=layers,
            batch=batch,
            tokens=tokens if batch else None,
            reason=reason,
        )

    def _next(self, snapshot: Snapshot) -> tuple[Batch, int, bool]:
        """The requests that begin, their tokens, and whether first tokens are late (lines 5, 10 to
        13)."""
        waiting = snapshot.waiting[:LOOKED]
        if not waiting:
            return (), snapshot.max_tokens, False
        num_sms = snapshot.num_sms - (snapshot.rung or 0)
        tokens = min(self._saturation.tokens(snapshot.num_layers, num_sms), snapshot.max_tokens)
        token_us = self._saturation.token_us(snapshot.num_layers, num_sms)
        first, late, queued_us = [], 0, 0.0
        batch_us = token_us * tokens
        for request in waiting:
            own_us = token_us * request.tokens
            queued_us += own_us
            slack_us = self._limits.deadline_us(request) - snapshot.now_us
            late += queued_us > slack_us
            if slack_us - own_us < batch_us:
                first.append(request)
        order: list[Waiting] | tuple[Waiting, ...] = waiting
        if self._reorder:
            others = set(first)
            order = first + sorted(
                [request for request in waiting if request not in others], key=_tokens
            )
        batch, tokens = whole_prompts(snapshot, tokens, order)
        if not batch and not snapshot.batch:
            # The first may need pages that one behind it kept; nothing else gives any back.
            batch, tokens = whole_prompts(snapshot, tokens, waiting)
        return batch, tokens, late > 0.1 * len(waiting)

    def _is_late(self, snapshot: Snapshot, prices: Prices, chunks: Chunks) -> bool:
        """Whether a request of the running batch will have its first token too late (line 7)."""
        assert snapshot.prefill is not None
        rung = snapshot.rung or 0
        whole_us = prices.prompts_beside_us(chunks, snapshot.num_sms - rung, rung)
        left_us = whole_us * layers_left(snapshot) / snapshot.num_layers
        own = self._deadlines.get(snapshot.prefill.ids[0], inf)
        return snapshot.now_us + left_us > min(snapshot.prefill.deadline_us, own)

    def _room_us(self, snapshot: Snapshot) -> float:
        """How long the next step may take for P90 of the times per output token to hold."""
        if not snapshot.batch:
            return inf
        if not snapshot.running:
            return self._limits.tbt_us
        now_us = snapshot.now_us
        if not 0 <= now_us - self._looked_us < LOOK_AGAIN_US:
            self._looked_us = now_us
            self._holds_until_us = self._p90_us(snapshot.running, now_us)
        return self._holds_until_us - now_us

    def _p90_us(self, running: Sequence[Running], now_us: float) -> float:
        """The moment by which a tenth of the requests will have broken their limit."""
        limit_us = self._limits.tbt_us
        moments = sorted(
            [
                one.first_token_us + limit_us * one.tokens_out
                if one.tokens_out
                else now_us + limit_us
                for one in running
            ]
        )
        return moments[len(moments) // 10]

    def _pause(
        self, snapshot: Snapshot, prices: Prices, chunks: Chunks, layers: int, batch: Batch,
        tokens: int, room_us: float,
    ) -> Decision | None:  # fmt: skip
        """Prompts on the whole device while those that decode can wait; None: they cannot."""
        if not self._pauses or not snapshot.batch or not layers:
            return None
        whole = snapshot.num_sms
        layer_us = prices.prompts_us(chunks, whole) / snapshot.num_layers
        spare_us = room_us - prices.step_us(whole)
        if spare_us < max(LEAST_PAUSE_US, layer_us):
            return None
        return Decision(
            prefill=tuple(request.id for request in batch),
            chunk_tokens=tokens if batch else None,
            layers=min(layers, int(spare_us / layer_us)),
            pause_decode=True,
            ask_again_us=spare_us,
            reason=f"decode pauses {spare_us / 1000:.1f} ms",
        )

    def _provision(
        self, snapshot: Snapshot, prices: Prices, chunks: Chunks, late: bool, room_us: float
    ) -> tuple[int | None, str]:
        """SMs of the decode side (lines 14 to 19)."""
        rungs = snapshot.rungs
        if not rungs or not snapshot.batch:
            return (rungs[min(self._near, len(rungs) - 1)] if rungs else None), ""
        if room_us <= 0 and late:
            half = min(rungs, key=lambda rung: abs(2 * rung - snapshot.num_sms))
            return half, f"balanced {half}"
        # Who is behind catches up; what others are ahead is kept for a pause.
        within_us = min(room_us, self._limits.tbt_us) if room_us > 0 else self._limits.tbt_us

        def fits(at: int) -> bool:
            rung = rungs[at]
            return prices.step_beside_us(rung, chunks, snapshot.num_sms - rung) <= within_us

        at = least(fits, len(rungs), self._near)
        if room_us <= 0:  # ReducePrefillSM
            at = max(at, self._near + 1)
        at = self._near = min(at, len(rungs) - 1)
        return rungs[at], f"split {rungs[at]}: {room_us / 1000:.1f} ms to the next token"


_tokens = attrgetter("tokens")
