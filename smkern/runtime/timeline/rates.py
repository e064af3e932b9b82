"""Work done by each lane: FLOPs and bytes of its launches, by what they were made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from smkern.runtime.place import LANES, Lane
from smkern.runtime.timeline.trace import Choice, Span, State

if TYPE_CHECKING:
    from smkern.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Rate:
    """What a lane's launches computed and moved.

    Attributes:
        flops: Of the model's products and attention.
        bytes_moved: Weights and cached keys and values once a launch, and activations where a
            kernel's exceed the L2.
        busy_us: Time with a launch on the lane.
    """

    flops: float = 0.0
    bytes_moved: float = 0.0
    busy_us: float = 0.0

    @property
    def tflops(self) -> float:
        """FLOPs over the busy time, TFLOP/s."""
        return self.flops / self.busy_us / 1e6 if self.busy_us else 0.0

    @property
    def tbps(self) -> float:
        """Bytes over the busy time, TB/s."""
        return self.bytes_moved / self.busy_us / 1e6 if self.busy_us else 0.0


class RateMeter:
    """Adds up the FLOPs and bytes of launches that say what they are made of.

    Args:
        config: The model; None: nothing is counted.
        l2_bytes: Of the device.
    """

    def __init__(self, config: ModelConfig | None, l2_bytes: int) -> None:
        self._costs = None
        if config is not None:
            from smkern.latency.cost import Costs

            self._costs = Costs(config, l2_bytes=l2_bytes)
        self._flops: dict[Lane, float] = dict.fromkeys(LANES, 0.0)
        self._bytes: dict[Lane, float] = dict.fromkeys(LANES, 0.0)

    def span(self, span: Span) -> None:
        if self._costs is None or span.size is None or not span.is_over:
            return
        cost = self._costs.of(span.size)
        self._flops[span.lane] += cost.flops
        self._bytes[span.lane] += cost.bytes_moved

    def choice(self, choice: Choice) -> None:
        """Decisions do not matter here."""

    def state(self, state: State) -> None:
        """What there is to do does not matter here."""

    def rate(self, lane: Lane, busy_us: float) -> Rate:
        return Rate(self._flops[lane], self._bytes[lane], busy_us)
