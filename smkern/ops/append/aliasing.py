"""Overlap of what an append writes with what it reads, looked at in every call."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from smkern.errors import ArgumentError
from smkern.ops.aliasing import overlaps, span_bytes
from smkern.ops.append.call import Call

WRITTEN = ("out", "k_cache", "v_cache")
READ = ("q", "k", "v", "page_table", "kv_lens", "cos_sin", "q_norm", "k_norm", "positions",
        "page_indptr", "cu_q_lens", "k_scale", "v_scale")  # fmt: skip
_Q = len(WRITTEN) + READ.index("q")


def spans_of(call: Call) -> tuple[int, ...]:
    """Bytes that the tensors of a call span, in the order of WRITTEN and READ."""
    given = (getattr(call, name) for name in (*WRITTEN, *READ))
    return tuple(span_bytes(x) if isinstance(x, Tensor) else 0 for x in given)


def meeting(
    pointers: tuple[int, ...], spans: tuple[int, ...], in_place: bool
) -> list[tuple[int, int, int]]:
    """Pairs whose spans share an address: place of the written one, of the other, bytes apart.

    Places count WRITTEN, then READ. With `in_place` out is q.
    """
    found = []
    for at in range(len(WRITTEN)):
        begin = pointers[at]
        end = begin + spans[at]
        if begin == end:
            continue
        for place in range(at + 1, len(pointers)):
            other = pointers[place]
            if (
                other < end
                and begin < other + spans[place]
                and not (in_place and at == 0 and place == _Q)
            ):
                found.append((at, place, other - begin))
    return found


def twins_meet(apart: int, shape: tuple[int, ...], strides: tuple[int, ...], item: int) -> bool:
    """Whether two tensors of one shape and strides, `apart` bytes from each other, share a byte.

    Exact: K and V are often halves of one buffer, interleaved by page, slot or head.
    """
    steps = sorted(
        ((s * item, n) for s, n in zip(strides, shape, strict=True) if n > 1), reverse=True
    )

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


def _meet(x: Tensor, y: Tensor) -> bool:
    if x.shape == y.shape and x.stride() == y.stride() and x.dtype is y.dtype:
        apart = y.data_ptr() - x.data_ptr()
        return twins_meet(apart, tuple(x.shape), x.stride(), x.element_size())
    return overlaps(x, y)


def is_in_place(call: Call) -> bool:
    """Whether `out` is q, element for element."""
    q, out = call.q, call.out
    if q is None or out is None:
        return False
    same = out.shape == q.shape and out.stride() == q.stride()
    return out is q or (same and out.data_ptr() == q.data_ptr())


def check_pairs(call: Call, pairs: Iterable[tuple[int, int, int]]) -> None:
    """Raise ArgumentError where two tensors of a call whose spans meet share an address."""
    names = (*WRITTEN, *READ)
    for at, place, _ in pairs:
        name, other = names[at], names[place]
        x, y = getattr(call, name), getattr(call, other)
        if _meet(x, y):
            hint = " (q may only be out itself)" if (name, other) == ("out", "q") else ""
            raise ArgumentError(
                f"{name} at {x.data_ptr():#x} ({span_bytes(x)} bytes) overlaps {other} at "
                f"{y.data_ptr():#x} ({span_bytes(y)} bytes){hint}: pass a tensor of its own"
            )


def check_aliases(call: Call) -> None:
    """Raise ArgumentError where something written shares memory with anything else of a call.

    `out` may be q itself.
    """
    given = (getattr(call, name) for name in (*WRITTEN, *READ))
    pointers = tuple(x.data_ptr() if isinstance(x, Tensor) else 0 for x in given)
    check_pairs(call, meeting(pointers, spans_of(call), is_in_place(call)))
