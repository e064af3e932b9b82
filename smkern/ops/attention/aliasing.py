"""Overlap of what attention writes with what it reads."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from smkern.errors import ArgumentError
from smkern.ops.aliasing import overlaps, span_bytes


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
