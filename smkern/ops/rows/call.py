"""What calls of the operators over rows were given, and what must hold of it on the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smkern.errors import ArgumentError
from smkern.ops import checks
from smkern.ops.operator import call_class
from smkern.tuning.rows import MAX_WIDTH, VECTOR, WHOLE, RowsOp, RowsProblem

_FEWEST = 4 * WHOLE
"""Columns of the smallest item; items are counted in 32 bits."""


RmsNorm = call_class("RmsNorm", "Tensor x, Tensor weight, *, float eps=1e-06")
AddRmsNorm = call_class(
    "AddRmsNorm", "Tensor x, Tensor(a!) residual, Tensor weight, *, float eps=1e-06"
)
SiluAndMul = call_class("SiluAndMul", "Tensor x")
Embedding = call_class("Embedding", "Tensor ids, Tensor table")


def check_norm(call: Any) -> None:
    """Raise ArgumentError for a norm that cannot be served, whatever it writes."""
    x, weight = call.x, call.weight
    checks.check_rows("x", x, 2, "[tokens, hidden]")
    if x.shape[1] > MAX_WIDTH:
        raise ArgumentError(
            f"x has rows of {x.shape[1]} elements: a norm holds a row in registers, at most "
            f"{MAX_WIDTH}; use torch.nn.functional.rms_norm for wider ones"
        )
    if hasattr(call, "residual"):
        checks.check_rows("residual", call.residual, 2, "[tokens, hidden]")
        checks.check_same("residual", call.residual, "x", x)
        if call.residual.shape != x.shape:
            raise ArgumentError(
                f"residual has shape {list(call.residual.shape)}, x {list(x.shape)}: they must "
                "agree"
            )
    checks.check_tensor("weight", weight, 1, "[hidden]")
    if weight.dtype not in (x.dtype, torch.float32):
        raise ArgumentError(
            f"weight is {weight.dtype}, x is {x.dtype}: it has x's dtype or torch.float32; convert "
            "it"
        )
    checks.check_vector("weight", weight, x.shape[1], weight.dtype, "[hidden]")
    if checks.as_float("eps", call.eps) < 0:
        raise ArgumentError(f"eps={call.eps!r}: pass a number of at least 0")


def check_silu(call: Any) -> None:
    """Raise ArgumentError for a `silu_and_mul` that cannot be served."""
    checks.check_rows("x", call.x, 2, "[tokens, 2 * I], gate then up")
    if call.x.shape[1] % 2:
        raise ArgumentError(
            f"x has {call.x.shape[1]} columns: wanted [tokens, 2 * I], I of the gate and I of up"
        )


def check_embedding(call: Any) -> None:
    """Raise ArgumentError for an `embedding` that cannot be served."""
    ids = call.ids
    checks.check_tensor("ids", ids, 1, "[tokens]")
    if ids.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(f"ids is {ids.dtype}: use torch.int32 or torch.int64")
    checks.check_rows("table", call.table, 2, "[rows, hidden]")


def result_of(call: Any) -> tuple[tuple[Any, torch.dtype], ...]:
    """Shape and dtype of a checked call's result."""
    if isinstance(call, SiluAndMul):
        return (((call.x.shape[0], call.x.shape[1] // 2), call.x.dtype),)
    if isinstance(call, Embedding):
        return (((call.ids.shape[0], call.table.shape[1]), call.table.dtype),)
    return ((tuple(call.x.shape), call.x.dtype),)


def problem_of(call: Any, aligned: bool) -> RowsProblem | None:
    """What chooses a kernel for a checked call; None where nothing is to be written.

    Args:
        call: A checked call of any operator over rows.
        aligned: Whether the tensors' first rows begin at whole 16 bytes.

    Raises:
        ArgumentError: fp32 rows, which only the reference takes; too many rows.
    """
    ((rows, width), dtype) = result_of(call)[0]
    if dtype is torch.float32:
        name = "table" if isinstance(call, Embedding) else "x"
        raise ArgumentError(
            f"{name} is torch.float32 on a GPU: use torch.bfloat16 or torch.float16"
        )
    if not rows or not width:
        return None
    if rows * -(-width // _FEWEST) > checks.MAX_SIZE:
        raise ArgumentError(
            f"{rows} rows of {width} elements are more than {checks.MAX_SIZE} items: split the step"
        )
    kind: Any = checks.NAMES[dtype]
    weight: Any = checks.NAMES[call.weight.dtype] if hasattr(call, "weight") else kind
    index: Any = "i32"
    if isinstance(call, Embedding) and call.ids.dtype is torch.int64:
        index = "i64"
    whole = aligned and _steps_are_whole(call)
    return RowsProblem(op_of(call), rows, width, kind, weight, index, whole)


def op_of(call: Any) -> RowsOp:
    """The operator's name."""
    names: dict[type, RowsOp] = {
        RmsNorm: "rms_norm",
        AddRmsNorm: "add_rms_norm",
        SiluAndMul: "silu_and_mul",
        Embedding: "embedding",
    }
    return names[type(call)]


def numbers_of(call: Any) -> tuple[Any, ...]:
    """What a launch takes behind the addresses; results are there, as tensors on any device."""
    ((rows, _), _) = result_of(call)[0]
    steps = steps_of(call)
    vectors = (x for x in call if isinstance(x, Tensor) and x is not getattr(call, "ids", None))
    whole = not any(x.data_ptr() % 16 for x in vectors) and _steps_are_whole(call)
    unit = VECTOR if whole else 1
    counted = tuple(step // unit for step in steps)
    if isinstance(call, Embedding):
        return (call.ids.stride(0), *counted, rows, call.table.shape[0])
    if isinstance(call, SiluAndMul):
        return (*counted, rows)
    return (*counted, rows, float(call.eps))


def steps_of(call: Any) -> tuple[int, ...]:
    """Elements between the rows of each matrix of a call; 0 where there is but one."""
    matrices = [x for x in call if isinstance(x, Tensor) and x.dim() == 2]
    return tuple(x.stride(0) if x.shape[0] > 1 else 0 for x in matrices)


def _steps_are_whole(call: Any) -> bool:
    """Whether rows are whole 16 bytes and as many apart."""
    ((_, width), _) = result_of(call)[0]
    return not any(step % VECTOR for step in (width, *steps_of(call)))
