"""Two streams on the whole device: prompts and decode run at once, and nothing keeps them apart."""

from __future__ import annotations

from smkern.latency.predictor import Predictor
from smkern.policies.admission import admitted, chunks_of
from smkern.policies.base import BasePolicy
from smkern.policies.decision import Decision
from smkern.policies.layerwise import GROUP_LAYERS, GROUPS_AHEAD, layers_left, split
from smkern.policies.order import Order
from smkern.policies.pricing import Chunks, Prices
from smkern.policies.snapshot import Snapshot
from smkern.policies.static_split import MAX_PREFILL_TOKENS


class TwoStreams(BasePolicy):
    """Layers of prompts and decode steps share all SMs, as the hardware deals them.

    What multiplexing is without partitions: whoever's thread blocks come first hold the SMs.

    Args:
        predictor: Prices steps and layers, for the size of a group of layers; None: four.
        tbt_slo_ms, ttft_slo_ms: Nothing follows from them.
        order: In which requests wait: a name of `smkern.policies.ORDERS`, or a function.
        max_prefill_tokens: New tokens of a batch of prompts; a longer prompt comes in several.
        steps: Decode steps launched at a time; 1 while a batch is about to join.

    Raises:
        ArgumentError: a count below 1, or a limit that is none.

    Source: Bullet section 4.4, "Naive" of figure 23; WindServe's streams in MuxWise section 5.

    Example:
        >>> from smkern.policies import Snapshot, TwoStreams, Waiting
        >>> snapshot = Snapshot(
        ...     waiting=(Waiting(7, 0.0, 1000),), running_kv=(300, 80), rungs=(16, 32), num_sms=132,
        ...     num_layers=36, free_pages=500, page_size=16, max_running=8, max_prefill=4,
        ...     max_tokens=8192,
        ... )
        >>> decision = TwoStreams().decide(snapshot)
        >>> decision.rung, decision.shared, decision.layers
        (None, True, 4)
    """

    heeds = ()

    def __init__(
        self,
        predictor: Predictor | None = None,
        *,
        tbt_slo_ms: float | None = None,
        ttft_slo_ms: float | None = None,
        order: str | Order = "fcfs",
        max_prefill_tokens: int = MAX_PREFILL_TOKENS,
        steps: int = 2,
    ) -> None:
        counts = {"max_prefill_tokens": max_prefill_tokens, "steps": steps}
        super().__init__(predictor, tbt_slo_ms, ttft_slo_ms, order, counts)
        self._max_tokens = max_prefill_tokens
        self._steps = steps

    def decide(self, snapshot: Snapshot) -> Decision:
        """The next group of layers and the next steps, beside each other."""
        tokens = min(self._max_tokens, snapshot.max_tokens)
        running = snapshot.prefill
        batch = () if running is not None else admitted(snapshot, tokens)
        layers = 0
        if batch:
            layers = max(1, self._group(snapshot, tuple(chunks_of(batch, tokens))))
        elif running is not None:
            layers = min(self._group(snapshot, running.chunks), layers_left(snapshot))
        return split(
            snapshot,
            None,
            layers=layers,
            batch=batch,
            tokens=tokens if batch else None,
            steps=self._steps,
            move=False,
            shared=True,
        )

    def _group(self, snapshot: Snapshot, chunks: Chunks) -> int:
        if snapshot.prefill_queued >= GROUPS_AHEAD:
            return 0
        if self._predictor is None or not snapshot.batch:
            return min(GROUP_LAYERS, snapshot.num_layers)
        num_sms = snapshot.num_sms
        layers = Prices(self._predictor, snapshot).layers_of_a_step(chunks, num_sms, num_sms)
        return min(layers, snapshot.num_layers)
