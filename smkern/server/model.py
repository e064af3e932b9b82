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
from smkern.device import DeviceInfo, torch_device
from smkern.errors import BudgetError
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
from smkern.partition import plan_ladder
from smkern.policies import Policy
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
        rungs: SMs of decode's side; none: no partitions. None: those of `RUNGS` that leave prefill
            as many as the device's own ladder does; on a slice too small for any, that ladder's.
        max_running, max_prefill, max_tokens, max_context: See `smkern.serve`.
        num_pages: None: as many as fit.
        memory_fraction, page_size: Of the pool.
        seed: Of random weights and of requests without one.
        dtype: "auto", the configuration's; or what weights are converted to: "bfloat16", "float16"
            or, on a CPU, "float32".
        quantization: "fp8-block", "fp8-channel" or "fp8-tensor": linear layers in fp8, also of a
            folder that has them in bf16.
        kv_cache_dtype: "auto", the model's; or "fp8".
        end_tokens: Tokens that end a text, besides the model's.
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
    rungs: tuple[int, ...] | None = None
    max_running: int = 128
    max_prefill: int = 16
    max_tokens: int = 8192
    max_context: int | None = None
    num_pages: int | None = None
    memory_fraction: float = 0.9
    page_size: int = 16
    seed: int = 0
    dtype: str = "auto"
    quantization: Kind | None = None
    kv_cache_dtype: str = "auto"
    end_tokens: tuple[int, ...] = ()
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
    config = config.replace(eos_token_ids=(*config.eos_token_ids, *options.end_tokens))
    device = torch_device(options.device)
    on_gpu = device.type == "cuda"
    sizes = with_dtype(config, options.quantization)
    info = smkern.device_info() if on_gpu else None
    # graphs of partitions that no decision names would be for nothing
    splits = parsed(options.policy)[0].splits != "never"
    rungs = rungs_of(options.rungs, info) if splits else ()
    policy = _policy(sizes, options, places_of(rungs, info.num_sms) if info else [])
    dtype = None if options.dtype == "auto" else getattr(torch, options.dtype)
    weights = find_weights(config, folder, device, dtype, options.quantization, options.seed, WHOLE)
    config = weights.config
    done("weights are there")
    context = config.max_position if options.max_context is None else options.max_context
    decoder = Decoder(
        config, weights, max_position=min(context, config.max_position),
        batch_invariant=options.batch_invariant,
    )  # fmt: skip
    pool = _pool(config, options, device)
    with smkern.ladder(rungs) if on_gpu and rungs else nullcontext() as ladder:
        if on_gpu and options.warm:
            warmed = warm_kernels(
                config, ladder, page_size=options.page_size, max_running=options.max_running,
                max_prefill=options.max_prefill, max_tokens=options.max_tokens,
                batch_invariant=options.batch_invariant, cache_dtype=options.kv_dtype,
            )  # fmt: skip
            done(f"{warmed.compiled} kernels compiled, {warmed.variants} loaded")
        mux = smkern.serve(
            decoder, pool, ladder=ladder, policy=policy, max_running=options.max_running,
            device=None if on_gpu else HostDevice(rungs=rungs), seed=options.seed,
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


def rungs_of(asked: tuple[int, ...] | None, info: DeviceInfo | None) -> tuple[int, ...]:
    """The rungs of `EngineOptions` on a GPU; None: on a CPU, which has any.

    Raises:
        BudgetError: the GPU cannot be split so.
    """
    if info is None or asked == ():
        return RUNGS if asked is None else tuple(sorted(set(asked)))
    if asked is None:
        own = plan_ladder(info).rungs
        return tuple(n for n in RUNGS if n <= info.num_sms - own[0]) or own
    try:
        return plan_ladder(info, asked).rungs
    except BudgetError as error:
        raise BudgetError(f"--rungs: {error}") from None


def _policy(config: ModelConfig, options: EngineOptions, sms: list[int]) -> Policy:
    predictor = _predictor(config, options, sms) if asks_predictor(options.policy) else None
    return policy_named(options.policy, predictor, tbt_slo_ms=options.tbt_ms, order=options.order)


def _predictor(config: ModelConfig, options: EngineOptions, sms: list[int]) -> Predictor:
    if options.table is not None:
        return TablePredictor.read(options.table).for_model(config)
    return predictor_for(config, sms=sms)


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
