"""Chunked prefill: prompts' chunks and decode rows in one forward on the whole device."""

from __future__ import annotations

from smkern.latency.predictor import Predictor
from smkern.limits import as_flag
from smkern.policies.admission import admitted, ids_of, taken
from smkern.policies.base import BasePolicy
from smkern.policies.chunk_size import ChunkSize
from smkern.policies.decision import Decision
from smkern.policies.order import Order
from smkern.policies.pricing import Prices
from smkern.policies.snapshot import PrefillView, Snapshot

CHUNK_TOKENS = 512
"""New tokens of a forward where nothing says how many."""


class Chunked(BasePolicy):
    """Every forward takes all decode rows and as many tokens of prompts as it may; the default.

    Where nothing decodes, no request waits between two tokens, and a forward takes what the buffers
    hold. Where no prompt waits, `steps` decode graphs of the whole device are launched together.

    With a limit and a predictor a forward takes the most tokens that the predictor holds under the
    limit, so that its rows fill their tiles. Where not even the least chunk does, since the decode
    rows take the time by themselves, the least is taken: prompts go on, and the limit is missed.

    Args:
        chunk_tokens: New tokens of prompts in a forward beside decode rows, at most. None: with a
            limit as many as it allows, without 512.
        predictor: Prices a forward; needed with a limit.
        tbt_slo_ms: Limit of the time between two tokens of a request: of a forward. None: none.
        ttft_slo_ms: Nothing follows from it.
        order: In which requests wait: a name of `smkern.policies.ORDERS`, or a function.
        steps: Decode steps launched at a time where no prompt waits.
        margin: Share of the limit that is left to forwards which take longer than predicted.
        ahead: Whether a forward with chunks is launched while the one before it runs, so that the
            device never idles; the decode lane's queue must hold the kernels of two.

    Raises:
        ArgumentError: a count below 1, a limit or margin that is none, or a limit without a
            predictor.

    Source: chunked prefill as in Sarathi-Serve, which the papers compare with; with the largest
        chunk under a limit.

    Example:
        >>> from smkern.policies import Chunked, Snapshot, Waiting
        >>> snapshot = Snapshot(
        ...     waiting=(Waiting(7, 0.0, 1000),), running_kv=(300, 80), rungs=(16, 32), num_sms=132,
        ...     num_layers=36, free_pages=500, page_size=16, max_running=8, max_prefill=4,
        ...     max_tokens=8192,
        ... )
        >>> decision = Chunked(chunk_tokens=512).decide(snapshot)
        >>> decision.rung, decision.prefill, decision.chunk_tokens
        (None, (7,), 512)
    """

    heeds = ("tbt",)

    def __init__(
        self,
        chunk_tokens: int | None = None,
        predictor: Predictor | None = None,
        *,
        tbt_slo_ms: float | None = None,
        ttft_slo_ms: float | None = None,
        order: str | Order = "fcfs",
        steps: int = 2,
        margin: float = 0.0,
        ahead: bool = True,
    ) -> None:
        if chunk_tokens is None and tbt_slo_ms is None:
            chunk_tokens = CHUNK_TOKENS
        counts = {"chunk_tokens": chunk_tokens, "steps": steps}
        flag = as_flag("ahead", ahead)
        super().__init__(predictor, tbt_slo_ms, ttft_slo_ms, order, counts, margin, ahead=flag)
        self._chunk_tokens = chunk_tokens
        if tbt_slo_ms is None:
            self._predictor = None
        self._steps = steps
        self._size = ChunkSize()
        self._ahead = ahead

    def decide(self, snapshot: Snapshot) -> Decision:
        """The next forward."""
        if snapshot.prefill is not None:
            return self._finish(snapshot, snapshot.prefill)
        most = snapshot.max_tokens
        if snapshot.batch and self._chunk_tokens is not None:
            most = min(most, self._chunk_tokens)
        waiting = admitted(snapshot, most)
        if not waiting:
            return Decision(steps=self._steps)
        reason = ""
        if snapshot.batch and self._predictor is not None:
            prices = Prices(self._predictor, snapshot)
            limit_us = self._limits.tbt_us
            most, us = self._size.largest(snapshot, prices, waiting, most, limit_us)
            waiting = taken(waiting, most)
            reason = f"chunk {most}" + (": the limit cannot be met beside it" * (us > limit_us))
        ahead = 2 if self._ahead else 1
        return Decision(prefill=ids_of(waiting), chunk_tokens=most, steps=ahead, reason=reason)

    def _finish(self, snapshot: Snapshot, batch: PrefillView) -> Decision:
        """The layers of a batch that another policy began, in turns with decode steps."""
        left = snapshot.num_layers - batch.layers_launched
        if not left or snapshot.prefill_queued > 1:
            return Decision()
        if not snapshot.batch:
            return Decision(layers=left)
        # A step at a time: the two take turns, and a second step would wait behind the layers.
        if self._predictor is None:
            return Decision(layers=left)
        prices = Prices(self._predictor, snapshot)
        return Decision(layers=min(prices.layers_within(batch.chunks, self._limits.tbt_us), left))
