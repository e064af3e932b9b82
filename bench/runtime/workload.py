"""Executors of models with random weights, all that they launch compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from smkern.kv import KvPool, KvReplica, KvSizes
from smkern.models import Decoder, ModelConfig, Weights
from smkern.partition import Ladder, ladder
from smkern.runtime.cuda_device import CudaDevice
from smkern.runtime.device import Device
from smkern.runtime.host_device import HostDevice
from smkern.runtime.model.executor import ModelExecutor
from smkern.runtime.model.warming import warm_kernels

PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of an executor and its pool.

    Attributes:
        rungs: SMs of the decode side.
        max_running, max_prefill, max_tokens, max_context: See `ModelExecutor`.
        num_pages: Pages of the pool.
        batch_invariant: The decoder's mode.
        reuse: Whether prefixes are found again.
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


@contextmanager
def open_executor(
    weights: Weights, sizes: Sizes, make_device: Callable[..., Device] | None = None
) -> Iterator[ModelExecutor]:
    """An executor of these weights where they lie; on a GPU with a ladder of its own, and all that
    it may launch compiled and loaded.

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
    on_gpu = where.type == "cuda"
    before = torch.cuda.mem_get_info(where)[0] if on_gpu else 0
    with ladder(sizes.rungs) if on_gpu else nullcontext() as steps:
        took = before - torch.cuda.mem_get_info(where)[0] if on_gpu else 0
        if steps is not None:
            load_kernels(config, sizes, steps)
        with executor_of(decoder, sizes, steps, make_device, max(took, 0)) as executor:
            yield executor


def load_kernels(config: ModelConfig, sizes: Sizes, steps: Ladder, tp: int = 1) -> None:
    """Compile and load all that an executor of a model, or of one of `tp` parts, may launch."""
    warm_kernels(
        config, steps, page_size=PAGE_SIZE, max_running=sizes.max_running,
        max_prefill=sizes.max_prefill, max_tokens=sizes.max_tokens,
        batch_invariant=sizes.batch_invariant, tp=tp,
    )  # fmt: skip


@contextmanager
def executor_of(
    decoder: Decoder,
    sizes: Sizes,
    steps: Ladder | None,
    make_device: Callable[..., Device] | None = None,
    partition_bytes: int = 0,
) -> Iterator[ModelExecutor]:
    """An executor of a decoder, or of a rank's part of one, with pages of its own.

    Args:
        steps: The ladder; None on CPU tensors.
        make_device: As of `open_executor`.
        partition_bytes: What the ladder took of the device.
    """
    config, where, tp = decoder.config, decoder.device, decoder.tp
    kv = KvSizes(config.num_layers, config.num_kv_heads, config.head_dim, PAGE_SIZE, config.dtype)
    # begun anew in the invariant mode, a request must not find what another way of it computed
    assert not (sizes.reuse and sizes.batch_invariant)
    kind = KvReplica if tp is not None and tp.rank else KvPool
    pool = kind(kv, num_pages=sizes.num_pages, device=where, reuse=sizes.reuse)
    make: Callable[..., Device] = _host_device if steps is None else CudaDevice
    executor = ModelExecutor(
        decoder,
        pool,
        device=(make_device or make)(sizes.rungs if steps is None else steps),
        ladder=steps,
        partition_bytes=partition_bytes,
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
