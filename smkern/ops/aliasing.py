"""Overlap of a call's tensors: what depends on addresses, the same rule for every operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from smkern.errors import ArgumentError

if TYPE_CHECKING:
    from smkern.ops.operator import Operator

VECTOR_BYTES = 16
"""What TMA and 16-byte loads need of every base address and row pitch."""


def pointer(x: Any) -> int:
    """The address of an optional tensor; 0 for None."""
    return x.data_ptr() if isinstance(x, Tensor) else 0


def layout(x: Any) -> Any:
    """The part of an optional tensor that a record depends on; a number stands for itself."""
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype, x.get_device()
    return x


def span_bytes(x: Tensor | None) -> int:
    """Bytes from the first element of a tensor to the end of its last."""
    if x is None:
        return 0
    last = 0
    for size, stride in zip(x.shape, x.stride(), strict=True):
        if not size:
            return 0
        last += (size - 1) * stride
    return (last + 1) * x.element_size()


def overlaps(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors share an address.

    Exact for tensors of one shape and strides (K and V as halves of one buffer, interleaved by
    page, slot or head) and where both step by the same pitch in their first dimension (slices of a
    fused QKV buffer lie apart though their spans meet); otherwise spans that meet count as
    overlapping.
    """
    begin, other = x.data_ptr(), y.data_ptr()
    if not (begin < other + span_bytes(y) and other < begin + span_bytes(x)):
        return False
    if x.shape == y.shape and x.stride() == y.stride() and x.dtype is y.dtype:
        return twins_meet(other - begin, tuple(x.shape), x.stride(), x.element_size())
    pitch = x.stride(0) * x.element_size() if x.dim() else 0
    if y.dim() == 0 or pitch != y.stride(0) * y.element_size():
        return True
    width, other_width = span_bytes(x[0]), span_bytes(y[0])
    if pitch < max(width, other_width):
        return True
    offset = (other - begin) % pitch
    return offset < width or offset + other_width > pitch


def twins_meet(apart: int, shape: tuple[int, ...], strides: tuple[int, ...], item: int) -> bool:
    """Whether two tensors of one shape and strides, `apart` bytes from each other, share a byte."""
    pairs = zip(strides, shape, strict=True)
    steps = sorted(((s * item, n) for s, n in pairs if n > 1 and s), reverse=True)

    def meet(rest: int, at: int) -> bool:
        if at == len(steps):
            return abs(rest) < item
        step, count = steps[at]
        reach = sum(s * (n - 1) for s, n in steps[at + 1 :]) + item - 1
        first, last = -((reach - rest) // step), (rest + reach) // step
        return any(
            meet(rest - step * i, at + 1)
            for i in range(max(first, 1 - count), min(last, count - 1) + 1)
        )

    return meet(apart, 0)


def same_view(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors are the same elements in the same order."""
    if x.data_ptr() != y.data_ptr() or x.shape != y.shape or x.dtype is not y.dtype:
        return False
    steps = zip(x.shape, x.stride(), y.stride(), strict=True)
    return all(mine == other for size, mine, other in steps if size > 1)


def check_overlap(op: Operator[Any], call: Any) -> None:
    """Raise ArgumentError where something written shares an address with something else."""
    found: dict[str, tuple[Tensor, int, int]] = {}
    for name in op.tensors:
        tensor = op.tensor_of(call, name)
        if tensor is not None and tensor.numel():
            begin = tensor.data_ptr()
            found[name] = tensor, begin, begin + span_bytes(tensor)
    for mine, other, may in op.pairs:
        if mine not in found or other not in found:
            continue
        (x, begin, end), (y, other_begin, other_end) = found[mine], found[other]
        if end <= other_begin or other_end <= begin:
            continue
        if (may and same_view(x, y)) or not overlaps(x, y):
            continue
        hint = f" ({other} may only be {mine} itself)" if may else ""
        raise ArgumentError(
            f"{mine} at {x.data_ptr():#x} ({span_bytes(x)} bytes) overlaps {other} at "
            f"{y.data_ptr():#x} ({span_bytes(y)} bytes){hint}: pass a tensor of its own"
        )


def check_disjoint(op: Operator[Any], call: Any) -> None:
    """Raise ArgumentError where a call's workspace (dense, any shape) meets one of its tensors."""
    workspace = call.workspace
    begin, end = workspace.data_ptr(), workspace.data_ptr() + workspace.nbytes
    for name in op.tensors:
        x = op.tensor_of(call, name)
        if x is not None and x.data_ptr() < end and begin < x.data_ptr() + span_bytes(x):
            raise ArgumentError(
                f"workspace at {begin:#x} ({workspace.nbytes} bytes) overlaps {name} at "
                f"{x.data_ptr():#x}: pass a workspace of its own"
            )
