"""Greedy requests on the runtime's executor of a transformers model, launched by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import smkern.integrations.transformers as st
from smkern.models import SamplingParams
from smkern.partition import Ladder
from smkern.runtime.device import Work
from smkern.runtime.executor import Draw, PrefillChunk
from smkern.runtime.interleaver import Interleaver
from smkern.runtime.model.executor import ModelExecutor
from smkern.runtime.place import Lane
from smkern.runtime.request import Request
from tests.runtime.alone import pool_of

NEW = 6
"""Tokens of every request."""


class Serving:
    """Three requests with pages; their tokens come in as they are drawn."""

    def __init__(
        self, model: Any, texts: Sequence[Sequence[int]], *, ladder: Ladder | None = None
    ) -> None:
        layers = st.Layers(model)
        pool = pool_of(layers.config, 64, device=layers.device, reuse=False)
        self.num_layers = layers.config.num_layers
        self.executor = ModelExecutor(
            layers, pool, ladder=ladder, max_running=4, max_prefill=2, max_tokens=512,
            max_context=512,
        )  # fmt: skip
        self.lanes = Interleaver(self.executor.device)
        self.requests = [
            Request(i, SamplingParams(NEW), 0, frozenset(), NEW, list(text), len(text))
            for i, text in enumerate(texts)
        ]
        for request in self.requests:
            pool.allocate(request, request.ids, num_tokens=request.max_tokens_held)

    def run(self) -> None:
        """Layers of one prompt, of another beside decode steps, a third in two mixed forwards."""
        first, second, third = self.requests
        executor, half = self.executor, third.prompt_len // 2
        run = executor.begin([PrefillChunk(first, 0, first.prompt_len, True)], 0)
        self._launch("prefill", executor.prefill(run, 0, self.num_layers))
        self._take(run.draw)
        run = executor.begin([PrefillChunk(second, 0, second.prompt_len, True)], 0)
        decode = executor.decode([first], 2)
        for index in range(self.num_layers):
            self._launch("prefill", executor.prefill(run, index, 1))
            if index < len(decode):
                self._launch("decode", decode[index][0])
        for _, draw in decode:
            self._take(draw)
        self._take(run.draw)
        self.lanes.aim(None)
        rest = third.prompt_len - half
        for chunk, beside in (
            (PrefillChunk(third, 0, half, False), [first, second]),
            (PrefillChunk(third, half, rest, True), [second]),
        ):
            work, draw = executor.mixed([chunk], beside)
            self._launch("decode", work)
            self._take(draw)
        self._steps([first, second, third], 2)
        self._steps([second, third], 1)
        self._steps([third], NEW - 4)
        self.lanes.drain()
        executor.synchronize()

    def drawn(self, request: Request) -> Tensor:
        """Its tokens, on the CPU."""
        return torch.tensor(request.ids[request.prompt_len :])

    def _launch(self, lane: Lane, work: Work) -> None:
        self.lanes.poll()
        while not self.lanes.can_launch(lane, work):
            self.lanes.wait()
            self.lanes.poll()
        self.lanes.launch(lane, work)

    def _take(self, draw: Draw | None) -> None:
        self.lanes.drain()
        assert draw is not None
        for request, token in zip(draw.requests, draw.read(), strict=True):
            request.ids.append(token)

    def _steps(self, requests: list[Request], count: int) -> None:
        works = self.executor.decode(requests, count)
        for work, _ in works:
            self._launch("decode", work)
        for _, draw in works:
            self._take(draw)
