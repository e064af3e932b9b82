"""A rank that serves on a GPU of its own, by `serve_ranks`; and ways to fail there."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch

import smkern
from smkern.errors import RankError
from smkern.kv import KvPool, KvReplica, KvSizes
from smkern.models import (
    Decoder,
    ModelConfig,
    SamplingParams,
    TensorParallel,
    Weights,
    copied_sums,
    preset,
)
from smkern.models.fused_sums import fuse_sums
from smkern.runtime import serve_ranks
from smkern.runtime.cuda_device import CudaDevice
from smkern.runtime.model import sizes as graph_sizes
from tests.runtime.alone import each_alone, workload
from tests.runtime.equality import serve_and_compare
from tests.runtime.policies import RandomPolicy
from tests.runtime.ranks.case import FAULTS, counted

RUNGS = (16, 48, 96)
MAX_CONTEXT = 512
MAX_RUNNING = 16
MAX_TOKENS = 256
PAGES = 160
SMALL = preset("qwen3-8b").replace(
    num_layers=2, hidden_size=1024, num_q_heads=8, num_kv_heads=2, intermediate_size=2048,
    vocab_size=4096,
)  # fmt: skip
LEAST_CUT = 129
"""Rows of prompts that are cut in two pieces here: of a tile and a row; chunks have up to 256."""
FAULT_AT = 300
"""The launch at which a rank fails: graphs, prompts and splits are under way."""


def whole(layers: int) -> ModelConfig:
    """Qwen3-8B, of so many of its layers."""
    return preset("qwen3-8b").replace(num_layers=layers)


def _fuse_sums(decoder: Decoder) -> None:
    """Sums by one kernel, and by copies from rows that prompts here have."""
    assert fuse_sums(decoder)
    copied_sums.LEAST_ROWS = LEAST_CUT
    graph_sizes.MAX_MIXED_ROWS = LEAST_CUT - 1  # graphs are never cut


def _part(layers: int, sums: str, timeout_s: float) -> tuple[Decoder, KvPool]:
    """This rank's part of a model and of its pages."""
    tp = TensorParallel.from_env(2, "cuda", timeout_s=timeout_s)
    device = torch.device("cuda", torch.cuda.current_device())
    config = whole(layers)
    weights = Weights.random(config, 0, device, tp.shard)
    decoder = Decoder(config, weights, tp=tp, max_position=MAX_CONTEXT, batch_invariant=True)
    if sums != "nccl":
        _fuse_sums(decoder)
    part = decoder.config
    sizes = KvSizes(part.num_layers, part.num_kv_heads, part.head_dim, 16, part.dtype)
    if tp.rank:
        return decoder, KvReplica(sizes, num_pages=PAGES, device=device)
    return decoder, KvPool(sizes, num_pages=PAGES, device=device, reuse=False)


def _open(
    decoder: Decoder, pool: KvPool, told: Callable[[int], None] | None, **options: Any
) -> Any:
    """The runtime on rank 0; on the others None, behind all that was served.

    `told` hears of every launch, by its number.
    """
    ladder = smkern.ladder(RUNGS)  # stays open: a rank that lost another cannot wait for its GPU
    device = CudaDevice(ladder)
    if told is not None:
        counted(device, told)
    return serve_ranks(
        decoder, pool, ladder=ladder, device=device, max_running=MAX_RUNNING, max_prefill=4,
        max_tokens=MAX_TOKENS, max_context=MAX_CONTEXT, **options,
    )  # fmt: skip


def serve(layers: int, requests: int, seed: int, sums: str) -> dict[str, Any]:
    """Requests under random splits beside each of them alone, which all ranks run first."""
    decoder, pool = _part(layers, sums, 60.0)
    asked = workload(seed, requests, decoder.config.vocab_size, longest=300)
    with torch.inference_mode():
        truth = each_alone(decoder, asked, MAX_CONTEXT)
    policy = RandomPolicy(seed, again=0.1)
    modes = ("recompute", "keep")
    mux = _open(decoder, pool, None, policy=policy, preemption=modes[seed % 2])
    if mux is None:
        return {"truth": truth}
    verdict, _ = serve_and_compare(mux, asked, truth, seed)
    stats = mux.stats()
    pool.check()
    mux.close()
    return {
        "truth": truth, "tokens": verdict.tokens, "mismatches": verdict.mismatches,
        "wrong": verdict.wrong, "failed": verdict.failed, "seconds": verdict.seconds,
        "cancelled": verdict.cancelled, "preemptions": stats.preemptions,
        "switches": stats.switches.count, "decisions": policy.asked,
    }  # fmt: skip


def walk(launches: int, free: float, seed: int, limit_s: float) -> dict[str, Any]:
    """So many launches of a small model under random splits, with `free` on SMs that both share; as
    many as there is time for."""
    tp = TensorParallel.from_env(2, "cuda", timeout_s=20.0)
    device = torch.device("cuda", torch.cuda.current_device())
    decoder = Decoder(SMALL, Weights.random(SMALL, 0, device, tp.shard), tp=tp)
    _fuse_sums(decoder)
    part = decoder.config
    sizes = KvSizes(part.num_layers, part.num_kv_heads, part.head_dim, 16, part.dtype)
    pool = (KvReplica if tp.rank else KvPool)(sizes, num_pages=PAGES, device=device)
    policy = RandomPolicy(seed, free=free, again=0.1, idle=0.05)
    counts: deque[int] = deque([0], maxlen=1)
    mux = _open(decoder, pool, counts.append, policy=policy, stall_timeout_s=20.0)
    if mux is None:
        return {}
    draw, began, tokens, errors, live = Random(seed), time.perf_counter(), 0, 0, 0

    def is_over() -> bool:
        return counts[0] >= launches or time.perf_counter() - began > limit_s

    while live or not is_over():
        if live < 24 and not is_over():
            prompt = draw.choices(range(SMALL.vocab_size), k=draw.randint(1, 200))
            mux.submit(prompt, SamplingParams(draw.randint(1, 60), ignore_eos=True))
            live += 1
        for output in mux.step():
            tokens += output.token is not None
            errors += output.error is not None
            live -= output.completion is not None or output.error is not None
    stats, seconds = mux.stats(), time.perf_counter() - began
    control = sorted(mux.control_us)
    mux.close()
    return {
        "launches": counts[0], "tokens": tokens, "errors": errors, "seconds": seconds,
        "switches": stats.switches.count, "decisions": policy.asked,
        "control_p50_us": control[len(control) // 2],
    }  # fmt: skip


def fail(who: int, how: str, timeout_s: float, folder: str) -> str:
    """A run in which a rank fails midway: what is told on this one, and when, in `folder`."""
    decoder, pool = _part(2, "kernels", timeout_s)
    rank = decoder.tp.rank  # type: ignore[union-attr]
    fault = FAULTS[how] if rank == who else None

    def told_of(launch: int) -> None:
        if fault is not None and launch == FAULT_AT:
            _note(folder, "failed")
            fault()

    mux = None
    try:
        mux = _open(decoder, pool, told_of, policy=RandomPolicy(3))
        if mux is None:
            return "followed to the end"
        params = SamplingParams(400, ignore_eos=True)
        handles = [mux.submit([1, 2, index], params) for index in range(8)]
        for _ in mux.run():
            pass
        told = mux.dead or handles[0].error
    except RankError as error:
        told = error
    _note(folder, f"told-{rank}")
    if mux is not None:
        mux.close(force=True)
    return f"{type(told).__name__}: {told}"


def _note(folder: str, name: str) -> None:
    Path(folder, name).write_text(repr(time.time()), encoding="utf-8")
