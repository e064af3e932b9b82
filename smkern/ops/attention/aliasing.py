"""Overlap of what attention writes with what it reads."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from smkern.errors import ArgumentError
from smkern.ops.aliasing import span_bytes


def overlaps(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors share an address.

    Exact where both step by the same pitch in their first dimension (slices of a fused QKV buffer
    lie apart though their spans meet); otherwise spans that meet count as overlapping.
    """
    begin, other = x.data_ptr(), y.data_ptr()
    if not (begin < other + span_bytes(y) and other < begin + span_bytes(x)):
        return False
    pitch = x.stride(0) * x.element_size() if x.dim() else 0
    if y.dim() == 0 or pitch != y.stride(0) * y.element_size():
        return True
    width, other_width = span_bytes(x[0]), span_bytes(y[0])
    if pitch < max(width, other_width):
        return True
    offset = (other - begin) % pitch
    return offset < width or offset + other_width > pitch


def check_overlap(written: dict[str, Tensor | None], read: dict[str, Tensor | None]) -> None:
    """Raise ArgumentError where something written shares memory with anything else."""
    mine = [(name, x) for name, x in written.items() if x is not None and x.numel()]
    for at, (name, x) in enumerate(mine):
        others: Iterable[tuple[str, Tensor | None]] = (*read.items(), *mine[at + 1 :])
        for other, y in others:
            if y is not None and y.numel() and overlaps(x, y):
                raise ArgumentError(
                    f"{name} at {x.data_ptr():#x} ({span_bytes(x)} bytes) overlaps {other} at "
                    f"{y.data_ptr():#x} ({span_bytes(y)} bytes): pass a tensor of its own"
                )
