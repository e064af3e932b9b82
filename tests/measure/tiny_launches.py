"""Launches of a tiny model on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from smkern.kv import KvPool, KvSizes
from smkern.measure.launches import ModelLaunches
from smkern.models import Decoder, ModelConfig, Weights
from smkern.runtime.host_device import HostDevice
from tests.models.generation import tiny


@contextmanager
def tiny_launches(
    num_pages: int, config: ModelConfig | None = None, **sizes: int
) -> Iterator[ModelLaunches]:
    """With a split of 32 SMs for decode; `sizes` as `ModelLaunches` takes them."""
    config = tiny() if config is None else config
    kv = KvSizes(config.num_layers, config.num_kv_heads, config.head_dim, 16, config.dtype)
    pool = KvPool(kv, num_pages=num_pages, device="cpu", reuse=False)
    decoder = Decoder(config, Weights.random(config))
    made = ModelLaunches(decoder, pool, HostDevice(rungs=[32]), **sizes)
    yield made
    made.close()
