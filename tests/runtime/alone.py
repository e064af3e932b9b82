"""The oracle: a request by itself, its whole prompt in one forward, then one step per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from smkern import ops
from smkern.kv import KvPool
from smkern.models import ActivationBuffers, Decoder, ModelConfig, SamplingParams, Step
from smkern.runtime.loading import kv_sizes


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """A request of a workload.

    Attributes:
        prompt: Token ids.
        params: How its tokens are drawn; it has a seed.
        cancel_after: Tokens after which its owner cancels it. None: never.
        priority: Scheduling priority.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    cancel_after: int | None = None
    priority: int = 0


def workload(
    seed: int, count: int, vocab: int, *, longest: int = 600, answer: int = 24, greedy: bool = False
) -> list[RequestSpec]:
    """Random requests; some are sampled, cancelled, urgent, or end at a stop token.

    Args:
        seed: Seed of all draws.
        count: Requests.
        vocab: Vocabulary size of the model.
        longest: Tokens of a prompt, at most.
        answer: Tokens of an answer, at most.
        greedy: Whether the likeliest token is always taken.
    """
    draw = Random(seed)
    found = []
    for index in range(count):
        # as many short prompts as long ones: those of up to 8 tokens take a path of their own
        length = min(int(2 ** draw.uniform(0, 10)), longest)
        sampled = not greedy and draw.random() < 0.5
        stops = draw.sample(range(vocab), 8) if draw.random() < 0.5 else []
        new = draw.randint(1, answer)
        prompt = tuple(draw.choices(range(vocab), k=max(length, 1)))
        params = SamplingParams(
            new,
            temperature=1.0 if sampled else 0.0,
            top_p=0.95 if sampled else 1.0,
            seed=index,
            stop_token_ids=tuple(stops),
        )
        cancel_after = draw.randint(0, new) if draw.random() < 0.05 else None
        found.append(RequestSpec(prompt, params, cancel_after, draw.choice((0, 0, 0, 0, 1))))
    return found


def pool_of(
    config: ModelConfig, num_pages: int, page_size: int = 16, *, device: Any = "cpu",
    dtype: torch.dtype | None = None, reuse: bool = True,
) -> KvPool:  # fmt: skip
    """Pages of a model's sizes."""
    sizes = kv_sizes(config, page_size, dtype)
    return KvPool(sizes, num_pages=num_pages, device=device, reuse=reuse)


class Alone:
    """One request at a time in pages of its own: no batch, no scheduler, no graph.

    Args:
        decoder: The model.
        max_context: Tokens of a request.
    """

    def __init__(self, decoder: Decoder, max_context: int) -> None:
        config, device = decoder.config, decoder.device
        self.decoder, self.max_context = decoder, max_context
        pool = pool_of(config, -(-max_context // 16), device=device, reuse=False)
        self._caches = [pool.layer(index) for index in range(config.num_layers)]
        self._pages = self._ints(*range(pool.pages_for(max_context)))
        self._activations = ActivationBuffers(config, max_context, 1, device)

    def generate(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        """The tokens of a request, one that ends it included."""
        stops = {*params.stop_token_ids}
        if not params.ignore_eos:
            stops |= {*self.decoder.config.eos_token_ids}
        ids = list(prompt)
        most = min(len(ids) + params.max_new_tokens, self.max_context + 1)
        step = self._prefill(ids)
        while True:
            logits = self.decoder.forward(step)
            ids.append(self._sample(logits, len(ids), params))
            if ids[-1] in stops or len(ids) >= most:
                return ids[len(prompt) :]
            step = self._decode(ids)

    def logits(self, ids: Sequence[int], count: int) -> Tensor:
        """[count, vocab] fp32 behind a text's last tokens, each in a forward of its own."""
        ends = range(len(ids) - count + 1, len(ids) + 1)
        found = [self.decoder.forward(self._prefill(ids[:end])).clone() for end in ends]
        return torch.cat(found).float()

    def _prefill(self, ids: Sequence[int]) -> Step:
        length = len(ids)
        return self._step(ids, length, length, cu_q_lens=self._ints(0, length), max_q_len=length)

    def _decode(self, ids: Sequence[int]) -> Step:
        return self._step(ids[-1:], len(ids), self.max_context)

    def _step(self, new: Sequence[int], length: int, max_kv_len: int, **more: object) -> Step:
        return Step.make(
            self._activations,
            token_ids=self._ints(*new),
            kv_lens=self._ints(length),
            page_table=self._pages[None],
            caches=self._caches,
            max_kv_len=max_kv_len,
            **more,
        ).planned()

    def _sample(self, logits: Tensor, length: int, params: SamplingParams) -> int:
        drawn = ops.sample(
            logits,
            temperature=self._floats(params.temperature),
            top_k=self._ints(params.top_k),
            top_p=self._floats(params.top_p),
            min_p=self._floats(params.min_p),
            seeds=torch.tensor([params.seed or 0], device=self.decoder.device),
            steps=self._ints(length),  # the tokens in front of the one that is drawn
        )
        return int(drawn)

    def _ints(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.decoder.device)

    def _floats(self, *values: float) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.decoder.device)


def each_alone(decoder: Decoder, asked: Sequence[RequestSpec], max_context: int) -> list[list[int]]:
    """The tokens of each request by itself."""
    alone = Alone(decoder, max_context)
    return [alone.generate(one.prompt, one.params) for one in asked]
