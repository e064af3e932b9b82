"""Calls of products of e4m3 matrices: what they were given and what must hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smkern.errors import ArgumentError
from smkern.limits import shown
from smkern.ops.checks import FLOATS
from smkern.ops.fp8.scales import check_e4m3, check_scale_pair
from smkern.ops.gemm.checks import check_gated_product, check_product
from smkern.ops.operator import Shapes, call_class

ScaledGemm = call_class(
    "ScaledGemm",
    "Tensor a, Tensor w, Tensor a_scale, Tensor w_scale, *, Tensor? bias=None, "
    "Tensor? residual=None, str? activation=None, ScalarType? out_dtype=None, "
    "bool batch_invariant=False, str? backend=None, bool static_weights=False, bool check=False",
    workspace=True,
)
ScaledSwiglu = call_class(
    "ScaledSwiglu",
    "Tensor a, Tensor w_gate_up, Tensor a_scale, Tensor w_scale, *, ScalarType? out_dtype=None, "
    "bool batch_invariant=False, str? backend=None, bool static_weights=False, bool check=False",
    workspace=True,
)
QuantizedSwiglu = call_class(
    "QuantizedSwiglu",
    "Tensor a, Tensor w_gate_up, Tensor a_scale, Tensor w_scale, Tensor(a!) out_scale, *, "
    "Tensor(b!)? gate_up=None, bool batch_invariant=False, str? backend=None, "
    "bool static_weights=False, bool check=False",
    workspace=True,
)
ScaledGrouped = call_class(
    "ScaledGrouped",
    "Tensor a, Tensor w, Tensor a_scale, Tensor w_scale, Tensor expert_offsets, *, "
    "bool swiglu=False, ScalarType? out_dtype=None, bool check=False",
)


def given_scales(a_scale: Any, w_scale: Any) -> None:
    """Raise ArgumentError where only one of the scales is given, or none."""
    for name, x in (("a_scale", a_scale), ("w_scale", w_scale)):
        if x is None:
            raise ArgumentError(
                f"{name} is None, and out_dtype, out_scale or the other scale is given: pass both "
                "scales of e4m3 matrices (smkern.quantize makes them), or none of these"
            )


def check_gemm(call: Any) -> None:
    """Raise ArgumentError for a GEMM that cannot be served."""
    check_e4m3("a", call.a)
    check_e4m3("w", call.w)
    check_product(call)
    check_scale_pair(call.a, call.w, call.a_scale, call.w_scale)
    check_out_dtype(call, {"bias": call.bias, "residual": call.residual})


def check_swiglu(call: Any) -> None:
    """Raise ArgumentError for a product that cannot be served."""
    check_gated(call)
    check_out_dtype(call, {})


def check_gated(call: Any) -> None:
    """Raise ArgumentError for matrices or scales that cannot be multiplied and gated."""
    check_e4m3("a", call.a)
    check_e4m3("w_gate_up", call.w_gate_up)
    check_gated_product(call)
    check_scale_pair(call.a, call.w_gate_up, call.a_scale, call.w_scale, "w_gate_up")


def check_out_dtype(call: Any, others: dict[str, Tensor | None]) -> None:
    """Raise ArgumentError unless bias, residual and out are of the result's dtype."""
    wanted = out_dtype_of(call)
    if not (isinstance(wanted, torch.dtype) and wanted in FLOATS):
        raise ArgumentError(
            f"out_dtype is {shown(wanted)}: use torch.bfloat16 or torch.float16 (torch.float32 on "
            "CPU tensors)"
        )
    for name, x in others.items():
        if x is not None and x.dtype is not wanted:
            raise ArgumentError(f"{name} is {x.dtype}, the result {wanted}: convert {name}")


def out_dtype_of(call: Any) -> torch.dtype:
    """The result's dtype: asked for, or `out`'s, else bf16."""
    if call.out_dtype is not None:
        found: torch.dtype = call.out_dtype
        return found
    return call.out.dtype if isinstance(call.out, Tensor) else torch.bfloat16


def gemm_shapes(call: Any) -> Shapes:
    """Shape and dtype of a checked call's result."""
    return (((call.a.shape[0], call.w.shape[0]), out_dtype_of(call)),)


def swiglu_shapes(call: Any) -> Shapes:
    """Shape and dtype of a checked call's result."""
    return (((call.a.shape[0], call.w_gate_up.shape[0] // 2), out_dtype_of(call)),)
