"""Host numbers of a forward, rounded up so that few of them occur."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from smkern.latency import Size
from smkern.models.config import ModelConfig
from smkern.runtime.executor import PrefillRun
from smkern.tuning.attention.shapes import DECODE_MAX_Q

LENGTHS = 1024
"""Lengths are rounded up to multiples of this: two pieces of attention's decode path."""
TOTALS = 8192
"""As `LENGTHS`, of the sum of lengths."""


class Bounds(TypedDict):
    """What `Step.make` sizes attention's plan by."""

    max_q_len: int
    max_kv_len: int
    max_total_kv: int


def bounds(counts: Sequence[int], lengths: Sequence[int], most: int) -> Bounds:
    """Bounds of a forward.

    Args:
        counts: New tokens of requests; what takes attention's decode path keeps taking it.
        lengths: Of all requests, theirs and those of rows that decode.
        most: That a length can be.
    """
    return {
        "max_q_len": max(DECODE_MAX_Q, 1 << (max(counts) - 1).bit_length()),
        "max_kv_len": min(-(-max(lengths) // LENGTHS) * LENGTHS, most),
        "max_total_kv": -(-sum(lengths) // TOTALS) * TOTALS,
    }


def layer_launches(config: ModelConfig) -> int:
    """Kernels of a layer, at most."""
    return 9 if config.moe is None else 14


def prefill_size(config: ModelConfig, run: PrefillRun, layers: int, head: bool) -> Size:
    """Some layers of a batch of prompts."""
    return Size(run.cost, layers, config.num_layers, head)
