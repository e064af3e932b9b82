"""Alignment and overlap of a call's tensors: all that depends on addresses."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from smkern.errors import ArgumentError

VECTOR_BYTES = 16
"""What TMA and 16-byte loads need of every base address and row pitch."""


def pointer(x: Any) -> int:
    """The address of an optional tensor; 0 for what is none."""
    return x.data_ptr() if isinstance(x, Tensor) else 0


def row_stride(x: Tensor | None) -> int:
    """Elements between rows; a single row gets a pitch that is as good as aligned.

    A matrix of one row may carry any row stride, and no kernel steps by it.
    """
    if x is None:
        return 0
    rows, cols = x.shape
    if rows > 1:
        return int(x.stride(0))
    return -(-cols // VECTOR_BYTES) * VECTOR_BYTES


def span_bytes(x: Tensor | None) -> int:
    """Bytes from the first element of a tensor to behind its last."""
    if x is None:
        return 0
    last = 0
    for size, stride in zip(x.shape, x.stride(), strict=True):
        if not size:
            return 0
        last += (size - 1) * stride
    return (last + 1) * x.element_size()


def rows_aligned(n: int, k: int, tensors: list[Tensor | None]) -> bool:
    """Whether rows come in whole 16-byte pieces: widths n and k, and every matrix's row pitch.

    Base addresses are left to the caller, who knows them.
    """
    if n * 2 % VECTOR_BYTES or k * 2 % VECTOR_BYTES:
        return False
    for x in tensors:
        if x is None or x.dim() != 2:
            continue
        stride = row_stride(x)
        if (stride * x.element_size()) % VECTOR_BYTES or stride < x.shape[1]:
            return False
    return True


def overlaps(x: Tensor, y: Tensor) -> bool:
    """Whether two matrices (or vectors) share an address.

    Exact where both have the same row pitch (column slices of one buffer do not overlap though
    their spans do); otherwise spans that meet count as overlapping.
    """
    x_ptr, y_ptr = x.data_ptr(), y.data_ptr()
    if not (x_ptr < y_ptr + span_bytes(y) and y_ptr < x_ptr + span_bytes(x)):
        return False
    if x.dim() != 2 or y.dim() != 2:
        return True
    pitch = x.stride(0) * x.element_size()
    if x.stride(0) != y.stride(0) or pitch < max(x.shape[1], y.shape[1]) * x.element_size():
        return True
    offset = (y_ptr - x_ptr) % pitch
    x_width, y_width = x.shape[1] * x.element_size(), y.shape[1] * y.element_size()
    return offset < x_width or offset + y_width > pitch


def same_view(x: Tensor, y: Tensor) -> bool:
    """Whether two matrices are the same elements in the same order."""
    return x.data_ptr() == y.data_ptr() and x.shape == y.shape and row_stride(x) == row_stride(y)


def check_overlap(out: Tensor, others: dict[str, Tensor | None]) -> None:
    """Raise ArgumentError where out shares memory with another argument.

    `residual` may be out itself, element for element; nothing else may touch it.
    """
    for name, x in others.items():
        if x is None or (name == "residual" and same_view(out, x)):
            continue
        if overlaps(out, x):
            hint = " (residual may only be out itself)" if name == "residual" else ""
            raise ArgumentError(
                f"out at {out.data_ptr():#x} ({span_bytes(out)} bytes) overlaps {name} at "
                f"{x.data_ptr():#x} ({span_bytes(x)} bytes){hint}: pass an out of its own"
            )


def check_disjoint(workspace: Tensor, others: dict[str, Tensor | None]) -> None:
    """Raise ArgumentError where a workspace (dense, any shape) shares memory with a tensor."""
    begin = workspace.data_ptr()
    end = begin + workspace.nbytes
    for name, x in others.items():
        if x is not None and x.data_ptr() < end and begin < x.data_ptr() + span_bytes(x):
            raise ArgumentError(
                f"workspace at {begin:#x} ({workspace.nbytes} bytes) overlaps {name} at "
                f"{x.data_ptr():#x}: pass a workspace of its own"
            )
