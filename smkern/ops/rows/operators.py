"""RMS norm, its sum with a residual, SiLU times up, rows of a table, with an SM budget."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from smkern.ops.fp8 import rows as fp8
from smkern.ops.operator import Operator
from smkern.ops.operator_library import entry, register
from smkern.ops.reference import rows as reference
from smkern.ops.rows.call import (
    AddRmsNorm,
    Embedding,
    RmsNorm,
    SiluAndMul,
    check_embedding,
    check_norm,
    check_silu,
    numbers_of,
    problem_of,
    result_of,
)
from smkern.ops.rows.dispatch import rows_dispatcher
from smkern.tuning.rows import RowsProblem

_rows_operator = partial(
    Operator, shapes=result_of, problem=problem_of, numbers=numbers_of, dispatcher=rows_dispatcher
)
RMS_NORM: Operator[RowsProblem] = _rows_operator(
    name="rms_norm",
    call=RmsNorm,
    check=check_norm,
    reference=lambda call: reference.rms_norm(call.x, call.weight, float(call.eps)),
    vectors=("x", "weight", "out"),
    in_place=(("out", "x"),),
)
ADD_RMS_NORM: Operator[RowsProblem] = _rows_operator(
    name="add_rms_norm",
    call=AddRmsNorm,
    check=check_norm,
    reference=lambda call: reference.add_rms_norm(
        call.x, call.residual, call.weight, float(call.eps)
    ),
    vectors=("x", "residual", "weight", "out"),
    in_place=(("out", "x"),),
)
SILU_AND_MUL: Operator[RowsProblem] = _rows_operator(
    name="silu_and_mul",
    call=SiluAndMul,
    check=check_silu,
    reference=lambda call: reference.silu_and_mul(call.x),
    vectors=("x", "out"),
)
EMBEDDING: Operator[RowsProblem] = _rows_operator(
    name="embedding",
    call=Embedding,
    check=check_embedding,
    reference=lambda call: reference.embedding(call.ids, call.table),
    vectors=("table", "out"),
)
LIBRARY = register(RMS_NORM, ADD_RMS_NORM, SILU_AND_MUL, EMBEDDING)
_rms_norm = entry(RMS_NORM)
_add_rms_norm = entry(ADD_RMS_NORM)
_silu_and_mul = entry(SILU_AND_MUL)
_embedding = entry(EMBEDDING)


def rms_norm(
    x: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-6,
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
    num_sms: int | None = None,
) -> Tensor:
    """y = x / sqrt(mean(x²) + eps) * weight, a row at a time, on at most `num_sms` SMs.

    In fp32, rounded once (on CPU tensors also before the weight, as Hugging Face's layers do). A
    row's bits depend on the row alone. There is no backward.

    Args:
        x: [tokens, hidden], bf16 or fp16 (fp32 on CPU tensors), inner stride 1; rows may be apart.
            hidden is at most 16384.
        weight: [hidden], x's dtype or fp32.
        eps: Added to the mean, at least 0.
        out: [tokens, hidden] in x's dtype to write into, rows may be apart; may be x itself.
            With `out_scale` in e4m3.
        out_scale: Write e4m3, and its scales here, fp32: [tokens], a scale a row, or [tokens,
            hidden / 128], one for 128 columns, by rows or by columns without gaps. It is
            `smkern.quantize` of the norm, bit for bit.
        num_sms: SMs to use at most. None: all that the current stream's partition has.

    Returns:
        [tokens, hidden] in x's dtype, or e4m3: `out`, if given.

    Raises:
        As `smkern.gemm`.

    Source: Root Mean Square Layer Normalization (arXiv 1910.07467) section 4.

    Example:
        >>> import torch, smkern
        >>> smkern.rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), eps=0.0)
        tensor([[0.8485, 1.1314]])
    """
    if out_scale is not None:
        scaled: Tensor = fp8.scaled_rms_norm(x, weight, out_scale, eps, out, num_sms)
        return scaled
    found: Tensor = _rms_norm(x, weight, eps, out, num_sms)
    return found


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-6,
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
    num_sms: int | None = None,
) -> Tensor:
    """residual += x in place, and `rms_norm` of the sum, in one pass on at most `num_sms` SMs.

    The sum is rounded to x's dtype, and the norm is of the rounded sum.

    Args:
        x: [tokens, hidden], bf16 or fp16 (fp32 on CPU tensors), inner stride 1; rows may be apart.
            hidden is at most 16384.
        residual: [tokens, hidden], as x; written, so it overlaps nothing else.
        weight: [hidden], x's dtype or fp32.
        eps: Added to the mean, at least 0.
        out: [tokens, hidden] in x's dtype to write the norm into; may be x itself.
        out_scale: As in `smkern.rms_norm`.
        num_sms: SMs to use at most. None: all that the current stream's partition has.

    Returns:
        [tokens, hidden] in x's dtype: `out`, if given.

    Raises:
        As `smkern.gemm`.

    Example:
        >>> import torch, smkern
        >>> residual = torch.tensor([[1.0, 1.0]])
        >>> smkern.add_rms_norm(torch.tensor([[2.0, 3.0]]), residual, torch.ones(2), eps=0.0)
        tensor([[0.8485, 1.1314]])
        >>> residual
        tensor([[3., 4.]])
    """
    if out_scale is not None:
        scaled: Tensor = fp8.scaled_add_rms_norm(x, residual, weight, out_scale, eps, out, num_sms)
        return scaled
    found: Tensor = _add_rms_norm(x, residual, weight, eps, out, num_sms)
    return found


def silu_and_mul(
    x: Tensor,
    *,
    out: Tensor | None = None,
    out_scale: Tensor | None = None,
    num_sms: int | None = None,
) -> Tensor:
    """silu(gate) * up of rows that hold a gate and, behind it, up; on at most `num_sms` SMs.

    In fp32, rounded once (on CPU tensors also before the product, as Hugging Face's layers do).

    Args:
        x: [tokens, 2 * I], bf16 or fp16 (fp32 on CPU tensors), inner stride 1; rows may be apart.
        out: [tokens, I] in x's dtype to write into; overlaps nothing. With `out_scale` in e4m3.
        out_scale: As in `smkern.rms_norm`, for I columns.
        num_sms: SMs to use at most. None: all that the current stream's partition has.

    Returns:
        [tokens, I] in x's dtype: `out`, if given.

    Raises:
        As `smkern.gemm`.

    Source: GLU Variants Improve Transformer (arXiv 2002.05202) section 2.

    Example:
        >>> import torch, smkern
        >>> smkern.silu_and_mul(torch.tensor([[0.0, 1.0, 5.0, 2.0]]))
        tensor([[0.0000, 1.4621]])
    """
    if out_scale is not None:
        scaled: Tensor = fp8.scaled_silu_and_mul(x, out_scale, out, num_sms)
        return scaled
    found: Tensor = _silu_and_mul(x, out, num_sms)
    return found


def embedding(
    ids: Tensor, table: Tensor, *, out: Tensor | None = None, num_sms: int | None = None
) -> Tensor:
    """Rows of a table, on at most `num_sms` SMs: embeddings, or each request's last token.

    An id outside the table gives zeros; nothing outside it is read.

    Args:
        ids: [tokens], int32 or int64.
        table: [rows, hidden], bf16 or fp16 (fp32 on CPU tensors), inner stride 1; rows may be
            apart.
        out: [tokens, hidden] in the table's dtype to write into; overlaps nothing.
        num_sms: SMs to use at most. None: all that the current stream's partition has.

    Returns:
        [tokens, hidden] in the table's dtype: `out`, if given.

    Raises:
        As `smkern.gemm`.

    Example:
        >>> import torch, smkern
        >>> smkern.embedding(torch.tensor([1, -1]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        tensor([[3., 4.],
                [0., 0.]])
    """
    found: Tensor = _embedding(ids, table, out, num_sms)
    return found
