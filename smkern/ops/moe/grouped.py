"""`grouped_gemm`: each expert's rows times its own weights."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from smkern.ops import checks
from smkern.ops.fp8 import grouped as fp8
from smkern.ops.moe.check import check_expert_weights, check_offsets, gpu_dtype, row_step, whole
from smkern.ops.operator import Operator, Shapes, call_class
from smkern.ops.operator_dispatch import OperatorDispatcher, load_dispatcher
from smkern.ops.operator_library import entry, register
from smkern.ops.reference import moe as reference
from smkern.tuning.grouped import GROUPED_FAMILY, GroupedConfig, GroupedProblem
from smkern.tuning.moe import VECTOR

Grouped = call_class(
    "Grouped", "Tensor a, Tensor w, Tensor expert_offsets, *, bool swiglu=False, bool check=False"
)


def _check(call: Any) -> None:
    a, w = call.a, call.w
    checks.check_rows("a", a, 2, "[rows, k]")
    checks.check_tensor("w", w, 3, "[experts, n, k]")
    checks.check_inner("w", w)
    checks.check_same("w", w, "a", a)
    check_expert_weights(call)


def _shapes(call: Any) -> Shapes:
    n = call.w.shape[1] // 2 if call.swiglu else call.w.shape[1]
    return (((call.a.shape[0], n), call.a.dtype),)


def _problem(call: Any, aligned: bool) -> GroupedProblem | None:
    dtype = gpu_dtype("a", call.a)
    ((rows, n), _), (experts, expert_rows, k) = _shapes(call)[0], call.w.shape
    if not rows:
        return None
    w_stride = call.w.stride(1) if expert_rows > 1 else row_step(call.w[0], k)
    expert_stride = call.w.stride(0) if experts > 1 else expert_rows * w_stride
    a_stride = row_step(call.a, k)
    out_stride = n if call.out is None else row_step(call.out, n)
    strides = (a_stride, w_stride, expert_stride, out_stride)
    is_whole = aligned and whole(k, call.a) and whole(n) and not any(x % VECTOR for x in strides)
    # one tensor map holds all experts' weights, if they follow each other; rows must not overlap
    one_matrix = expert_stride == expert_rows * w_stride and w_stride >= k and a_stride >= k
    return GroupedProblem(
        rows, experts, n, k, bool(call.swiglu), dtype, is_whole and one_matrix, *strides
    )


@cache
def grouped_dispatcher(index: int) -> OperatorDispatcher[GroupedProblem, GroupedConfig]:
    """The grouped GEMM's dispatcher of a device that is present."""
    from smkern.kernels.grouped_launch import GroupedKernels

    return load_dispatcher(index, GroupedKernels, GROUPED_FAMILY.selector)


GROUPED: Operator[GroupedProblem] = Operator(
    name="grouped_gemm",
    call=Grouped,
    check=_check,
    shapes=_shapes,
    problem=_problem,
    reference=lambda call: reference.grouped_gemm(
        call.a, call.w, call.expert_offsets, swiglu=bool(call.swiglu), batch_invariant=True
    ),
    dispatcher=grouped_dispatcher,
    vectors=("a", "w", "out"),
    unkeyed=("check",),
    check_memory=check_offsets,
)
LIBRARY = register(GROUPED)
_grouped = entry(GROUPED)


def grouped_gemm(
    a: Tensor,
    w: Tensor,
    expert_offsets: Tensor,
    *,
    a_scale: Tensor | None = None,
    w_scale: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    swiglu: bool = False,
    check: bool = False,
    out: Tensor | None = None,
    num_sms: int | None = None,
) -> Tensor:
    """Each expert's rows times its weights, on at most `num_sms` SMs; SwiGLU if wanted.

    Rows r of expert e are expert_offsets[e] <= r < expert_offsets[e + 1]; out[r] = a[r] @ w[e]^T,
    or with `swiglu` silu(a[r] @ gate^T) * (a[r] @ up^T), products in fp32, rounded once. Experts
    may have no rows or all of them: the tiles are found on the device. Rows of no expert hold
    nothing of meaning; offsets outside the rows are cut and read nothing outside. The configuration
    follows from the number of rows and the budget; with the same one a row's bits depend on the row
    and its expert alone. There is no backward.

    Args:
        a: [rows, k], bf16 or fp16 (fp32 on CPU tensors), or e4m3 with scales; rows may be apart.
        w: [experts, n, k], a's dtype, inner stride 1, at most 512 experts; with `swiglu` the first
            half of an expert's rows are the gate's, the rest the up rows. Fastest without gaps.
        expert_offsets: [experts + 1] int32 that never decrease, from `smkern.moe_permute`.
        a_scale: As in `smkern.gemm`.
        w_scale: As in `smkern.gemm`, for each expert: one number, [experts], [experts, n] (or
            [experts, n, 1]), or blocks [experts, ceil(n / 128), k / 128].
        out_dtype: As in `smkern.gemm`.
        swiglu: silu(gate) * up in the epilogue.
        check: Read the offsets, and refuse ones that do not begin at 0, decrease or exceed the
            rows; with scales, read those too, as in `smkern.gemm`. It waits for the device; not for
            captures.
        out: [rows, n], or [rows, n / 2] with `swiglu`, to write into; overlaps nothing else.
        num_sms: SMs to use at most. None: all that the current stream's partition has.

    Returns:
        [rows, n] in a's dtype (with scales in `out_dtype`), or [rows, n / 2] with `swiglu`: `out`,
        if given.

    Raises:
        As `smkern.gemm`.

    Source: MegaBlocks (arXiv 2211.15841) section 4, without padding; SwiGLU (arXiv 2002.05202).

    Example:
        >>> import torch, smkern
        >>> a, w = torch.ones(3, 2), torch.tensor([[[1.0, 0.0]], [[5.0, 5.0]], [[2.0, 0.0]]])
        >>> smkern.grouped_gemm(a, w, torch.tensor([0, 2, 2, 3]).int())[:, 0].tolist()
        [1.0, 1.0, 2.0]
    """
    if a_scale is not None or w_scale is not None or out_dtype is not None:
        fp8.given_scales(a_scale, w_scale)
        scaled: Tensor = fp8.scaled_grouped(
            a, w, a_scale, w_scale, expert_offsets, swiglu, out_dtype, check, out, num_sms
        )
        return scaled
    found: Tensor = _grouped(a, w, expert_offsets, swiglu, check, out, num_sms)
    return found
