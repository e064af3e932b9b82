"""Whole prompts first, decode waits: continuous batching as it was before chunked prefill."""

from __future__ import annotations

from smkern.latency.predictor import Predictor
from smkern.policies.admission import ids_of, whole_prompts
from smkern.policies.base import BasePolicy
from smkern.policies.decision import Decision
from smkern.policies.layerwise import layers_left
from smkern.policies.order import Order
from smkern.policies.snapshot import Snapshot


class PrefillFirst(BasePolicy):
    """Prompts that wait are computed whole, on the whole device, and decode waits for them.

    First tokens come as early as they can, and the time between two tokens is as long as the
    batches of prompts that come between them: no limit of it is kept.

    Args:
        predictor: Not asked.
        tbt_slo_ms, ttft_slo_ms: Nothing follows from them.
        order: In which requests wait: a name of `smkern.policies.ORDERS`, or a function.
        max_prefill_tokens: New tokens of a batch of prompts; only a longer prompt is cut. None:
            what the buffers hold.
        steps: Decode steps launched at a time where no prompt waits.

    Raises:
        ArgumentError: a count below 1, or a limit that is none.

    Source: vLLM before version 1, Orca's iterations; the papers' "prefill-first" baseline (Bullet
        section 2.2, Sarathi-Serve section 3).

    Example:
        >>> from smkern.policies import PrefillFirst, Snapshot, Waiting
        >>> snapshot = Snapshot(
        ...     waiting=(Waiting(7, 0.0, 1000),), running_kv=(300, 80), rungs=(16, 32), num_sms=132,
        ...     num_layers=36, free_pages=500, page_size=16, max_running=8, max_prefill=4,
        ...     max_tokens=8192,
        ... )
        >>> decision = PrefillFirst().decide(snapshot)
        >>> decision.prefill, decision.layers, decision.pause_decode
        ((7,), 36, True)
    """

    heeds = ()
    asks_predictor = False

    def __init__(
        self,
        predictor: Predictor | None = None,
        *,
        tbt_slo_ms: float | None = None,
        ttft_slo_ms: float | None = None,
        order: str | Order = "fcfs",
        max_prefill_tokens: int | None = None,
        steps: int = 2,
    ) -> None:
        counts = {"max_prefill_tokens": max_prefill_tokens, "steps": steps}
        super().__init__(predictor, tbt_slo_ms, ttft_slo_ms, order, counts)
        self._max_tokens = max_prefill_tokens
        self._steps = steps

    def decide(self, snapshot: Snapshot) -> Decision:
        """All layers of the next batch, else decode steps."""
        if snapshot.prefill is not None:
            left = layers_left(snapshot)
            if not left and not snapshot.prefill_queued:
                return Decision()  # they are over: nothing is left to wait for
            return Decision(layers=left, pause_decode=True, reason="prompts first")
        most = snapshot.max_tokens
        if self._max_tokens is not None:
            most = min(most, self._max_tokens)
        batch, _ = whole_prompts(snapshot, most)
        if not batch:
            return Decision(steps=1 if snapshot.joining else self._steps)
        return Decision(
            prefill=ids_of(batch),
            chunk_tokens=most,
            layers=snapshot.num_layers,
            pause_decode=True,
            reason="prompts first",
        )
