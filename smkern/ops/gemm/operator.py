"""GEMM with an SM budget: the public operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smkern.ops.fp8 import gemm as fp8
from smkern.ops.gemm.call import LAUNCHED, Gemm, bind, check_gemm, problem_of, shapes_of
from smkern.ops.gemm.dispatch import gemm_dispatcher
from smkern.ops.operator import Operator, filled_by
from smkern.ops.operator_library import entry, register
from smkern.ops.reference import gemm as reference
from smkern.tuning.config import GemmProblem


def by_reference(call: Any) -> Tensor:
    """The reference on a checked call; into `out`, if it has one."""
    found: Tensor = reference.gemm(
        call.a, call.w, bias=call.bias, residual=call.residual, activation=call.activation,
        out=call.out, batch_invariant=bool(call.batch_invariant),
    )  # fmt: skip
    return found


GEMM: Operator[GemmProblem] = Operator(
    name="gemm",
    call=Gemm,
    check=check_gemm,
    shapes=shapes_of,
    problem=problem_of,
    reference=by_reference,
    dispatcher=gemm_dispatcher,
    vectors=("a", "w", "bias", "residual", "out"),
    in_place=(("out", "residual"),),
    arguments=LAUNCHED,
    unkeyed=("workspace",),
    prepare=bind,
    empty=filled_by(by_reference),
    kept_in_capture=False,  # a capture gets another kernel where the chosen one is not loaded
)
LIBRARY = register(GEMM)
_gemm = entry(GEMM)


def gemm(
    a: Tensor,
    w: Tensor,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    a_scale: Tensor | None = None,
    w_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    batch_invariant: bool = False,
    backend: str | None = None,
    static_weights: bool = False,
    check: bool = False,
    num_sms: int | None = None,
) -> Tensor:
    """out = act(a @ w.T + bias) + residual, on at most `num_sms` SMs.

    Accumulates in fp32 and rounds once. With scales, a and w are e4m3 and stand for a * a_scale and
    w * w_scale; tensor cores sum at most 128 products before fp32 takes over, so that errors do not
    grow with K: before the epilogue a product is within 2^-10 of the sum of its terms' magnitudes.
    CPU tensors run the reference in plain torch. There is no backward: the result requires no
    gradient, or one whose backward raises (torch.compile, modes).

    Args:
        a: [M, K], bf16 or fp16 (fp32 on CPU tensors), or e4m3 with scales; rows may be apart, the
            inner stride is 1.
        w: [N, K], same dtype and device, rows may be apart.
        bias: [N], added before the activation; the result's dtype.
        residual: [M, N], added after it; may be `out` itself.
        activation: None, "silu" or "gelu" (exact, by erf).
        a_scale: fp32 on the device, what an element of e4m3 `a` counts. One number or [M] (or
            [M, 1]), a scale a row, whatever `w_scale` then is; or [M, K / 128], one for 128
            columns, by rows or by columns without gaps, where `w_scale` is of blocks.
        w_scale: The same of `w`. One number or [N] (or [N, 1]), a scale a row; or
            [ceil(N / 128), K / 128], one for 128 x 128, with K a multiple of 128.
        out_dtype: With scales: bf16 (None) or fp16 (fp32 on CPU tensors).
        out: [M, N] to write into, rows may be apart; overlaps nothing but `residual`, whole.
        workspace: Device memory of `gemm_workspace_bytes` bytes, contiguous, zeroed before its
            first use; two launches that may overlap must not share it. None: the stream's own, or
            in a capture the graph's own.
        batch_invariant: A row's bits depend on that row alone, not on M nor the budget (CPU tensors
            are computed a row at a time for it).
        backend: None (tuned table, else cost model), "own" (never cuBLAS, nor an extra's), "model"
            (no table), or a kernel: "ws", "tma", "pointer", "cutlass", "cublaslt".
        static_weights: The promise that nothing in flight on this stream writes `w`: inside a
            partition the launch then fetches its first weights while the kernel before it still
            runs. It changes no result.
        check: With scales: read them, and refuse what is not finite or not above 0. It waits for
            the device.
        num_sms: SMs to use at most. None: all that the current stream's partition has. Below
            that, the grid alone confines.

    Returns:
        [M, N] in `a`'s dtype, with scales in `out_dtype`: `out`, if given.

    Raises:
        BudgetError: `num_sms` below 1, above the device or above the stream's partition; CPU
            tensors take any from 1, having no device to exceed.
        ArgumentError: sizes, dtypes, strides, devices or overlaps that cannot be served.
        DeviceError: the GPU is older than sm_80, or with scales than sm_89.
        PartitionError: the current stream's partition is closed.
        WarmupError: a graph capture met a kernel that is not loaded.

    Source: persistent tiles over a budget of SMs, Bullet (arXiv 2504.19516) section 2.2.1.

    Example:
        >>> import torch, smkern
        >>> a, w = torch.ones(3, 8).bfloat16(), torch.ones(2, 8).bfloat16()
        >>> smkern.gemm(a, w, num_sms=16).tolist()
        [[8.0, 8.0], [8.0, 8.0], [8.0, 8.0]]
    """
    if a_scale is not None or w_scale is not None or out_dtype is not None:
        fp8.given_scales(a_scale, w_scale)
        scaled: Tensor = fp8.scaled_gemm(
            a, w, a_scale, w_scale, bias, residual, activation, out_dtype, batch_invariant,
            backend, static_weights, check, out, workspace, num_sms,
        )  # fmt: skip
        return scaled
    found: Tensor = _gemm(
        a, w, bias, residual, activation, batch_invariant, backend, static_weights, out,
        workspace, num_sms,
    )  # fmt: skip
    return found
