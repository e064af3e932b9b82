"""Whether tokens through the runtime are those of each request alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import torch

from smkern.kv import KvPool, KvSizes
from smkern.models import Arena, Decoder, ModelConfig, SamplingParams
from smkern.models.engine import Engine
from smkern.models.request import Request
from smkern.runtime.live import Output
from smkern.runtime.multiplexer import Multiplexer

GAP_S = 20e-6
"""Where a step gave nothing, the host leaves the device alone for so long."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of a workload.

    Attributes:
        prompt: Token ids.
        params: How its tokens are drawn; it has a seed.
        cancel_after: Tokens after which its owner wants no more. None: all are wanted.
        priority: Of the request.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    cancel_after: int | None = None
    priority: int = 0


@dataclass(slots=True)
class Verdict:
    """What came of a workload.

    Attributes:
        requests: That were asked for.
        tokens: That were delivered.
        mismatches: Tokens that differ from those of the request alone, missing ones included.
        wrong: Requests that have some, at most 16 of them, with the first position.
        cancelled: Requests.
        failed: Requests, and why.
        seconds: Of serving.
    """

    requests: int = 0
    tokens: int = 0
    mismatches: int = 0
    wrong: list[tuple[int, int]] = field(default_factory=list)
    cancelled: int = 0
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_equal(self) -> bool:
        return not self.mismatches and not self.failed


def workload(
    seed: int,
    count: int,
    vocab: int,
    *,
    longest: int = 600,
    answer: int = 24,
    greedy: bool = False,
) -> list[Asked]:
    """Random prompts and answers; some are drawn, cancelled, urgent, or end at a stop token.

    Args:
        seed: Of all draws.
        count: Requests.
        vocab: Of the model.
        longest: Tokens of a prompt.
        answer: Tokens of an answer.
        greedy: Whether the likeliest token is always taken.
    """
    draw = Random(seed)
    found = []
    for index in range(count):
        # as many short prompts as long ones: those of up to 8 tokens take a path of their own
        length = min(int(2 ** draw.uniform(0, 10)), longest)
        drawn = not greedy and draw.random() < 0.5
        stops = draw.sample(range(vocab), 8) if draw.random() < 0.5 else []
        new = draw.randint(1, answer)
        found.append(
            Asked(
                tuple(draw.choices(range(vocab), k=max(length, 1))),
                SamplingParams(
                    new,
                    temperature=1.0 if drawn else 0.0,
                    top_p=0.95 if drawn else 1.0,
                    seed=index,
                    stop_token_ids=tuple(stops),
                ),
                cancel_after=draw.randint(0, new) if draw.random() < 0.05 else None,
                priority=draw.choice((0, 0, 0, 0, 1)),
            )
        )
    return found


def pool_for(
    config: ModelConfig, device: torch.device, tokens: int, *, page_size: int = 16
) -> KvPool:
    """Pages for so many tokens, of which no prefix is found again."""
    sizes = KvSizes(
        config.num_layers, config.num_kv_heads, config.head_dim, page_size, config.dtype
    )
    return KvPool(sizes, num_pages=-(-tokens // page_size), device=device, reuse=False)


def each_alone(
    decoder: Decoder, asked: Sequence[Asked], *, max_context: int = 1024
) -> list[list[int]]:
    """The tokens of each request by itself: its whole prompt in one forward, a step a token."""
    config, device = decoder.config, decoder.device
    pool = pool_for(config, device, max_context)
    arena = Arena(config, max_context, 1, device)
    engine = Engine(decoder, pool, arena, max_context=max_context)
    found = []
    for one in asked:
        request = request_of(one, config, max_context)
        for _ in engine.run([request]):
            pass
        found.append(request.ids[request.prompt_len :])
    engine.close()
    return found


def request_of(one: Asked, config: ModelConfig, max_context: int) -> Request:
    """A request as the runtime makes it."""
    params = one.params
    assert params.seed is not None
    stops = frozenset((*params.stop_token_ids, *config.eos_token_ids))
    most = min(params.max_new_tokens, max_context - len(one.prompt) + 1)
    return Request(0, params, params.seed, stops, most, list(one.prompt), len(one.prompt))


def through(
    mux: Multiplexer, asked: Sequence[Asked], truth: Sequence[Sequence[int]], seed: int = 0
) -> Verdict:
    """Serve a workload whose requests come at random, and compare what comes out.

    Args:
        mux: The runtime.
        asked: The requests.
        truth: The tokens of each alone.
        seed: Of the arrivals.
    """
    draw = Random(seed)
    verdict = Verdict(requests=len(asked))
    tokens: list[list[int]] = [[] for _ in asked]
    handles = []
    most, began = 96, time.perf_counter()
    left = len(asked)
    while left:
        while len(handles) < len(asked) and len(handles) - (len(asked) - left) < most:
            one = asked[len(handles)]
            handles.append(
                (mux.submit(list(one.prompt), one.params, priority=one.priority), one)
            )
            if one.cancel_after == 0:
                handles[-1][0].cancel()
                verdict.cancelled += 1
                left -= 1
            if draw.random() < 0.2:
                most = draw.randint(8, 160)
                break
        first = len(asked) - len(truth)
        outputs = mux.step()
        left -= _enter(outputs, handles, tokens, verdict, first)
        if not outputs:
            time.sleep(GAP_S)
    while not mux.is_idle:  # what was launched for requests that were cancelled
        mux.step()
        time.sleep(GAP_S)
    verdict.seconds = time.perf_counter() - began
    _compare(handles, tokens, truth, verdict)
    return verdict
