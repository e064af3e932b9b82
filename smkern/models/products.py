"""What a decoder's products multiply: rows of the model's dtype, or e4m3 with both scales."""

from __future__ import annotations

from torch import Tensor

from smkern import ops
from smkern.models.activations import QuantizedRows, StepBuffers
from smkern.models.layers import FP8, Scales

Operand = tuple[Tensor, Tensor | None, Tensor | None]
"""Rows, their scales and the weight's, as `smkern.gemm` takes them; None of rows that are in the
model's dtype."""


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
        return into.values, into.scale, scales.weight
    ops.rms_norm(b.hidden, weight, eps=eps, out=b.normed, num_sms=num_sms)
    return quantized(b.normed, scales, b.fp8.hidden, num_sms)


def attended(scales: Scales | None, b: StepBuffers, num_sms: int | None) -> Operand:
    """What attention wrote as the output product reads it."""
    scale = attended_scale(b)
    if scale is None:
        return quantized(b.attended_rows, scales, b.fp8.attended, num_sms)
    assert scales is not None
    return b.attended_rows, scale, scales.weight


def attended_scale(b: StepBuffers) -> Tensor | None:
    """Where attention writes its scales; None where it writes the model's dtype."""
    if b.attended.dtype is not FP8:
        return None
    assert b.fp8.attended is not None
    return b.fp8.attended.scale


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
        return x, None, None
    assert into is not None
    if scales.input is not None:
        static = scales.input
        ops.quantize(x, "tensor", scale=static, out=(into.values, static), num_sms=num_sms)
        return into.values, static, scales.weight
    kind = "token" if into.scale.dim() == 1 else "block"
    ops.quantize(x, kind, out=(into.values, into.scale), num_sms=num_sms)
    return into.values, into.scale, scales.weight
