"""Whether tokens through the runtime are those of each request alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import torch

from smkern import ops
from smkern.kv import KvPool, KvSizes
from smkern.models import Arena, Decoder, ModelConfig, SamplingParams, Step
from smkern.models.engine import Engine
from smkern.models.request import Request
from smkern.runtime.live import Handle
from smkern.runtime.multiplexer import Multiplexer

GAP_S = 20e-6
"""Where a step gave nothing, the host leaves the device alone for so long."""
SHOWN = 16
BF16_STEP = 2.0**-8
CLEAR = 8.0
"""Two logits are apart if they differ by so many times the root mean square of rounding."""


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
) -> tuple[Verdict, list[list[int]]]:
    """Serve a workload whose requests come in bursts, and compare what comes out.

    Args:
        mux: The runtime.
        asked: The requests.
        truth: The tokens of each alone.
        seed: Of the bursts.

    Returns:
        The verdict, and the tokens of each request.
    """
    draw = Random(seed)
    verdict = Verdict(requests=len(asked))
    tokens: list[list[int]] = [[] for _ in asked]
    handles: list[Handle] = []
    index_of: dict[int, int] = {}
    ended: set[int] = set()

    def cancel(index: int) -> None:
        handles[index].cancel()
        if handles[index].cancelled and index not in ended:
            verdict.cancelled += 1
            ended.add(index)

    most, began = 32, time.perf_counter()
    while len(ended) < len(asked):
        while len(handles) < len(asked) and len(handles) - len(ended) < most:
            index, one = len(handles), asked[len(handles)]
            handles.append(mux.submit(list(one.prompt), one.params, priority=one.priority))
            index_of[handles[-1].id] = index
            if one.cancel_after == 0:
                cancel(index)
        if draw.random() < 0.01:
            most = draw.choice((1, 8, 32, 64, 160))
        outputs = mux.step()
        for output in outputs:
            index = index_of[output.id]
            if output.token is not None:
                tokens[index].append(output.token)
            if output.completion is not None or output.error is not None:
                ended.add(index)
            elif len(tokens[index]) == asked[index].cancel_after:
                cancel(index)
        if not outputs:
            time.sleep(GAP_S)
    for _ in mux.run():  # what was launched for requests that were cancelled
        pass
    verdict.seconds = time.perf_counter() - began
    for index, (handle, got) in enumerate(zip(handles, tokens, strict=True)):
        _compare(index, handle, got, truth[index], verdict)
    return verdict, tokens


def _compare(
    index: int, handle: Handle, got: Sequence[int], want: Sequence[int], verdict: Verdict
) -> None:
    verdict.tokens += len(got)
    if handle.error is not None and not handle.cancelled:
        verdict.failed.append(f"request {index}: {handle.error}")
        return
    if handle.cancelled:
        want = want[: len(got)]
    wrong = [at for at, (x, y) in enumerate(zip(got, want, strict=False)) if x != y]
    missing = abs(len(got) - len(want))
    verdict.mismatches += len(wrong) + missing
    if (wrong or missing) and len(verdict.wrong) < SHOWN:
        verdict.wrong.append((index, wrong[0] if wrong else min(len(got), len(want))))


def clear_mismatches(
    fast: Decoder,
    exact: Decoder,
    asked: Sequence[Asked],
    tokens: Sequence[Sequence[int]],
    *,
    max_context: int = 1024,
) -> tuple[int, int]:
    """Greedy tokens that are not the likeliest though rounding does not decide.

    Each text is run once by both decoders; their logits' difference says what rounding is, at least
    a step of bf16.

    Args:
        fast, exact: The decoder that served, and its batch-invariant twin.
        asked: Greedy requests.
        tokens: What each was given.
        max_context: Tokens of a request.

    Returns:
        How many differ, and how many were decided by more than rounding.
    """
    device = fast.device
    pool = pool_for(fast.config, device, max_context)
    arena = Arena(fast.config, max_context, 1, device)
    differ, clear = 0, 0
    for one, given in zip(asked, tokens, strict=True):
        if not given:
            continue
        ids = [*one.prompt, *given[:-1]]
        ours, truth = (_logits(x, pool, arena, ids, len(given)) for x in (fast, exact))
        noise = (ours - truth).square().mean(-1).sqrt()
        # a forward in which both decoders choose the same kernels differs by nothing
        noise = torch.maximum(noise, BF16_STEP * truth.square().mean(-1).sqrt())
        top = truth.topk(2, -1)
        is_clear = top.values[:, 0] - top.values[:, 1] > CLEAR * noise
        likeliest = top.indices[:, 0]
        wrong = likeliest != torch.tensor(given, device=device)
        differ += int((wrong & is_clear).sum())
        clear += int(is_clear.sum())
    return differ, clear


def _logits(
    decoder: Decoder, pool: KvPool, arena: Arena, ids: Sequence[int], count: int
) -> torch.Tensor:
    """[count, vocab] fp32 behind a text's last tokens, all of it in one forward."""
    config, device, length = decoder.config, decoder.device, len(ids)
    pages = torch.arange(pool.pages_for(length), dtype=torch.int32, device=device)
    step = Step.make(
        arena,
        token_ids=torch.tensor(ids, dtype=torch.int32, device=device),
        kv_lens=torch.tensor([length], dtype=torch.int32, device=device),
        page_table=pages[None],
        caches=[pool.layer(index) for index in range(config.num_layers)],
        max_kv_len=length,
        cu_q_lens=torch.tensor([0, length], dtype=torch.int32, device=device),
        max_q_len=length,
    )
    decoder.embed(step)
    for index in range(config.num_layers):
        decoder.layer(index, step)
    last = step.buffers.hidden[length - count :].clone()
    normed = ops.rms_norm(last, decoder.weights.final_norm, eps=config.rms_eps)
    return ops.gemm(normed, decoder.weights.lm_head).float()
