"""DeepGEMM beside products of e4m3 by blocks, where it is installed (PyPI: sgl-deep-gemm).

It compiles a kernel for each number of SMs when it is first needed, some 3 s each.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from smkern.measure.timing import Call

if TYPE_CHECKING:
    from smkern.bench.fp8 import GemmOperands
    from smkern.bench.fp8_grouped import GroupedOperands

ROWS = 128
"""Multiples of rows that it wants of each expert."""


def sizes(num_sms: int) -> list[int]:
    """How many SMs it is told of: its partition's, and the device's.

    By the kernel that it chooses for 84 SMs 4,096 rows took 3 times as long: it is timed by both.
    """
    if not torch.cuda.is_available():
        return [num_sms]
    return sorted({num_sms, torch.cuda.get_device_properties(0).multi_processor_count})


def _prepared(a_scale: Tensor) -> tuple[Any, Tensor]:
    """The module, and scales of rows by columns, as its kernels read them."""
    layout = import_module("deep_gemm.utils.layout")
    return import_module("deep_gemm"), layout.get_mn_major_tma_aligned_tensor(a_scale)


def gemm_call(ops: GemmOperands, num_sms: int) -> Call:
    """`fp8_gemm_nt` on so many SMs; scales lie as it wants them before."""
    (a, a_scale), q, out = ops.a, ops.q, ops.out
    deep_gemm, scale = _prepared(a_scale)

    def call(i: int) -> None:
        deep_gemm.set_num_sms(num_sms)
        deep_gemm.fp8_gemm_nt((a, scale), q[i % len(q)], out, disable_ue8m0_cast=True)

    return call


def grouped_call(ops: GroupedOperands, num_sms: int) -> Call:
    """`m_grouped_fp8_gemm_nt_contiguous`, and smkern's `silu_and_mul` where it is gated.

    Raises:
        ValueError: an expert with rows that are no multiple of `ROWS`: it wants them padded.
    """
    import smkern

    case = ops.case
    if any(count % ROWS for count in case.counts):
        raise ValueError(f"DeepGEMM wants multiples of {ROWS} rows of an expert")
    (a, a_scale), q, out = ops.a, ops.q, ops.out
    deep_gemm, scale = _prepared(a_scale)
    experts = torch.arange(case.experts, device=out.device)
    counts = torch.tensor(case.counts, device=out.device)
    expert_of = experts.repeat_interleave(counts).int()
    product = out.new_empty(case.rows, case.columns) if case.swiglu else out

    def call(i: int) -> None:
        deep_gemm.set_num_sms(num_sms)
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
            (a, scale), q[i % len(q)], product, expert_of, disable_ue8m0_cast=True
        )
        if case.swiglu:
            smkern.silu_and_mul(product, out=out)

    return call
