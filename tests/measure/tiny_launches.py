"""Launches of a tiny model on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from smkern.measure.launches import ModelLaunches
from smkern.models import Decoder, ModelConfig, Weights
from smkern.runtime.host_device import HostDevice
from tests.models.generation import tiny
from tests.runtime.alone import pool_of


@contextmanager
def tiny_launches(
    num_pages: int, config: ModelConfig | None = None, **sizes: int
) -> Iterator[ModelLaunches]:
    """With a split of 32 SMs for decode; `sizes` as `ModelLaunches` takes them."""
    config = tiny() if config is None else config
    pool = pool_of(config, num_pages, reuse=False)
    decoder = Decoder(config, Weights.random(config))
    made = ModelLaunches(decoder, pool, HostDevice(rungs=[32]), **sizes)
    yield made
    made.close()
