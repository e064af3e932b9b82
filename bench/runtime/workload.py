"""Executors of models with random weights, their GEMMs compiled, and workloads for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import cycle
from random import Random
from typing import Any

import torch

from smkern.bench.runtime.figures import percentile
from smkern.device import Budget, device_info
from smkern.kv import KvPool, KvSizes
from smkern.measure.forwards import compile_forwards
from smkern.models import Decoder, ModelConfig, SamplingParams, Weights
from smkern.partition import ladder
from smkern.policies import Policy
from smkern.runtime.cuda_device import CudaDevice
from smkern.runtime.device import Device
from smkern.runtime.handle import Handle
from smkern.runtime.host_device import HostDevice
from smkern.runtime.model.executor import ModelExecutor
from smkern.runtime.model.sizes import batch_bucket
from smkern.runtime.multiplexer import Multiplexer

PAGE_SIZE = 16
PROMPTS = 16
"""Different prompts of a workload, which come in turn."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of an executor and its pool.

    Attributes:
        rungs: SMs of the decode side.
        max_running, max_prefill, max_tokens, max_context: See `ModelExecutor`.
        num_pages: Pages of the pool.
        batch_invariant: The decoder's mode.
        reuse: Whether prefixes are found again; what is timed must be computed.
        graph_limit_bytes: Memory limit of decode graphs.
    """

    rungs: tuple[int, ...]
    max_running: int = 128
    max_prefill: int = 8
    max_tokens: int = 4096
    max_context: int = 4096
    num_pages: int = 10_000
    batch_invariant: bool = False
    reuse: bool = False
    graph_limit_bytes: int = 4 << 30


CLUSTERS_FROM = 0.5
"""A spread partition of at most this share of the SMs launches no clusters."""


def budgets_of(rungs: Iterable[int], total: int) -> tuple[list[Budget], list[Budget]]:
    """Budgets of the decode sides and of the prefill sides, the whole device first in both."""
    whole = Budget(total, "mask", clusters=True)

    def side(num_sms: int) -> Budget:
        return Budget(num_sms, "mask", clusters=num_sms > CLUSTERS_FROM * total)

    rungs = tuple(rungs)
    return [whole, *map(side, rungs)], [whole, *(side(total - n) for n in rungs)]


def compile_steps(config: ModelConfig, sizes: Sizes, prompts: Iterable[int]) -> int:
    """Compile what decode steps and prompts of so many tokens will launch; how many variants."""
    if not torch.cuda.is_available():
        return 0
    decode, prefill = budgets_of(sizes.rungs, device_info().num_sms)
    steps = [(rows, rows) for rows in step_rows(sizes.max_running)]
    wanted = [(steps, decode), ([(tokens, 1) for tokens in prompts], prefill)]
    return compile_forwards(config, wanted, batch_invariant=sizes.batch_invariant)


def step_rows(max_running: int) -> list[int]:
    """Rows of the decode steps of every bucket."""
    return [*dict.fromkeys(batch_bucket(n, max_running) for n in range(1, max_running + 1))]


@contextmanager
def open_executor(
    weights: Weights, sizes: Sizes, make_device: Callable[..., Device] | None = None
) -> Iterator[ModelExecutor]:
    """An executor of these weights where they lie; on a GPU with a ladder of its own.

    Args:
        weights: Weights of the model.
        sizes: Sizes of what is made.
        make_device: make_device(ladder), or on CPU tensors make_device(rungs); None: a `CudaDevice`
            or `HostDevice`.
    """
    config, where = weights.config, weights.embed.device
    positions = min(config.max_position, sizes.max_context)
    decoder = Decoder(
        config, weights, max_position=positions, batch_invariant=sizes.batch_invariant
    )
    kv = KvSizes(config.num_layers, config.num_kv_heads, config.head_dim, PAGE_SIZE, config.dtype)
    # begun anew in the invariant mode, a request must not find what another way of it computed
    assert not (sizes.reuse and sizes.batch_invariant)
    pool = KvPool(kv, num_pages=sizes.num_pages, device=where, reuse=sizes.reuse)
    on_gpu = where.type == "cuda"
    before = torch.cuda.mem_get_info(where)[0] if on_gpu else 0
    with ladder(sizes.rungs) if on_gpu else nullcontext() as steps:
        took = before - torch.cuda.mem_get_info(where)[0] if on_gpu else 0
        make: Callable[..., Device] = CudaDevice if on_gpu else _host_device
        executor = ModelExecutor(
            decoder,
            pool,
            device=(make_device or make)(steps if on_gpu else sizes.rungs),
            ladder=steps,
            partition_bytes=max(took, 0),
            max_running=sizes.max_running,
            max_prefill=sizes.max_prefill,
            max_tokens=sizes.max_tokens,
            max_context=sizes.max_context,
            graph_limit_bytes=sizes.graph_limit_bytes,
        )
        try:
            yield executor
        finally:
            executor.synchronize()
            executor.close()


def _host_device(rungs: tuple[int, ...]) -> Device:
    return HostDevice(rungs=rungs)


@dataclass(slots=True)
class Service:
    """What requests met: times by the host's clock as its tokens were handed out.

    Attributes:
        tbt_us: Gaps between two tokens of a request.
        control_us: Host time of each step that launched decode.
        prompt_tokens: Tokens of the prompts whose first token came.
        seconds: How long it was watched.
    """

    tbt_us: list[float] = field(default_factory=list)
    control_us: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    seconds: float = 0.0

    def figures(self) -> dict[str, float]:
        """p50 and p99 of TBT in ms, the prompts' tokens per ms."""
        found = {f"tbt_p{n}_ms": round(percentile(self.tbt_us, n / 100) / 1e3, 3) for n in (50, 99)}
        rate = self.prompt_tokens / max(self.seconds, 1e-9) / 1e3
        return {**found, "tokens_per_ms": round(rate, 3), "gaps": len(self.tbt_us)}


@dataclass(slots=True)
class Workload:
    """Requests that decode all the time, and prompts that come one behind another beside them.

    Args:
        running: How many decode.
        context: Tokens of their prompts.
        prompt: Tokens of the prompts that come; each draws one token.
        waiting: How many of these are kept in the queue; 0: none comes.
    """

    running: int
    context: int
    prompt: int
    waiting: int = 2

    def watch(
        self, executor: ModelExecutor, policy: Policy, seconds: float, *, least: int = 8
    ) -> Service:
        """Serve until all decode, then for a while, then until all is cancelled.

        Args:
            executor: Idle; it is idle again afterwards.
            policy: Decides.
            seconds: How long it is watched.
            least: Tokens of a request that are awaited in any case.
        """
        mux = Multiplexer(executor, policy=policy)
        draw, vocab = Random(1), executor.config.vocab_size

        def prompt(tokens: int) -> list[int]:
            return [draw.randrange(vocab) for _ in range(tokens)]

        endless = SamplingParams(
            max_new_tokens=executor.max_context - self.context - 1, temperature=0.8, top_p=0.9,
            seed=1, ignore_eos=True,
        )  # fmt: skip
        lasting = [mux.submit(prompt(self.context), endless) for _ in range(self.running)]
        self._until_all_decode(mux, lasting)
        # made ahead: drawing one takes the host longer than a decode step's launch
        texts = cycle([prompt(self.prompt) for _ in range(PROMPTS)])
        service = self._watch(mux, [x.id for x in lasting], texts, seconds, least)
        for handle in lasting:
            handle.cancel()
        for _ in mux.run():
            pass
        return service

    def _until_all_decode(self, mux: Multiplexer, lasting: Sequence[Handle]) -> None:
        missing = {handle.id for handle in lasting}
        for output in mux.run():
            _raise(output)
            missing.discard(output.id)
            if not missing:
                return
        raise ValueError("requests ended before all of them decoded: give them more tokens")

    def _watch(
        self,
        mux: Multiplexer,
        lasting: Sequence[int],
        texts: Iterator[list[int]],
        seconds: float,
        least: int,
    ) -> Service:
        once = SamplingParams(max_new_tokens=1, ignore_eos=True)
        found, last = Service(), dict.fromkeys(lasting, 0.0)
        coming: set[int] = set()
        known = len(mux.control_us)
        began, tokens = time.perf_counter(), 0
        while len(coming) < self.waiting:
            coming.add(mux.submit(next(texts), once).id)
        for output in mux.run():
            _raise(output)
            now = time.perf_counter()
            if output.id in last:
                if last[output.id]:
                    found.tbt_us.append(1e6 * (now - last[output.id]))
                last[output.id] = now
                tokens += 1
            elif output.id in coming:
                coming.discard(output.id)
                found.prompt_tokens += self.prompt
                coming.add(mux.submit(next(texts), once).id)
            if now - began > seconds and tokens >= least * len(lasting):
                break
        found.seconds = time.perf_counter() - began
        found.control_us = list(mux.control_us)[known:]
        for id_ in coming:
            mux.cancel(id_)
        return found


def _raise(output: Any) -> None:
    if output.error is not None:
        raise output.error
