"""What must hold of every call of a small operator: results, devices, overlap."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smkern.errors import ArgumentError
from smkern.ops import checks as checks
from smkern.ops.aliasing import span_bytes
from smkern.ops.attention.aliasing import overlaps
from smkern.ops.attention.shared import writable
from smkern.ops.bounded_cache import kind
from smkern.ops.operator import Operator, Shapes


def check_operator(op: Operator[Any], call: Any) -> Shapes:
    """Check all of a call but `num_sms` and addresses; shape and dtype of each result.

    Raises:
        ArgumentError: naming the argument, its value, what is wanted and what to do.
    """
    op.check(call)
    shapes = op.shapes(call)
    for name, wanted in zip(op.results, shapes, strict=True):
        x = getattr(call, name)
        if x is not None:
            _check_result(name, x, *wanted)
    first = op.call._fields[0]
    for at in op.places:
        x, name = call[at], op.call._fields[at]
        if isinstance(x, Tensor):
            checks.check_device(name, x, call[0].device, first)
            if name in op.changed and not writable(x):
                raise ArgumentError(
                    f"{name} has strides {x.stride()} for shape {list(x.shape)}: two of its "
                    "elements share an address, and it is written; pass one whose rows lie apart"
                )
    return shapes


def _check_result(name: str, x: Any, shape: Any, dtype: torch.dtype) -> None:
    checks.check_tensor(name, x, len(shape), str(list(shape)))
    if tuple(x.shape) != tuple(shape) or x.dtype is not dtype:
        raise ArgumentError(
            f"{name} is {list(x.shape)} {x.dtype}, the result is {list(shape)} {dtype}: pass one "
            "that agrees"
        )
    checks.check_inner(name, x)
    if not writable(x):
        raise ArgumentError(
            f"{name} has strides {x.stride()} for shape {list(x.shape)}: two of its elements share "
            "an address; pass a tensor whose rows lie apart"
        )


def check_pair(op: Operator[Any], call: Any, pair: tuple[int, int, bool]) -> None:
    """Raise ArgumentError where something written shares an address with something else."""
    mine, other, may = pair
    x, y = call[mine], call[other]
    if not (isinstance(x, Tensor) and isinstance(y, Tensor) and x.numel() and y.numel()):
        return
    same = x.data_ptr() == y.data_ptr() and kind(x) == kind(y)
    if (may and same) or not overlaps(x, y):
        return
    names = op.call._fields
    hint = f" ({names[other]} may only be {names[mine]} itself)" if may else ""
    raise ArgumentError(
        f"{names[mine]} at {x.data_ptr():#x} ({span_bytes(x)} bytes) overlaps {names[other]} at "
        f"{y.data_ptr():#x} ({span_bytes(y)} bytes){hint}: pass a tensor of its own"
    )
