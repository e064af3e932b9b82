"""Host numbers of a forward, rounded up so that few of them occur."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypedDict

from smkern.latency.work import padded_rows
from smkern.models.config import ModelConfig
from smkern.tuning.attention.shapes import DECODE_MAX_Q

LENGTHS = 1024
"""Lengths are rounded up to multiples of this: two pieces of attention's decode path."""
TOTALS = 8192
"""As `LENGTHS`, of the sum of lengths."""

FIRST_CONTEXT = 2048
"""The shortest context that a graph is made for; each next one is four times as long."""


def context_bucket(length: int, max_context: int) -> int:
    """The context of the graph for lengths up to this: attention's buffers grow by it."""
    bucket = FIRST_CONTEXT
    while bucket < length:
        bucket *= 4
    return min(bucket, max_context)


MAX_MIXED_ROWS = 2048
"""Rows of the largest graph of a mixed forward: larger ones take the device longer than the host
takes to launch them one by one."""


def mixed_rows(most: int) -> tuple[int, ...]:
    """Rows of all graphs of mixed forwards, where one has at most so many."""
    most = min(most, MAX_MIXED_ROWS)
    return tuple(sorted({x for rows in range(1, most + 1) if (x := padded_rows(rows)) <= most}))


def query_bucket(tokens: int) -> int:
    """A bound of a request's new tokens: what takes attention's decode path keeps taking it."""
    return max(DECODE_MAX_Q, 1 << (tokens - 1).bit_length())


class GraphKey(NamedTuple):
    """What a graph is for.

    Attributes:
        rung: SMs of the decode side that it runs on; 0 for the whole device.
        batch: Its rows.
        context: Keys of a request, at most.
        mixed: Whether its rows are a mixed forward's, else a decode step's.
    """

    rung: int
    batch: int
    context: int
    mixed: bool = False

    def __str__(self) -> str:
        where = f"{self.rung} SMs" if self.rung else "whole"
        what = "mixed rows" if self.mixed else "rows"
        return f"{where}, {self.batch} {what}, {self.context} keys"


class Bounds(TypedDict):
    """What `Step.make` sizes attention's plan by."""

    max_q_len: int
    max_kv_len: int
    max_total_kv: int


def bounds(counts: Sequence[int], lengths: Sequence[int], most: int) -> Bounds:
    """Bounds of a forward.

    Args:
        counts: New tokens of requests.
        lengths: Lengths of all requests, rows that decode included.
        most: The largest length possible.
    """
    return {
        "max_q_len": query_bucket(max(counts)),
        "max_kv_len": min(-(-max(lengths) // LENGTHS) * LENGTHS, most),
        "max_total_kv": -(-sum(lengths) // TOTALS) * TOTALS,
    }


def layer_launches(config: ModelConfig, *, summed: bool = False) -> int:
    """Kernels of a layer, at most.

    Args:
        config: The model.
        summed: Whether it is a part, summed over ranks: two sums more, and what adds the last.
    """
    return (9 if config.moe is None else 14) + 3 * summed


def is_summed(model: object) -> bool:
    """Whether a model is a rank's part, whose forwards sum over the ranks."""
    return getattr(model, "tp", None) is not None
