"""A rank that serves: rank 0 with a `Multiplexer`, the others behind it; and ways to fail."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch

from smkern import LLM
from smkern.errors import ArgumentError, RankError
from smkern.kv import KvPool, KvReplica, KvSizes
from smkern.models import Decoder, ModelConfig, SamplingParams, TensorParallel, Weights
from smkern.policies import Chunked, StaticSplit
from smkern.runtime import HostDevice, ModelExecutor, Multiplexer, serve_ranks
from smkern.runtime.ranks.channel import Links, open_links
from smkern.runtime.ranks.follower import follow
from smkern.runtime.ranks.leader import RankExecutor
from tests.models.generation import tiny
from tests.runtime.alone import RequestSpec, workload
from tests.runtime.policies import RandomPolicy

RUNGS = (16, 48, 96)
PAGES, PAGE = 12, 16


def config(size: int) -> ModelConfig:
    """Of two ranks each has a KV head, of three two, of four one that all share."""
    heads = {2: (4, 2), 3: (6, 6), 4: (4, 1)}[size]
    return tiny(num_q_heads=heads[0], num_kv_heads=heads[1], vocab_size=96)


def specs(count: int) -> list[RequestSpec]:
    return workload(5, count, 96, longest=60, answer=12)


def part_of(tp: TensorParallel) -> tuple[Decoder, KvPool]:
    """A rank's part of the model and of its pages."""
    whole = config(tp.size)
    decoder = Decoder(whole, Weights.random(whole, 3, shard=tp.shard), tp=tp)
    part = decoder.config
    sizes = KvSizes(part.num_layers, part.num_kv_heads, part.head_dim, PAGE, part.dtype)
    return decoder, (KvReplica if tp.rank else KvPool)(sizes, num_pages=PAGES, device="cpu")


def executor_of(tp: TensorParallel, max_running: int = 6) -> ModelExecutor:
    return ModelExecutor(
        *part_of(tp), device=HostDevice(rungs=RUNGS), max_running=max_running, max_prefill=3,
        max_tokens=48, max_context=80,
    )  # fmt: skip


def served(mux: Multiplexer, count: int) -> list[Any]:
    """Tokens of each request that ended; they are submitted as others end."""
    handles, asked = [], specs(count)
    got = [0] * count
    while len(handles) < count or not mux.is_idle:
        if len(handles) < count and len(handles) - sum(h.done for h in handles) < 8:
            spec = asked[len(handles)]
            handles.append(mux.submit(list(spec.prompt), spec.params, priority=spec.priority))
        for output in mux.step():
            if output.error is not None:
                raise output.error
            got[output.id] += output.token is not None
            if got[output.id] == asked[output.id].cancel_after:
                mux.cancel(output.id)
    return [None if h.completion is None else list(h.completion.tokens) for h in handles]


def serve(size: int, count: int, seeds: tuple[int, ...], timeout_s: float) -> Any:
    """All of a workload under a random policy for each seed; the others say how many launches."""
    tp = TensorParallel.from_env(size, "cpu", timeout_s=timeout_s)
    executor, links = executor_of(tp), open_links(tp)
    if not isinstance(links, Links):
        follow(executor, links)
        return "followed"
    ranked, found = RankExecutor(executor, links), []
    for seed in seeds:
        mux = Multiplexer(
            ranked, policy=RandomPolicy(seed), preemption=("keep", "recompute")[seed % 2]
        )
        found.append(served(mux, count))
        executor.pool.check()
    mux.close()
    return found


PROMPTS = [[1, 2, 3], [4], [5, 6]]
PARAMS = SamplingParams(8, ignore_eos=True)


def generate(size: int, folder: str, device: str = "cpu") -> Any:
    """An `LLM` as a program under torchrun has it: what rank 0 generates of `PROMPTS`, twice, and
    what a rank is told that calls what is not its own."""
    llm = LLM(folder or config(size), device=device, tp=size, num_pages=PAGES, max_batch=4,
              max_step_tokens=48, seed=3)  # fmt: skip
    if llm.rank:
        try:
            llm.generate(PROMPTS, PARAMS)
        except ArgumentError as error:
            said = str(error)
        llm.follow()
        return said
    done = [llm.generate(PROMPTS, PARAMS) for _ in range(2)]
    try:
        llm.follow()
    except ArgumentError as error:
        return [[list(x.tokens) for x in each] for each in done], str(error)


def served_by_ranks(size: int) -> Any:
    """`serve_ranks` under a split; then what is told of an option that there is not, which ends the
    others' calls, and of ranks that ask for other sizes."""
    tp = TensorParallel.from_env(size, "cpu", timeout_s=10)
    decoder, pool = part_of(tp)
    given: dict[str, Any] = {"max_running": 4, "max_tokens": 48, "max_context": 80}
    device = HostDevice(rungs=RUNGS)
    mux = serve_ranks(decoder, pool, device=device, policy=StaticSplit(48), **given)
    tokens = None
    if mux is not None:
        handles = [mux.submit([1, 2, 3 + i], SamplingParams(6, ignore_eos=True)) for i in range(3)]
        for _ in mux.run():
            pass
        mux.close()
        tokens = [list(handle.tokens) for handle in handles]
    unknown = ""
    try:
        assert serve_ranks(decoder, pool, device=device, polcy=None, **given) is None
    except TypeError as error:
        unknown = str(error)
    given["max_running"] += tp.rank
    try:
        serve_ranks(decoder, pool, device=device, **given)
    except RankError as error:
        return tokens, str(error), unknown


def fail(size: int, timeout_s: float, who: int | None, how: str) -> Any:
    """A run in which a rank, or all, fail at the twelfth launch; what is told on this one."""
    tp = TensorParallel.from_env(size, "cpu", timeout_s=timeout_s)
    executor, links = executor_of(tp), open_links(tp)
    if who in (tp.rank, None):
        counted(executor.device, lambda launch: FAULTS[how]() if launch == 12 else None)
    if not isinstance(links, Links):
        follow(executor, links)
        return "followed to the end"
    mux = Multiplexer(RankExecutor(executor, links), policy=Chunked(chunk_tokens=16))
    params = SamplingParams(60, ignore_eos=True)
    handles = [mux.submit([1, 2, index], params) for index in range(4)]
    for _ in mux.run():
        pass
    mux.close(force=True)
    if mux.dead is None:
        return [str(handle.error) for handle in handles]
    raise mux.dead


def counted(device: Any, told: Callable[[int], None]) -> None:
    """Have `told` hear of every launch in front of it, by its number."""
    count, before = 0, device.launch

    def launches(*arguments: Any) -> Any:
        nonlocal count
        count += 1
        told(count)
        return before(*arguments)

    device.launch = launches


def _raise() -> None:
    raise torch.OutOfMemoryError("planted: no memory")


FAULTS: dict[str, Callable[[], None]] = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "no memory": _raise,
}
