"""From what a command says to a runtime that serves: weights, pages, ladder, policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import smkern
from smkern.device import torch_device
from smkern.garbage import seldom_collected
from smkern.kv import KvPool
from smkern.latency import TablePredictor
from smkern.latency.nearest import places_of, predictor_for
from smkern.latency.predictor import Predictor
from smkern.models import Decoder, ModelConfig
from smkern.models.presets import find_model
from smkern.models.quantization import Kind
from smkern.models.shard import WHOLE
from smkern.models.weights import with_dtype
from smkern.policies import Policy
from smkern.profile import load_profile
from smkern.replay.named import asks_predictor, parsed, policy_named
from smkern.runtime.host_device import HostDevice
from smkern.runtime.loading import find_weights, kv_sizes
from smkern.runtime.model.executor import GRAPH_LIMIT_BYTES
from smkern.runtime.model.prefill import activation_bytes
from smkern.runtime.model.warming import warm_kernels
from smkern.runtime.multiplexer import Multiplexer
from smkern.server import RUNGS
from smkern.server.messages import Ready

CPU_TOKENS = 32_768
"""Tokens that a CPU's pool holds, unless told otherwise."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What the engine serves, and how.

    Attributes:
        model: A folder; or a preset's name or a configuration, with random weights.
        policy: As `smkern replay --policy` has it.
        tbt_ms: Limit of the time between tokens, for policies.
        order: In which order requests wait.
        table: A latency table of one's own; None: the shipped one of the model.
        device: Where the model is; None: the GPU where there is one, else the CPU.
        rungs: SMs of decode's side; none: no partitions.
        max_running, max_prefill, max_tokens, max_context: See `smkern.serve`.
        num_pages: None: as many as fit.
        memory_fraction, page_size: Of the pool.
        seed: Of random weights and of requests without one.
        quantization: "fp8-block", "fp8-channel" or "fp8-tensor": linear layers in fp8, also of a
            folder that has them in bf16.
        kv_cache_dtype: "auto", the model's; or "fp8".
        batch_invariant: A request's tokens depend on it alone, not on what runs beside it nor on
            what came before: beginnings of prompts are not found again.
        warm: Whether all kernels are compiled first.
    """

    model: str | ModelConfig
    policy: str = "adaptive"
    tbt_ms: float = 50.0
    order: str = "slack"
    table: Path | None = None
    device: str | None = None
    rungs: tuple[int, ...] = RUNGS
    max_running: int = 128
    max_prefill: int = 16
    max_tokens: int = 8192
    max_context: int | None = None
    num_pages: int | None = None
    memory_fraction: float = 0.9
    page_size: int = 16
    seed: int = 0
    quantization: Kind | None = None
    kv_cache_dtype: str = "auto"
    batch_invariant: bool = False
    warm: bool = True

    @property
    def kv_dtype(self) -> torch.dtype | None:
        return torch.float8_e4m3fn if self.kv_cache_dtype == "fp8" else None


@contextmanager
def open_runtime(
    options: EngineOptions, say: Callable[[str], object] = lambda line: None
) -> Iterator[tuple[Multiplexer, Ready]]:
    """A runtime that is ready to serve; closed at the end, whatever runs.

    Args:
        options: What it serves, and how.
        say: Told what is done of that, which takes a minute or two on a GPU.

    Raises:
        SmkernError: no such model, device, policy or table, or too little memory.
    """
    began = time.monotonic()

    def done(what: str) -> None:
        say(f"{what}, {time.monotonic() - began:.0f} s")

    config, folder = find_model(options.model)
    device = torch_device(options.device)
    on_gpu = device.type == "cuda"
    sizes = with_dtype(config, options.quantization)
    policy = _policy(sizes, options, smkern.device_info().name if on_gpu else None)
    weights = find_weights(config, folder, device, options.quantization, options.seed, WHOLE)
    config = weights.config
    done("weights are there")
    context = config.max_position if options.max_context is None else options.max_context
    decoder = Decoder(
        config, weights, max_position=min(context, config.max_position),
        batch_invariant=options.batch_invariant,
    )  # fmt: skip
    pool = _pool(config, options, device)
    # graphs of partitions that no decision names would be for nothing
    splits = on_gpu and options.rungs and parsed(options.policy)[0].splits != "never"
    with smkern.ladder(options.rungs) if splits else nullcontext() as ladder:
        if on_gpu and options.warm:
            warmed = warm_kernels(
                config, ladder, page_size=options.page_size, max_running=options.max_running,
                max_prefill=options.max_prefill, max_tokens=options.max_tokens,
                batch_invariant=options.batch_invariant, cache_dtype=options.kv_dtype,
            )  # fmt: skip
            done(f"{warmed.compiled} kernels compiled, {warmed.variants} loaded")
        mux = smkern.serve(
            decoder, pool, ladder=ladder, policy=policy, max_running=options.max_running,
            device=None if on_gpu else HostDevice(rungs=options.rungs), seed=options.seed,
            max_prefill=options.max_prefill, max_tokens=options.max_tokens,
            max_context=options.max_context,
        )  # fmt: skip
        if on_gpu:
            done(f"{mux.memory_report().graphs} graphs captured")
        mux.metrics_text()  # what it imports, 10 ms, is there when the first scrape comes
        try:
            ready = Ready(decoder.max_position, pool.num_pages * pool.page_size, config.vocab_size)
            with seldom_collected():
                yield mux, ready
        finally:
            with suppress(smkern.errors.SmkernError):
                mux.close(force=True)


def _policy(config: ModelConfig, options: EngineOptions, gpu: str | None) -> Policy:
    predictor = _predictor(config, options, gpu) if asks_predictor(options.policy) else None
    return policy_named(options.policy, predictor, tbt_slo_ms=options.tbt_ms, order=options.order)


def _predictor(config: ModelConfig, options: EngineOptions, gpu: str | None) -> Predictor:
    if options.table is not None:
        return TablePredictor.read(options.table).for_model(config)
    sms = [] if gpu is None else places_of(options.rungs, load_profile().info.num_sms)
    return predictor_for(config, gpu, sms=sms)


def _pool(config: ModelConfig, options: EngineOptions, device: Any) -> KvPool:
    sizes = kv_sizes(config, options.page_size, options.kv_dtype)
    num_pages = options.num_pages
    if num_pages is None and device.type != "cuda":
        num_pages = -(-CPU_TOKENS // options.page_size)
    held = activation_bytes(
        config, max_running=options.max_running, max_prefill=options.max_prefill,
        max_tokens=options.max_tokens,
    )  # fmt: skip
    return KvPool(
        sizes, num_pages=num_pages, memory_fraction=options.memory_fraction,
        reserved_bytes=held + GRAPH_LIMIT_BYTES, device=device, reuse=not options.batch_invariant,
    )  # fmt: skip
