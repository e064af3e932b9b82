"""GEMM with an SM budget: the public operator."""

from __future__ import annotations

from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from smkern.ops import validate
from smkern.ops.gemm import library
from smkern.ops.gemm.eager import eager_gemm

_PLAIN = frozenset({Tensor, Parameter, NoneType})
_is_compiling = torch.compiler.is_compiling
_num_modes = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack


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
    num_sms: int | None = None,
) -> Tensor:
    """out = act(a @ w.T + bias) + residual, on at most `num_sms` SMs.

    Accumulates in fp32 and rounds once. CPU tensors run the reference in plain torch. There is no
    backward: the result never requires a gradient.

    Args:
        a: [M, K], bf16 or fp16; rows may be apart, the inner stride is 1.
        w: [N, K], same dtype and device, rows may be apart.
        bias: [N], added before the activation.
        residual: [M, N], added after it; may be `out` itself.
        activation: None, "silu" or "gelu" (exact, by erf).
        a_scale: Reserved for fp8; None.
        w_scale: Reserved for fp8; None.
        out_dtype: Reserved for fp8; None.
        out: [M, N] to write into, rows may be apart; overlaps nothing but `residual`, whole.
        workspace: Device memory of `gemm_workspace_bytes` bytes, contiguous, zeroed before its
            first use; two launches that may overlap must not share it. None: the stream's own, or
            in a capture the graph's own.
        batch_invariant: A row's bits depend on that row alone, not on M nor the budget.
        backend: None (tuned table, else cost model), "own" (never cuBLAS), "model" (no table), or
            a kernel's name.
        static_weights: The promise that nothing in flight on this stream writes `w`: inside a
            partition the launch then fetches its first weights while the kernel before it still
            runs. It changes no result.
        num_sms: SMs to use at most. None: all that the current stream's partition has. Below
            that, the grid alone confines.

    Returns:
        [M, N] in `a`'s dtype: `out`, if given.

    Raises:
        BudgetError: `num_sms` below 1, above the device or above the stream's partition.
        ArgumentError: sizes, dtypes, strides, devices or overlaps that cannot be served.
        DeviceError: the GPU is older than sm_80.
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
        validate.check_not_yet(a_scale, w_scale, out_dtype)
    if (
        _is_compiling()
        or a.__class__ not in _PLAIN
        or w.__class__ not in _PLAIN
        or out.__class__ not in _PLAIN
        or bias.__class__ not in _PLAIN
        or residual.__class__ not in _PLAIN
        or _num_modes()
        or _transform() is not None
    ):
        return _through_library(
            a, w, bias, residual, activation, out, workspace, batch_invariant, backend, num_sms,
            static_weights,
        )  # fmt: skip
    if a is None or not a.is_cuda:
        return _on_host(
            a, w, bias, residual, activation, out, workspace, batch_invariant, backend, num_sms,
            static_weights,
        )  # fmt: skip
    if w is None:
        validate.check_matrix("w", w)
    return eager_gemm(a.get_device())(
        a, w, bias, residual, activation, out, workspace, batch_invariant, backend, num_sms,
        static_weights,
    )  # fmt: skip


def _through_library(
    a: Any, w: Any, bias: Any, residual: Any, activation: Any, out: Any, workspace: Any,
    batch_invariant: bool, backend: Any, num_sms: Any, static_weights: bool,
) -> Tensor:  # fmt: skip
    """By torch's dispatcher: under torch.compile, modes and transforms, for tensor subclasses."""
    if not torch.compiler.is_compiling():
        named = {"a": a, "w": w, "bias": bias, "residual": residual, "out": out}
        for name, x in named.items():
            optional = name in ("bias", "residual", "out")
            if not isinstance(x, Tensor) and not (optional and x is None):
                validate.check_matrix(name, x)
    if out is None and workspace is None:
        return torch.ops.smkern.gemm(
            a, w, bias=bias, residual=residual, activation=activation,
            batch_invariant=batch_invariant, backend=backend, static_weights=static_weights,
            num_sms=num_sms,
        )  # fmt: skip
    if out is None:
        out = a.new_empty((a.shape[0], w.shape[0]))
    torch.ops.smkern.gemm_out(
        a, w, out, bias=bias, residual=residual, activation=activation,
        batch_invariant=batch_invariant, backend=backend, static_weights=static_weights,
        num_sms=num_sms, workspace=workspace,
    )  # fmt: skip
    return out


def _on_host(
    a: Any, w: Any, bias: Any, residual: Any, activation: Any, out: Any, workspace: Any,
    batch_invariant: bool, backend: Any, num_sms: Any, static_weights: bool,
) -> Tensor:  # fmt: skip
    """CPU tensors run the reference; meta tensors only get shapes."""
    validate.check_tensors(a, w, bias, residual, out, activation, backend)
    if a.device.type != "cpu":
        return _through_library(
            a, w, bias, residual, activation, out, workspace, batch_invariant, backend, num_sms,
            static_weights,
        )  # fmt: skip
    return library.gemm_cpu(
        a, w, bias, residual, activation, batch_invariant, backend, num_sms, out, workspace
    )
