"""Questions about a GEMM that launch nothing: which configuration and why, how much workspace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from smkern.errors import ArgumentError
from smkern.ops import checks
from smkern.ops.annotated import checked
from smkern.ops.explain import dispatcher_and_budget
from smkern.ops.fp8 import explain as fp8
from smkern.ops.gemm.checks import check_choices
from smkern.ops.gemm.dispatch import Dispatcher, Explanation, gemm_dispatcher, offline_dispatcher
from smkern.tuning.config import Budget, Confinement, Epilogue, GemmProblem
from smkern.tuning.fp8 import Scales
from smkern.tuning.fp8_rows import OutScale
from smkern.tuning.select import GEMM_FAMILY

if TYPE_CHECKING:
    from smkern.partition import Partition
    from smkern.profile import Profile


def _offline(profile: Profile) -> Dispatcher:
    return offline_dispatcher(profile, GEMM_FAMILY.load(profile))


def check_sizes(sizes: Mapping[str, int]) -> None:
    """Raise ArgumentError for a size below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ArgumentError(f"{name}={size}: sizes are at least 1, an empty GEMM runs nothing")


def explain_product(
    sizes: Mapping[str, int],
    epilogue: Epilogue,
    *,
    dtype: torch.dtype,
    scales: Scales,
    out_scale: OutScale | None = None,
    aligned: bool,
    batch_invariant: bool,
    backend: str | None,
    device: int | None,
    **place: Any,
) -> Explanation:
    """Which configuration a product takes; `sizes`: rows of a, columns of out and of a, by name."""
    if dtype is checks.FP8:
        check_sizes(sizes)
        return fp8.explain_scaled(
            tuple(sizes.values()), epilogue, scales=scales, out_scale=out_scale, aligned=aligned,
            batch_invariant=batch_invariant, backend=backend, device=device, **place,
        )  # fmt: skip
    if out_scale is not None:
        raise ArgumentError(f"out_scale={out_scale!r} of {dtype}: only e4m3's results have scales")
    dispatcher, budget = dispatcher_and_budget(device, gemm_dispatcher, _offline, **place)
    check_sizes(sizes)
    m, n, k = sizes.values()
    fits = aligned and n % 8 == 0 and k % 8 == 0
    rows_of_w = 2 * n if epilogue.swiglu else n
    name = checks.dtype_name(dtype)
    problem = GemmProblem(m, rows_of_w, k, name, epilogue, fits, batch_invariant)
    return dispatcher.explain(problem, budget, backend)


def largest_workspace(backend: str | None, explain: Callable[[bool], Explanation]) -> int:
    """The larger workspace of aligned and other operands; `explain` takes whether they are."""
    aligned_only = backend in ("tma", "ws", "cublaslt", "cutlass", "unfused")
    return max(explain(x).workspace_bytes for x in ([True] if aligned_only else [True, False]))


@checked
def explain_gemm(
    m: int,
    n: int,
    k: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    scales: Scales = "row",
    bias: bool = False,
    residual: bool = False,
    activation: str | None = None,
    aligned: bool = True,
    batch_invariant: bool = False,
    backend: str | None = None,
    num_sms: int | None = None,
    confined: Confinement | None = None,
    clusters: bool | None = None,
    partition: Partition | Budget | None = None,
    device: int | None = None,
) -> Explanation:
    """Which configuration `smkern.gemm` takes for a shape and budget, and where it comes from.

    On a machine with no GPU it answers for the GPU whose profile and tables are shipped.

    Args:
        m: Rows of a.
        n: Rows of w.
        k: Columns of both.
        dtype: torch.bfloat16 or torch.float16, or torch.float8_e4m3fn with scales.
        scales: Of e4m3, what one counts: "matrix" (all of a, all of w), "row" (a row of either),
            "mixed" (rows of one, all of the other), "block" (1 x 128 of a, 128 x 128 of w).
        bias: Whether a bias is added.
        residual: Whether a residual is added.
        activation: None, "silu" or "gelu".
        aligned: Whether all addresses and row pitches are multiples of 16 bytes.
        batch_invariant: As in `smkern.gemm`.
        backend: As in `smkern.gemm`.
        num_sms: As in `smkern.gemm`.
        confined: Imagine this confinement: "mask" (a partition of `num_sms`) or "grid". None: what
            the call would get on the current stream, where a `num_sms` below the stream's own is
            kept by the grid alone, which is another launch than in a partition of that size.
        clusters: Imagine that clusters can launch there, or not, as on the small sides of a ladder.
            None: they can, where `confined` is imagined of a `num_sms`.
        partition: Explain the call on this partition's stream, or in this budget, instead of the
            current stream's.
        device: Index of the GPU; None is the current one.

    Returns:
        An Explanation; `print` it for a sentence.

    Raises:
        BudgetError, ArgumentError: as `smkern.gemm` does.

    Example:
        >>> import smkern
        >>> why = smkern.explain_gemm(64, 6144, 4096, num_sms=32, confined="mask")
        >>> why.config.kernel in ("tma", "ws", "pointer", "cublaslt")
        True
    """
    check_choices(activation, backend)
    epilogue = Epilogue(bias, residual, activation)  # type: ignore[arg-type]
    return explain_product(
        {"m": m, "n": n, "k": k}, epilogue, dtype=dtype, scales=scales, aligned=aligned,
        batch_invariant=batch_invariant, backend=backend, num_sms=num_sms, confined=confined,
        clusters=clusters, partition=partition, device=device,
    )  # fmt: skip


@checked
def gemm_workspace_bytes(
    m: int,
    n: int,
    k: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    scales: Scales = "row",
    bias: bool = False,
    residual: bool = False,
    activation: str | None = None,
    batch_invariant: bool = False,
    backend: str | None = None,
    num_sms: int | None = None,
    device: int | None = None,
) -> int:
    """Bytes that `smkern.gemm(..., workspace=)` needs for this call, aligned or not; 0 is common.

    Take the largest over the shapes, budgets and kinds of scales that a workspace is to serve.
    Arguments, raises and the answer without a GPU are `explain_gemm`'s.

    Example:
        >>> import smkern
        >>> smkern.gemm_workspace_bytes(8192, 8192, 4096, num_sms=16) >= 0
        True
    """
    return largest_workspace(backend, lambda aligned: explain_gemm(
        m, n, k, dtype=dtype, scales=scales, bias=bias, residual=residual, activation=activation,
        aligned=aligned, batch_invariant=batch_invariant, backend=backend, num_sms=num_sms,
        device=device,
    ))  # fmt: skip
