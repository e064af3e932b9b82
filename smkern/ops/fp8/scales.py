"""Scales of e4m3 matrices: of which kind they are, and what they must be."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from smkern.errors import ArgumentError
from smkern.ops import checks
from smkern.ops.checks import FP8, FP8_BLOCK, check_steps

ScaleKind = Literal["row", "block"]
"""row: one number a matrix or a row, on either side; block: 1 x 128 of a, 128 x 128 of w."""


def check_e4m3(name: str, x: Any) -> None:
    """Raise ArgumentError unless x holds e4m3."""
    checks.check_kind(name, x)
    if x.dtype is not FP8:
        other = "e5m2 and other 8-bit formats are not served" if x.element_size() == 1 else ""
        raise ArgumentError(
            f"{name} is {x.dtype}, and scales are given: both matrices must be {FP8}; "
            f"{other or 'quantise it (smkern.quantize), or leave out the scales'}"
        )


def check_scale_pair(a: Tensor, w: Tensor, a_scale: Any, w_scale: Any, w_name: str = "w") -> None:
    """Raise ArgumentError unless scales are fp32 of one kind and of the matrices' sizes.

    Args:
        a: [M, K].
        w: [N, K] or [experts, N, K].
        a_scale: As given.
        w_scale: As given.
        w_name: What the caller knows w by.
    """
    for name, scale in (("a_scale", a_scale), ("w_scale", w_scale)):
        checks.check_kind(name, scale)
        if scale.dtype is not torch.float32:
            raise ArgumentError(f"{name} is {scale.dtype}, wanted torch.float32: convert it")
    k = a.shape[1]
    if kind_of(w, w_scale) == "row":
        _check_rows("a_scale", a_scale, tuple(a.shape[:1]), "a")
        _check_rows("w_scale", w_scale, tuple(w.shape[:-1]), w_name)
        return
    if k % FP8_BLOCK:
        raise ArgumentError(
            f"w_scale has shape {list(w_scale.shape)}, blocks of {FP8_BLOCK}, and K is {k}: block "
            f"scales want K to be a multiple of {FP8_BLOCK}; pad a and {w_name} with zeros"
        )
    wanted = block_shape(w)
    if tuple(w_scale.shape) != wanted or not _is_dense(w_scale):
        raise ArgumentError(
            f"w_scale has shape {list(w_scale.shape)} and strides {w_scale.stride()}, wanted "
            f"{list(wanted)} without gaps: one for {FP8_BLOCK} x {FP8_BLOCK} of {w_name}, or one "
            "for each of its rows"
        )
    check_block_scale("a_scale", a_scale, a.shape[0], k)


def check_block_scale(name: str, scale: Tensor, rows: int, columns: int) -> None:
    """Raise ArgumentError unless it is one for 128 columns of each row, by rows or by columns."""
    shape = (rows, columns // FP8_BLOCK)
    if tuple(scale.shape) != shape:
        raise ArgumentError(
            f"{name} has shape {list(scale.shape)}, wanted {list(shape)}: one for {FP8_BLOCK} "
            "columns of each row, as w's scales are of blocks"
        )
    steps = [step for size, step in zip(scale.shape, scale.stride(), strict=True) if size > 1]
    if scale.numel() and steps and min(steps) != 1:
        raise ArgumentError(
            f"{name} has strides {scale.stride()}: rows or columns must be without gaps; call "
            f"{name}.contiguous()"
        )
    check_steps(name, scale)


def kind_of(w: Tensor, w_scale: Tensor) -> ScaleKind:
    """Of which kind a weight's scales are; block where the shape says both."""
    if w_scale.dim() != w.dim() or w_scale.numel() == 1:
        return "row"
    if tuple(w_scale.shape) == block_shape(w):
        return "block"
    return "row" if w_scale.shape[-1] == 1 else "block"


def block_shape(w: Tensor) -> tuple[int, ...]:
    """Shape of a weight's block scales."""
    return (*w.shape[:-2], *(-(-size // FP8_BLOCK) for size in w.shape[-2:]))


def row_step(scale: Tensor) -> int:
    """Elements from a row's scale to the next: 0 where all rows share one."""
    return int(scale.numel() > 1)


def block_steps(scale: Tensor) -> tuple[int, int]:
    """Elements from a scale to the next row's and to the next block's."""
    return int(scale.stride(0)), int(scale.stride(1))


def check_values(call: Any) -> None:
    """`check=True`: raise ArgumentError for a scale that is not finite or not above 0."""
    for name in ("a_scale", "w_scale"):
        scale = getattr(call, name)
        bad = ~(scale.isfinite() & (scale > 0))
        if bool(bad.any()):
            at = [int(x) for x in bad.nonzero()[0]]
            raise ArgumentError(
                f"{name}{at or ''} is {float(scale[bad][0])}: scales are finite and above 0; find "
                "what was not finite before it was quantised"
            )


def _check_rows(name: str, scale: Tensor, rows: tuple[int, ...], of: str) -> None:
    """One number; one for each row, with or without a last 1; for experts one each too."""
    shapes = [rows, (*rows, 1), rows[:1], (*rows[:1], 1)]
    if scale.numel() != 1 and tuple(scale.shape) not in shapes:
        raise ArgumentError(
            f"{name} has shape {list(scale.shape)}, wanted one number or {list(rows)}: one for "
            f"each row of {of}"
        )
    if not _is_dense(scale):
        raise ArgumentError(
            f"{name} has strides {scale.stride()}: it must be without gaps; call "
            f"{name}.contiguous()"
        )


def _is_dense(scale: Tensor) -> bool:
    return scale.numel() <= 1 or scale.is_contiguous()
