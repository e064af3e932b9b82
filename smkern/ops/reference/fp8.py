"""e4m3 with scales in plain torch: values times scales, and values to e4m3."""

from __future__ import annotations

import torch
from torch import Tensor

from smkern.limits import FP8_BLOCK, FP8_MAX, FP8_NEGLIGIBLE


def dequantize(q: Tensor, scale: Tensor, compute_dtype: torch.dtype = torch.float32) -> Tensor:
    """The values that e4m3 elements and their scales stand for.

    Args:
        q: [..., rows, columns].
        scale: One number; one a matrix or a row, each with or without a last dimension of 1; or
            one for 128 columns of a row or of 128 rows.
        compute_dtype: Dtype of the result.
    """
    return q.to(compute_dtype) * expand_scale(scale, q.shape).to(compute_dtype)


def expand_scale(scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A scale in a shape that multiplies a matrix [..., rows, columns] of elements."""
    rows, columns = shape[-2:]
    blocks = -(-columns // FP8_BLOCK)
    if scale.numel() == 1:
        return scale.reshape(())
    high = (rows, -(-rows // FP8_BLOCK))
    if scale.dim() == len(shape) and scale.shape[-1] == blocks and scale.shape[-2] in high:
        wide = scale.repeat_interleave(FP8_BLOCK, -1)[..., :columns]
        if scale.shape[-2] == rows:
            return wide
        return wide.repeat_interleave(FP8_BLOCK, -2)[..., :rows, :]
    matrices = shape[:-2]
    if matrices and scale.numel() == matrices[0]:
        return scale.reshape(*matrices, 1, 1)
    return scale.reshape(*shape[:-1], 1)


def quantize(x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """A matrix in e4m3 with the scales of a kind; see `smkern.quantize`.

    Args:
        x: [rows, columns], any floating dtype.
        kind: "tensor", "token", "block" or "weight_block".
    """
    rows, columns = x.shape
    wide = x.float()
    if kind == "weight_block":
        high = -(-rows // FP8_BLOCK)
        grid = wide.new_zeros(high * FP8_BLOCK, columns)
        grid[:rows] = wide
        tiles = grid.view(high, FP8_BLOCK, columns // FP8_BLOCK, FP8_BLOCK)
        scale = scale_of(tiles.abs().amax((1, 3)))
    elif kind == "block":
        scale = scale_of(wide.view(rows, columns // FP8_BLOCK, FP8_BLOCK).abs().amax(2))
    elif kind == "token":
        scale = scale_of(wide.abs().amax(1) if columns else wide.new_zeros(rows))
    else:
        scale = scale_of(wide.abs().max().view(1) if x.numel() else wide.new_zeros(1))
    return quantize_by(x, scale), scale


def quantize_by(x: Tensor, scale: Tensor) -> Tensor:
    """A matrix in e4m3 by given scales: the nearest, ties to even, at most 448 either way."""
    wide = x.float() * expand_scale(1.0 / scale, x.shape)
    return wide.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def scale_of(most: Tensor) -> Tensor:
    """Scales of groups by their largest magnitudes: NaN if not finite, 1 if negligible."""
    scale = torch.where(most < FP8_NEGLIGIBLE, 1.0, most / FP8_MAX)
    return scale.masked_fill(~most.isfinite(), float("nan"))
