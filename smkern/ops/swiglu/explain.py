"""Questions about a GEMM with SwiGLU that launch nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from smkern.ops.annotated import checked
from smkern.ops.gemm.checks import check_choices
from smkern.ops.gemm.dispatch import Explanation
from smkern.ops.gemm.explain import explain_product, largest_workspace
from smkern.ops.swiglu.operator import EPILOGUE
from smkern.tuning.config import Budget, Confinement
from smkern.tuning.fp8 import Scales
from smkern.tuning.fp8_rows import OutScale

if TYPE_CHECKING:
    from smkern.partition import Partition


@checked
def explain_gemm_swiglu(
    m: int,
    inner: int,
    k: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    scales: Scales = "row",
    out_scale: OutScale | None = None,
    aligned: bool = True,
    batch_invariant: bool = False,
    backend: str | None = None,
    num_sms: int | None = None,
    confined: Confinement | None = None,
    clusters: bool | None = None,
    partition: Partition | Budget | None = None,
    device: int | None = None,
) -> Explanation:
    """Which configuration `smkern.gemm_swiglu` takes for a shape and budget, and where from.

    On a machine with no GPU it answers for the GPU whose profile and tables are shipped.

    Args:
        m: Rows of a.
        inner: I, half the rows of w_gate_up.
        k: Columns of both.
        dtype: torch.bfloat16 or torch.float16, or torch.float8_e4m3fn with scales: then it is the
            product of gate and up that is explained, but where one kernel does all.
        scales: Of e4m3, as in `smkern.explain_gemm`.
        out_scale: Of e4m3, what shares a scale of the results, "token" or "block" as in
            `smkern.quantize`. None: results are not quantized.
        aligned: Whether all addresses and row pitches are multiples of 16 bytes.
        batch_invariant: As in `smkern.gemm_swiglu`.
        backend: As in `smkern.gemm_swiglu`.
        num_sms: As in `smkern.gemm_swiglu`.
        confined: As in `smkern.explain_gemm`.
        clusters: As in `smkern.explain_gemm`.
        partition: As in `smkern.explain_gemm`.
        device: Index of the GPU; None is the current one.

    Returns:
        An Explanation, its `problem.n` twice `inner`; `print` it for a sentence.

    Raises:
        BudgetError, ArgumentError: as `smkern.gemm_swiglu` does.

    Example:
        >>> import smkern
        >>> why = smkern.explain_gemm_swiglu(64, 14336, 4096, num_sms=32, confined="mask")
        >>> why.config.kernel in ("tma", "ws", "pointer", "unfused")
        True
    """
    check_choices(None, backend)
    return explain_product(
        {"m": m, "inner": inner, "k": k}, EPILOGUE, dtype=dtype, scales=scales,
        out_scale=out_scale, aligned=aligned, batch_invariant=batch_invariant, backend=backend,
        num_sms=num_sms, confined=confined, clusters=clusters, partition=partition, device=device,
    )  # fmt: skip


@checked
def gemm_swiglu_workspace_bytes(
    m: int,
    inner: int,
    k: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    scales: Scales = "row",
    out_scale: OutScale | None = None,
    batch_invariant: bool = False,
    backend: str | None = None,
    num_sms: int | None = None,
    device: int | None = None,
) -> int:
    """Bytes that `smkern.gemm_swiglu(..., workspace=)` needs for this call; 0 is common.

    Take the largest over the shapes and budgets that a workspace is to serve. Arguments, raises
    and the answer without a GPU are `explain_gemm_swiglu`'s; tensors may be aligned or not.

    Example:
        >>> import smkern
        >>> smkern.gemm_swiglu_workspace_bytes(64, 14336, 4096, num_sms=16) >= 0
        True
    """
    return largest_workspace(backend, lambda aligned: explain_gemm_swiglu(
        m, inner, k, dtype=dtype, scales=scales, out_scale=out_scale, aligned=aligned,
        batch_invariant=batch_invariant, backend=backend, num_sms=num_sms, device=device,
    ))  # fmt: skip
