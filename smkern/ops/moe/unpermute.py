"""`moe_unpermute`: each token's weighted sum of its experts' rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smkern.errors import ArgumentError
from smkern.ops import checks
from smkern.ops.moe.check import (
    check_choices,
    check_table,
    check_top_k,
    gpu_dtype,
    row_step,
    whole,
)
from smkern.ops.moe.dispatch import moe_dispatcher
from smkern.ops.operator import Operator, call_class
from smkern.ops.operator_library import entry, register
from smkern.ops.reference import moe as reference
from smkern.tuning.moe import UnpermuteProblem

Unpermute = call_class(
    "Unpermute", "Tensor y, Tensor index, Tensor weights, *, Tensor? residual=None"
)


def _check(call: Any) -> None:
    checks.check_rows("y", call.y, 2, "[rows, hidden]")
    check_table("weights", call.weights, torch.float32, dense=False)
    tokens, top_k = call.weights.shape
    check_top_k("weights.shape[1]", top_k)
    check_choices(tokens, top_k)
    checks.check_vector("index", call.index, tokens * top_k, torch.int32, "[tokens * top_k]")
    if call.residual is not None:
        checks.check_rows("residual", call.residual, 2, "[tokens, hidden]")
        checks.check_same("residual", call.residual, "y", call.y)
        wanted = [tokens, call.y.shape[1]]
        if list(call.residual.shape) != wanted:
            raise ArgumentError(
                f"residual has shape {list(call.residual.shape)}, wanted {wanted}, a row for each "
                "token of weights"
            )


def _rows(call: Any) -> tuple[Tensor | None, ...]:
    return call.y, call.residual, call.out


def _problem(call: Any, aligned: bool) -> UnpermuteProblem | None:
    dtype = gpu_dtype("y", call.y)
    tokens, top_k = call.weights.shape
    hidden = call.y.shape[1]
    if not tokens or not hidden:
        return None
    is_whole = aligned and whole(hidden, *_rows(call))
    return UnpermuteProblem(tokens, top_k, hidden, call.residual is not None, dtype, is_whole)


def _numbers(call: Any) -> tuple[int, ...]:
    hidden = call.y.shape[1]
    y, residual, out = (row_step(x, hidden) for x in _rows(call))
    return y, residual, out, call.weights.stride(0), call.y.shape[0]


UNPERMUTE: Operator[UnpermuteProblem] = Operator(
    name="moe_unpermute",
    call=Unpermute,
    check=_check,
    shapes=lambda call: (((call.weights.shape[0], call.y.shape[1]), call.y.dtype),),
    problem=_problem,
    numbers=_numbers,
    reference=lambda call: reference.moe_unpermute(
        call.y, call.index, call.weights, residual=call.residual
    ),
    dispatcher=moe_dispatcher,
    vectors=("y", "residual", "out"),
    in_place=(("out", "residual"),),
)
LIBRARY = register(UNPERMUTE)
_unpermute = entry(UNPERMUTE)


def moe_unpermute(
    y: Tensor,
    index: Tensor,
    weights: Tensor,
    *,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    num_sms: int | None = None,
) -> Tensor:
    """Each token's weighted sum of its experts' rows, on at most `num_sms` SMs.

    out[t] = sum over j of weights[t, j] * y[index[t * top_k + j]], + residual[t]; in fp32 in the
    order of j, rounded once. An index that is no row counts nothing. A row's bits depend on its own
    rows alone.

    Args:
        y: [rows, hidden], bf16 or fp16 (fp32 on CPU tensors), rows may be apart.
        index: [tokens * top_k] int32, from `smkern.moe_permute`.
        weights: [tokens, top_k] fp32, from `smkern.topk_softmax`.
        residual: [tokens, hidden], y's dtype.
        out: [tokens, hidden] to write into; may be `residual` itself, overlaps nothing else.
        num_sms: SMs to use at most. None: all that the current stream's partition has.

    Returns:
        [tokens, hidden] in y's dtype: `out`, if given.

    Raises:
        As `smkern.gemm`.

    Source: the combination of GShard (arXiv 2006.16668) section 2.2.

    Example:
        >>> import torch, smkern
        >>> y, index = torch.tensor([[1.0], [10.0]]), torch.tensor([1, 0]).int()
        >>> smkern.moe_unpermute(y, index, torch.tensor([[0.25, 0.75]])).tolist()
        [[3.25]]
    """
    found: Tensor = _unpermute(y, index, weights, residual, out, num_sms)
    return found
