"""Host time of launching a layer, while the device's queue has room."""

from __future__ import annotations

import statistics
import time

import torch

from smkern.errors import ArgumentError
from smkern.models.decoder import Decoder
from smkern.models.step import Step

QUEUED = 16
"""Layers between two waits: few enough that no launch waits for the device."""


def layer_launch_us(decoder: Decoder, step: Step, *, rounds: int = 20) -> float:
    """Host time of launching one layer eagerly on the current stream, in us.

    The median over rounds of `QUEUED` launches of one layer; waiting for the device between rounds
    is not timed. Overwrites the step's residual stream and the first layer's pages.

    Args:
        decoder: The model.
        step: `planned` for the current stream's budget; small, so that launches do not wait.
        rounds: Rounds to take the median of.

    Raises:
        ArgumentError: a step without a plan, which each launch would have to make.
    """
    if step.plan is None:
        raise ArgumentError("the step has no plan: pass step.planned()")
    times = []
    for timed in (False, *(True for _ in range(rounds))):
        begin = time.perf_counter()
        for _ in range(QUEUED):
            decoder.layer(0, step)
        elapsed = time.perf_counter() - begin
        if decoder.device.type == "cuda":
            torch.cuda.current_stream(decoder.device).synchronize()
        if timed:
            times.append(elapsed / QUEUED * 1e6)
    return statistics.median(times)
