"""Host numbers of a forward, rounded up so that few of them occur."""

from __future__ import annotations

from smkern.latency import Size
from smkern.models.config import ModelConfig
from smkern.runtime.executor import PrefillRun
from smkern.tuning.attention.shapes import DECODE_MAX_Q

LENGTHS = 1024
"""Lengths are rounded up to multiples of this: two pieces of attention's decode path."""
TOTALS = 8192
"""As `LENGTHS`, of the sum of lengths."""


def rounded_queries(count: int) -> int:
    """A bound of a request's new tokens: what takes attention's decode path keeps taking it."""
    return max(DECODE_MAX_Q, 1 << (count - 1).bit_length())


def rounded_length(length: int, most: int) -> int:
    """A bound of the lengths of a forward, at most `most`."""
    return min(-(-length // LENGTHS) * LENGTHS, most)


def rounded_total(total: int) -> int:
    """A bound of the sum of lengths."""
    return -(-total // TOTALS) * TOTALS


def layer_launches(config: ModelConfig) -> int:
    """Kernels of a layer, at most."""
    return 9 if config.moe is None else 14


def prefill_size(config: ModelConfig, run: PrefillRun, layers: int, head: bool) -> Size:
    """Some layers of a batch of prompts."""
    return Size(run.chunks, layers, config.num_layers, head)
