"""Whether tokens through the runtime are those of each request alone; on CPU tensors and on a GPU.

`PYTHONPATH=. SMKERN_RESULTS=runtime.json python -m pytest tests/gpu/runtime/test_bit_equal.py`
measures the row `token_mismatches` of `bench/results/<gpu>/runtime.json`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch

from smkern.bench.runtime.workload import Sizes, open_executor
from smkern.models import Decoder, Weights
from smkern.models.quantization import Kind
from smkern.runtime.handle import Handle
from smkern.runtime.multiplexer import Multiplexer
from tests.runtime.alone import Alone, RequestSpec, each_alone, workload
from tests.runtime.policies import RandomPolicy

GAP_S = 20e-6
"""After a step without output the host leaves the device alone for so long."""
SHOWN = 16
ROUNDING = 2.0**-7
"""What logits of two decoders differ by whose kernels do, of the logits' root mean square: 1.7 to
1.95 steps of bf16 in four layers of Qwen3-8B's shapes on an H100."""
CLEAR = 8.0
"""Two logits are apart if they differ by so many times the root mean square of rounding."""
SIZES = Sizes(
    (16, 48, 96), max_running=48, max_prefill=8, max_tokens=2048, max_context=1024,
    num_pages=160, batch_invariant=True,
)  # fmt: skip
SEEDS = (1, 2)
"""Each part of a workload is served by a random policy of its own seed and preemption mode."""


@dataclass(frozen=True, slots=True)
class Equality:
    """A workload, and the model that it is for.

    Attributes:
        requests: How many.
        layers: Layers of the model; None: all of the preset's.
        sizes: Sizes of the executor.
        longest: Tokens of a prompt, at most.
        is_fast: Whether the decoder is not batch-invariant: then only those tokens count that
            rounding does not decide.
        seed: Draws the requests.
        kind: What the linear layers are quantized to; None: nothing.
    """

    requests: int
    layers: int | None = None
    sizes: Sizes = SIZES
    longest: int = 600
    is_fast: bool = False
    seed: int = 1
    kind: Kind | None = None

    @property
    def about(self) -> dict[str, Any]:
        """The case of its row, beside model and name."""
        found: dict[str, Any] = {"requests": self.requests}
        if self.layers is not None:
            found["layers"] = self.layers
        if self.seed != 1:
            found["seed"] = self.seed
        if self.kind is not None:
            found["quantized"] = self.kind
        return {**found, "mode": "fast"} if self.is_fast else found


SEED = int(os.environ.get("SMKERN_EQUAL_SEED", "1"))
"""Of the largest workload: processes with a seed each make one of many thousands."""
EQUALITIES = (
    Equality(2000, layers=4, seed=SEED),
    Equality(2000, layers=4, seed=SEED, kind="fp8-block"),
    Equality(200, layers=4, is_fast=True),
    Equality(100),
)


@dataclass(slots=True)
class Verdict:
    """What came of a workload.

    Attributes:
        tokens: Tokens delivered.
        mismatches: Tokens that differ from those of the request alone, missing ones included.
        wrong: (request, first wrong position), at most 16 of them.
        cancelled: Cancelled requests.
        failed: Failed requests, and why.
        preemptions, switches: As `Multiplexer.stats` counts them.
        clear: Tokens that rounding does not decide, where those alone count.
        seconds: Time of serving.
    """

    tokens: int = 0
    mismatches: int = 0
    wrong: list[tuple[int, int]] = field(default_factory=list)
    cancelled: int = 0
    failed: list[str] = field(default_factory=list)
    preemptions: int = 0
    switches: int = 0
    clear: int | None = None
    seconds: float = 0.0

    @property
    def is_equal(self) -> bool:
        return not self.mismatches and not self.failed

    def compare(self, index: int, handle: Handle, got: Sequence[int], want: Sequence[int]) -> None:
        """Enter a request's delivered tokens beside those of the request alone."""
        self.tokens += len(got)
        if handle.error is not None and not handle.cancelled:
            self.failed.append(f"request {index}: {handle.error}")
            return
        if handle.cancelled:
            want = want[: len(got)]
        wrong = [at for at, (x, y) in enumerate(zip(got, want, strict=False)) if x != y]
        missing = abs(len(got) - len(want))
        self.mismatches += len(wrong) + missing
        if (wrong or missing) and len(self.wrong) < SHOWN:
            self.wrong.append((index, wrong[0] if wrong else min(len(got), len(want))))


def serve_and_compare(
    mux: Multiplexer,
    asked: Sequence[RequestSpec],
    truth: Sequence[Sequence[int]],
    seed: int = 0,
    *,
    into: Verdict | None = None,
) -> tuple[Verdict, list[list[int]]]:
    """Serve a workload whose requests come in bursts, and compare what comes out.

    Args:
        mux: The runtime.
        asked: The requests.
        truth: The tokens of each alone.
        seed: Seed of the bursts.
        into: A verdict to add to.

    Returns:
        The verdict, and the tokens of each request.
    """
    draw, verdict = Random(seed), Verdict() if into is None else into
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
    verdict.seconds += time.perf_counter() - began
    for index, (handle, got) in enumerate(zip(handles, tokens, strict=True)):
        verdict.compare(index, handle, got, truth[index])
    return verdict, tokens


def check_tokens(made: Weights, wanted: Equality) -> Verdict:
    """Serve a workload under random policies, and compare it with each request alone."""
    return _check_fast(made, wanted) if wanted.is_fast else _check_invariant(made, wanted)


def _check_invariant(made: Weights, wanted: Equality) -> Verdict:
    """Bit for bit, each part by a policy of another seed and way to preempt."""
    sizes = wanted.sizes
    asked = workload(wanted.seed, wanted.requests, made.config.vocab_size, longest=wanted.longest)
    truth: list[list[int]] = []
    verdict, part = Verdict(), -(-len(asked) // len(SEEDS))
    for index, seed in enumerate(SEEDS):
        mine = slice(index * part, (index + 1) * part)
        with open_executor(made, sizes) as executor:
            truth = truth or each_alone(_decoder(made, sizes), asked, sizes.max_context)
            executor.warm()
            executor.capture(contexts=[sizes.max_context])
            mux = Multiplexer(
                executor,
                policy=RandomPolicy(seed, free=0.3 * index, again=0.1 * index),
                batch_invariant=True,
                preemption="recompute" if seed % 2 else "keep",
            )
            serve_and_compare(mux, asked[mine], truth[mine], seed, into=verdict)
            stats = mux.stats()
            verdict.preemptions += stats.preemptions
            verdict.switches += stats.switches.count
            executor.pool.check()
            mux.close()
    return verdict


def _check_fast(made: Weights, wanted: Equality) -> Verdict:
    """Greedy tokens where rounding does not decide."""
    sizes = replace(wanted.sizes, batch_invariant=False)
    fast, exact = (_decoder(made, replace(sizes, batch_invariant=same)) for same in (False, True))
    vocab = made.config.vocab_size
    asked = workload(3, wanted.requests, vocab, longest=wanted.longest, greedy=True)
    with open_executor(made, sizes) as executor:
        executor.warm()
        executor.capture(contexts=[sizes.max_context])
        mux = Multiplexer(executor, policy=RandomPolicy(SEEDS[0]))
        verdict, tokens = serve_and_compare(mux, asked, [[] for _ in asked], SEEDS[0])
        mux.close()
    verdict.wrong = []
    verdict.mismatches, verdict.clear = clear_mismatches(
        fast, exact, asked, tokens, max_context=sizes.max_context
    )
    return verdict


def _decoder(made: Weights, sizes: Sizes) -> Decoder:
    return Decoder(
        made.config, made, max_position=sizes.max_context, batch_invariant=sizes.batch_invariant
    )


def clear_mismatches(
    fast: Decoder,
    exact: Decoder,
    asked: Sequence[RequestSpec],
    tokens: Sequence[Sequence[int]],
    *,
    max_context: int = 1024,
) -> tuple[int, int]:
    """Greedy tokens that are not the likeliest though rounding does not decide.

    Each text is run once by both decoders; their logits' difference says what rounding is, at least
    `ROUNDING`: where both choose the same kernels they differ by nothing, and from the steps that
    served all the same.

    Args:
        fast, exact: The decoder that served, and its batch-invariant twin.
        asked: Greedy requests.
        tokens: The tokens that each was given.
        max_context: Tokens of a request.

    Returns:
        How many differ, and how many were decided by more than rounding.
    """
    alone = [Alone(decoder, max_context) for decoder in (fast, exact)]
    differ, clear = 0, 0
    for one, given in zip(asked, tokens, strict=True):
        if not given:
            continue
        ids = [*one.prompt, *given[:-1]]
        ours, truth = (x.logits(ids, len(given)) for x in alone)
        noise = (ours - truth).square().mean(-1).sqrt()
        noise = torch.maximum(noise, ROUNDING * truth.square().mean(-1).sqrt())
        top = truth.topk(2, -1)
        is_clear = top.values[:, 0] - top.values[:, 1] > CLEAR * noise
        wrong = top.indices[:, 0] != torch.tensor(given, device=fast.device)
        differ += int((wrong & is_clear).sum())
        clear += int(is_clear.sum())
    return differ, clear
