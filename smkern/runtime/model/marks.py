"""How far a long forward is: events between its layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import cycle
from typing import Any

import torch

MARKS = 8
"""Parts of a forward whose ends are told."""
RING = 4
"""Forwards whose events are kept: more than are on their way at a time."""


class Mark:
    """The events of one forward at a time.

    Args:
        layers: Layers behind which an event is recorded, ascending.
    """

    def __init__(
        self, layers: list[int], num_layers: int, launches: int, device: torch.device
    ) -> None:
        self._events: dict[int, Any] = {layer: torch.cuda.Event() for layer in layers}
        stream = torch.cuda.current_stream(device)
        for event in self._events.values():
            event.record(stream)  # the driver makes it now, not while it serves
        self._num_layers = num_layers
        self._launches = launches

    def layer_done(self, layer: int) -> None:
        """A layer is launched on the current stream."""
        event = self._events.get(layer)
        if event is not None:
            event.record()

    def left(self) -> int:
        """Kernels of the forward that was launched which are not done, at most."""
        done = 0
        with suppress(RuntimeError):  # an error of the device: the end of the launch tells
            for layer, event in self._events.items():
                if not event.query():
                    break
                done = layer + 1
        return self._launches - done * (self._launches // self._num_layers)


def mark_ring(num_layers: int, launches: int, device: torch.device) -> Iterator[Mark]:
    """The mark of each next forward, where a stream's queue does not hold two.

    The second is launched once enough of the first is done, so the device never runs dry between
    them. A mark takes the host about a microsecond, and the device nothing that shows; its events
    were another forward's `RING` forwards ago.
    """
    layers = sorted({num_layers * part // MARKS - 1 for part in range(1, MARKS)} - {-1})
    return cycle([Mark(layers, num_layers, launches, device) for _ in range(RING)])
