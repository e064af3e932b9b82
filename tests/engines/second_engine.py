"""A second engine: its scheduler, its cache and its graphs; of the runtime, the interleaver alone.

First come, first served; one prompt at a time, a group of layers a launch, beside decode steps of
all other requests. Its cache is laid out as FlashInfer's with pages of one token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from smkern.partition import Ladder
from smkern.runtime.device import Device, Work
from smkern.runtime.interleaver import Interleaver
from smkern.runtime.place import Lane, Place
from smkern.runtime.ticket import Ticket
from tests.engines.flat_layout import Batch
from tests.engines.second_model import Model

KERNELS_A_LAYER = 40
"""A bound of what a layer launches, counted against the driver's queue."""


@dataclass(slots=True, eq=False)
class Request:
    """A prompt with what was drawn behind it, and the slots of the cache that hold both."""

    ids: list[int]
    prompt_len: int
    end: int
    slots: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.ids[self.prompt_len :]


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt on its way: layers that were launched, and the last launch."""

    request: Request
    layers: int = 0
    last: Ticket | None = None


class Engine:
    """Serves greedy requests on two lanes of a device.

    Args:
        model: What runs.
        device: Lanes, events, clock.
        rung: SMs of the decode side while a prompt runs beside it.
        ladder: A GPU's partitions, on which decode steps are captured; None: they run eagerly.
        group: Layers of a launch.
        max_batch, max_prompt, slots: Requests that decode, tokens of a prompt, tokens of the cache.
        about: What the device is told of a lane's launch of so many layers.
        watches: The interleaver's.
    """

    def __init__(
        self, model: Model, device: Device, *, rung: int, ladder: Ladder | None = None,
        group: int = 1, max_batch: int = 4, max_prompt: int = 128, slots: int = 512,
        about: Callable[[Lane, int], dict[str, Any]] = lambda lane, layers: {}, **watches: Any,
    ) -> None:  # fmt: skip
        self.lanes = Interleaver(device, **watches)
        self.model, self.rung, self.group, self.about = model, rung, group, about
        self.max_batch, self.free = max_batch, list(range(slots))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.prompt: Prompt | None = None
        self.decoding: tuple[Ticket, list[Request]] | None = None
        s = model.sizes
        self.caches = [model.zeros(2, slots, 1, s.kv_heads, s.head_dim) for _ in range(s.layers)]
        self.new = Batch.make(model.zeros(max_prompt, s.hidden), 1, slots, ragged=True)
        self.rows = Batch.make(model.zeros(max_batch, s.hidden), max_batch, slots, ragged=False)
        self.graphs = {} if ladder is None else self._capture(ladder)

    def submit(self, ids: Sequence[int], count: int) -> Request:
        self.waiting.append(Request(list(ids), len(ids), len(ids) + count))
        return self.waiting[-1]

    def run(self) -> None:
        while self.step():
            self.lanes.wait()

    def step(self) -> bool:
        """Take in what is over, launch what may be; False: nothing is left to do."""
        self.lanes.poll()
        self._take_in()
        self._admit()
        self.lanes.aim(self.rung if self.running and self.prompt else None)
        if self.running and self.decoding is None and self.lanes.can_launch("decode"):
            work = Work("decode", self._decode, about=self.about("decode", len(self.caches)))
            self.decoding = self.lanes.launch("decode", work), list(self.running)
        prompt, group = self.prompt, self.group
        if prompt is not None and prompt.layers < len(self.caches):
            count = min(group, len(self.caches) - prompt.layers)
            launches, run = count * KERNELS_A_LAYER, self._layers(prompt, count)
            work = Work("prefill", run, launches=launches, about=self.about("prefill", count))
            # one group runs, one waits: the stream never runs dry, and a change of place is near
            if self.lanes.queued("prefill") < 2 and self.lanes.can_launch("prefill", work):
                prompt.last = self.lanes.launch("prefill", work)
                prompt.layers += count
        return bool(self.running or self.prompt or self.waiting)

    def _take_in(self) -> None:
        """Read what was drawn by launches that are over: requests leave, a prompt's joins."""
        if self.decoding is not None and self.decoding[0].is_over:
            self._accept(self.decoding[1], self.rows.host)
            self.decoding = None
        prompt = self.prompt
        if prompt and prompt.last and prompt.last.is_over and prompt.layers == len(self.caches):
            self.prompt = None
            self.running.append(prompt.request)
            self._accept([prompt.request], self.new.host)

    def _accept(self, requests: list[Request], drawn: Tensor) -> None:
        for request, token in zip(requests, drawn.tolist(), strict=False):
            request.ids.append(token)
            if len(request.ids) == request.end:
                self.running.remove(request)
                self.free += request.slots

    def _admit(self) -> None:
        """The first that waits begins where there are slots for all it will hold."""
        if self.prompt or not self.waiting or len(self.running) == self.max_batch:
            return
        if self.waiting[0].end <= len(self.free):
            request = self.waiting.popleft()
            request.slots = [self.free.pop() for _ in range(request.end)]
            self.prompt = Prompt(request)

    def _decode(self, place: Place) -> None:
        """A decode step of all that run, on the lane's stream; a graph runs where it belongs."""
        rows = [(x.ids, x.slots, len(x.ids) - 1) for x in self.running]
        self.rows.send(rows, pads=self.max_batch - len(rows))
        if place.rung in self.graphs:
            self.graphs[place.rung].replay()
        else:
            self._decode_step()
        self.rows.host.copy_(self.rows.drawn, non_blocking=True)

    def _decode_step(self) -> None:
        self.model.embed(self.rows)
        for index, cache in enumerate(self.caches):
            self.model.layer(index, self.rows, *cache)
        self.model.head(self.rows)

    def _layers(self, prompt: Prompt, count: int) -> Callable[[Place], None]:
        """The prompt's next layers; with the first of them its tokens, with the last its draw."""
        first = prompt.layers

        def run(place: Place) -> None:
            new = self.new.first(prompt.request.prompt_len)
            if first == 0:
                new.send([(prompt.request.ids, prompt.request.slots, 0)])
                self.model.embed(new)
            for index in range(first, first + count):
                self.model.layer(index, new, *self.caches[index])
            if first + count == len(self.caches):
                self.model.head(new)
                new.host.copy_(new.drawn, non_blocking=True)

        return run

    def _capture(self, ladder: Ladder) -> dict[int, Any]:
        """A decode step as graphs: of the rung's decode side, and of the whole device."""
        partition, graphs = ladder.split(decode=self.rung).decode, {}
        for stream in (partition.stream, torch.cuda.Stream()):
            torch.cuda.synchronize()
            with torch.cuda.stream(stream):
                for _ in range(2):  # every kernel is loaded before the capture
                    self._decode_step()
            stream.synchronize()
        with partition.capture() as graphs[self.rung]:
            self._decode_step()
        graphs[0] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[0], capture_error_mode="thread_local"):
            self._decode_step()
        return graphs
