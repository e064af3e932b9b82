"""A decoder's products, in the model's dtype or in fp8 with the scales of both sides."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from smkern import ops
from smkern.models.activations import QuantizedRows, StepBuffers
from smkern.models.layers import Scales


class Operand(NamedTuple):
    """What a product multiplies: rows of the model's dtype, or e4m3 and its scales."""

    rows: Tensor
    scale: Tensor | None = None


class Launch(NamedTuple):
    """What all products of a step have in common."""

    num_sms: int | None
    batch_invariant: bool


def normed(
    weight: Tensor, eps: float, scales: Scales | None, b: StepBuffers, num_sms: int | None
) -> Operand:
    """The residual stream's RMS norm as a product with these scales reads it."""
    if scales is not None and scales.input is None:
        into = b.fp8.hidden
        assert into is not None
        ops.rms_norm(
            b.hidden, weight, eps=eps, out=into.values, out_scale=into.scale, num_sms=num_sms
        )
        return Operand(into.values, into.scale)
    ops.rms_norm(b.hidden, weight, eps=eps, out=b.normed, num_sms=num_sms)
    return quantized(b.normed, scales, b.fp8.hidden, num_sms)


def quantized(
    x: Tensor, scales: Scales | None, into: QuantizedRows | None, num_sms: int | None
) -> Operand:
    """Rows as a product with these scales reads them.

    Args:
        x: In the model's dtype.
        scales: Of the weight. None: x is read as it is.
        into: Where e4m3 goes.
        num_sms: SMs to use at most.
    """
    if scales is None:
        return Operand(x)
    assert into is not None
    if scales.input is not None:
        static = scales.input
        ops.quantize(x, "tensor", scale=static, out=(into.values, static), num_sms=num_sms)
        return Operand(into.values, static)
    kind = "token" if into.scale.dim() == 1 else "block"
    ops.quantize(x, kind, out=(into.values, into.scale), num_sms=num_sms)
    return Operand(into.values, into.scale)


def product(
    x: Operand,
    weight: Tensor,
    scales: Scales | None,
    launch: Launch,
    *,
    out: Tensor,
    residual: Tensor | None = None,
) -> None:
    """out = x @ weight.T + residual."""
    ops.gemm(
        x.rows, weight, residual=residual, a_scale=x.scale, w_scale=_weight(scales), out=out,
        static_weights=True, batch_invariant=launch.batch_invariant, num_sms=launch.num_sms,
    )  # fmt: skip


def gated(
    x: Operand, weight: Tensor, scales: Scales | None, launch: Launch, *, out: Tensor
) -> None:
    """out = silu(gate) * up of the two halves of x @ weight.T."""
    ops.gemm_swiglu(
        x.rows, weight, a_scale=x.scale, w_scale=_weight(scales), out=out,
        static_weights=True, batch_invariant=launch.batch_invariant, num_sms=launch.num_sms,
    )  # fmt: skip


def by_expert(
    x: Operand,
    weight: Tensor,
    scales: Scales | None,
    offsets: Tensor,
    num_sms: int | None,
    *,
    out: Tensor,
    swiglu: bool = False,
) -> None:
    """Each expert's rows times its weight; with `swiglu` gated."""
    ops.grouped_gemm(
        x.rows, weight, offsets, a_scale=x.scale, w_scale=_weight(scales), swiglu=swiglu, out=out,
        num_sms=num_sms,
    )  # fmt: skip


def _weight(scales: Scales | None) -> Tensor | None:
    return None if scales is None else scales.weight
