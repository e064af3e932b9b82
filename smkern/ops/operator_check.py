"""What must hold of every call of an operator: its own rules, results, devices."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smkern.errors import ArgumentError
from smkern.ops import checks
from smkern.ops.operator import Operator, Shapes


def check_operator(op: Operator[Any], call: Any) -> Shapes:
    """Check all of a call but `num_sms` and addresses; shape and dtype of each result.

    Raises:
        ArgumentError: naming the argument, its value, what is wanted and what to do.
    """
    for name in op.flags:
        checks.as_flag(name, getattr(call, name))
    op.check(call)
    shapes = op.shapes(call)
    for name, wanted in zip(op.results, shapes, strict=True):
        x = getattr(call, name)
        if x is not None and wanted is not None:
            _check_result(name, x, *wanted)
    device = op.device_of(call)
    for name in op.tensors:
        x = None if "." in name else op.tensor_of(call, name)
        if x is None:
            continue
        checks.check_device(name, x, device, op.anchor)
        if name in op.changed and not checks.writable(x):
            raise ArgumentError(
                f"{name} has strides {x.stride()} for shape {list(x.shape)}: two of its elements "
                "share an address, and it is written; pass one whose rows lie apart"
            )
    return shapes


def check_kinds(op: Operator[Any], call: Any) -> None:
    """Raise ArgumentError where something that has to be a tensor is none, or lies elsewhere.

    It is all that torch's own dispatcher has to know before it can find an implementation.
    """
    anchor = getattr(call, op.anchor)
    for name in (*op.tensors, "workspace"):
        if "." in name:
            continue
        x: Any = getattr(call, name, None)
        if not isinstance(x, Tensor):
            if (x is None and name not in op.required) or name in op.mixed:
                continue
            check_operator(op, call)  # may know what to pass instead
        checks.check_kind(name, x)
        if isinstance(anchor, Tensor):
            checks.check_device(name, x, anchor.device, op.anchor)


def check_written(op: Operator[Any], call: Any) -> None:
    """Raise ArgumentError where torch lets nobody write what a call writes."""
    for name in (*op.results, *op.changed):
        x = op.tensor_of(call, name)
        if x is not None:
            checks.check_writable(name, x)


def _check_result(name: str, x: Any, shape: Any, dtype: torch.dtype) -> None:
    checks.check_tensor(name, x, len(shape), str(list(shape)))
    if tuple(x.shape) != tuple(shape) or x.dtype is not dtype:
        raise ArgumentError(
            f"{name} is {list(x.shape)} {x.dtype}, the result is {list(shape)} {dtype}: pass one "
            "that agrees"
        )
    checks.check_inner(name, x)
    checks.check_steps(name, x)
    if not checks.writable(x):
        raise ArgumentError(
            f"{name} has strides {x.stride()} for shape {list(x.shape)}: two of its elements share "
            "an address; pass a tensor whose rows lie apart"
        )
