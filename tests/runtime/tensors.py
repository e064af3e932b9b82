"""Lives of a runtime whose launches compute on CPU tensors, on a simulated device's clock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from random import Random

import torch

from smkern.models import Decoder, SamplingParams, Weights
from smkern.runtime.model.executor import ModelExecutor
from smkern.runtime.request import Request
from smkern.runtime.sim.device import SimDevice
from tests.models.generation import tiny
from tests.runtime.alone import Alone, pool_of
from tests.runtime.ends import Served
from tests.runtime.injected import Fault
from tests.runtime.world import RUNGS, Linear

CONFIG = tiny()
PAGE, PAGES = 16, 8


@contextmanager
def one_thread() -> Iterator[None]:
    """For forwards of a few tokens, whose threads would only wait for each other."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)


@cache
def _weights() -> Weights:
    return Weights.random(CONFIG, 3)


@cache
def _alone(prompt: tuple[int, ...], new: int) -> list[int]:
    alone = Alone(Decoder(CONFIG, _weights()), CONFIG.max_position)
    return alone.generate(list(prompt), SamplingParams(new, ignore_eos=True))


def truth(request: Request) -> list[int]:
    """The tokens of each request alone, greedy ones."""
    return _alone(tuple(request.ids[: request.prompt_len]), request.max_new_tokens)


def with_tensors(fault: Fault | None, seed: int = 8) -> Served:
    """A life whose tokens are a model's."""
    device = SimDevice(132, RUNGS, Linear(), decode_launch_us=1.0, prefill_launch_us=1.5)
    pool = pool_of(CONFIG, PAGES, PAGE)
    draw = Random(1)
    texts = [[draw.randrange(26) for _ in range(draw.randint(1, 30))] for _ in range(6)]
    return Served(
        lambda stand: ModelExecutor(
            Decoder(CONFIG, _weights()), pool, device=stand, max_running=4, max_prefill=3,
            max_tokens=32, max_context=80,
        ),
        device, truth, texts, fault, seed,
    )  # fmt: skip
