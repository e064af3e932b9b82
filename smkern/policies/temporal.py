"""Layers of prompts and decode steps in turns, each on the whole device."""

from __future__ import annotations

from math import inf

from smkern.latency.predictor import Predictor
from smkern.policies.admission import admitted, chunks_of, ids_of
from smkern.policies.base import BasePolicy
from smkern.policies.decision import Decision
from smkern.policies.layerwise import GROUP_LAYERS, layers_left
from smkern.policies.order import Order
from smkern.policies.pricing import Chunks, Prices
from smkern.policies.snapshot import Snapshot
from smkern.policies.static_split import MAX_PREFILL_TOKENS


class Temporal(BasePolicy):
    """Between two decode steps run as many layers of prompts as the limit leaves time for.

    Both kinds have the whole device in turn, so nothing contends, decode reads at the full
    bandwidth, and a batch of prompts is not cut into chunks; but each decode step idles the tensor
    cores, where a mixed forward shares the weights that it reads.

    Args:
        predictor: Prices steps and layers; needed with a limit.
        tbt_slo_ms: Limit of the time between two tokens of a request: of a step and the layers
            before it. None: groups of four layers.
        ttft_slo_ms: Nothing follows from it.
        order: In which requests wait: a name of `smkern.policies.ORDERS`, or a function.
        max_prefill_tokens: New tokens of a batch of prompts; a longer prompt comes in several.
        steps: Decode steps launched at a time where no prompt waits.
        margin: Share of the limit that is left to launches which take longer than predicted.

    Raises:
        ArgumentError: a count below 1, a limit or margin that is none, or a limit without a
            predictor.

    Source: the temporal sharing that the papers compare with (MuxWise section 2.3, DRIFT section
        2.3), by layers as in MuxWise section 3.2.3.

    Example:
        >>> from smkern.policies import Snapshot, Temporal, Waiting
        >>> snapshot = Snapshot(
        ...     waiting=(Waiting(7, 0.0, 1000),), running_kv=(300, 80), rungs=(16, 32), num_sms=132,
        ...     num_layers=36, free_pages=500, page_size=16, max_running=8, max_prefill=4,
        ...     max_tokens=8192,
        ... )
        >>> decision = Temporal().decide(snapshot)
        >>> decision.rung, decision.prefill, decision.layers
        (None, (7,), 4)
    """

    heeds = ("tbt",)

    def __init__(
        self,
        predictor: Predictor | None = None,
        *,
        tbt_slo_ms: float | None = None,
        ttft_slo_ms: float | None = None,
        order: str | Order = "fcfs",
        max_prefill_tokens: int = MAX_PREFILL_TOKENS,
        steps: int = 2,
        margin: float = 0.0,
    ) -> None:
        counts = {"max_prefill_tokens": max_prefill_tokens, "steps": steps}
        super().__init__(predictor, tbt_slo_ms, ttft_slo_ms, order, counts, margin)
        self._max_tokens = max_prefill_tokens
        self._steps = steps

    def decide(self, snapshot: Snapshot) -> Decision:
        """A step, and the layers that run before the next."""
        if snapshot.prefill_queued > (0 if snapshot.batch or snapshot.joining else 1):
            return Decision()  # layers that are queued are this turn's
        if snapshot.prefill is not None:
            left = layers_left(snapshot)
            return Decision(layers=min(self._layers(snapshot, snapshot.prefill.chunks), left))
        tokens = min(self._max_tokens, snapshot.max_tokens)
        batch = admitted(snapshot, tokens)
        if not batch:
            return Decision(steps=1 if snapshot.joining else self._steps)
        layers = self._layers(snapshot, tuple(chunks_of(batch, tokens)))
        return Decision(
            prefill=ids_of(batch), chunk_tokens=tokens, layers=min(layers, snapshot.num_layers)
        )

    def _layers(self, snapshot: Snapshot, chunks: Chunks) -> int:
        """Layers of a turn."""
        if not snapshot.batch or self._predictor is None or self._limits.tbt_us == inf:
            return GROUP_LAYERS
        return Prices(self._predictor, snapshot).layers_within(chunks, self._limits.tbt_us)
