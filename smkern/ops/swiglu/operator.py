"""GEMM with SwiGLU in its epilogue: the public operator."""

from __future__ import annotations

from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from smkern.ops import validate
from smkern.ops.swiglu import library
from smkern.ops.swiglu.eager import eager_swiglu

_PLAIN = frozenset({Tensor, Parameter, NoneType})
_is_compiling = torch.compiler.is_compiling
_num_modes = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack


def gemm_swiglu(
    a: Tensor,
    w_gate_up: Tensor,
    *,
    out: Tensor | None = None,
    workspace: Tensor | None = None,
    batch_invariant: bool = False,
    backend: str | None = None,
    static_weights: bool = False,
    num_sms: int | None = None,
) -> Tensor:
    """out = silu(a @ gate.T) * (a @ up.T), on at most `num_sms` SMs.

    silu(x) = x / (1 + exp(-x)). Both products are summed in fp32 and theirs is rounded once; where
    dispatch takes the plain GEMM followed by `silu_and_mul`, they are rounded before too. The
    weights lie as engines store them and are not repacked. CPU tensors run the reference in plain
    torch. There is no backward: the result never requires a gradient.

    Args:
        a: [M, K], bf16 or fp16; rows may be apart, the inner stride is 1.
        w_gate_up: [2 * I, K], the gate's I rows, then up's; same dtype and device.
        out: [M, I] to write into, rows may be apart; overlaps nothing.
        workspace: Device memory of `gemm_swiglu_workspace_bytes` bytes, contiguous, zeroed before
            its first use; two launches that may overlap must not share it. None: the stream's own,
            or in a capture the graph's own.
        batch_invariant: A row's bits depend on that row alone, not on M nor the budget.
        backend: None (tuned table, else cost model), "own" (fused, by our kernels), "model" (no
            table), "unfused" (the plain GEMM, then `silu_and_mul`), or a kernel's name.
        static_weights: The promise that nothing in flight on this stream writes `w_gate_up`: inside
            a partition the launch then fetches its first weights while the kernel before it still
            runs. It changes no result.
        num_sms: SMs to use at most. None: all that the current stream's partition has. Below
            that, the grid alone confines.

    Returns:
        [M, I] in `a`'s dtype: `out`, if given.

    Raises:
        BudgetError: `num_sms` below 1, above the device or above the stream's partition.
        ArgumentError: sizes, dtypes, strides, devices or overlaps that cannot be served.
        DeviceError: the GPU is older than sm_80.
        PartitionError: the current stream's partition is closed.
        WarmupError: a graph capture met a kernel that is not loaded.

    Source: GLU Variants Improve Transformer (arXiv 2002.05202), equation 6, without its biases.

    Example:
        >>> import torch, smkern
        >>> a = torch.ones(3, 8).bfloat16()
        >>> w_gate_up = torch.cat([torch.full((2, 8), 8.0), torch.ones(2, 8)]).bfloat16()
        >>> smkern.gemm_swiglu(a, w_gate_up, num_sms=16).tolist()
        [[512.0, 512.0], [512.0, 512.0], [512.0, 512.0]]
    """
    if (
        _is_compiling()
        or a.__class__ not in _PLAIN
        or w_gate_up.__class__ not in _PLAIN
        or out.__class__ not in _PLAIN
        or _num_modes()
        or _transform() is not None
    ):
        return _through_library(
            a, w_gate_up, out, workspace, batch_invariant, backend, static_weights, num_sms
        )
    if a is None or not a.is_cuda:
        return _on_host(
            a, w_gate_up, out, workspace, batch_invariant, backend, static_weights, num_sms
        )
    if w_gate_up is None:
        validate.check_matrix("w_gate_up", w_gate_up)
    return eager_swiglu(a.get_device())(
        a, w_gate_up, None, None, None, out, workspace, batch_invariant, backend, num_sms,
        static_weights,
    )  # fmt: skip


def _through_library(
    a: Any, w_gate_up: Any, out: Any, workspace: Any, batch_invariant: bool, backend: Any,
    static_weights: bool, num_sms: Any,
) -> Tensor:  # fmt: skip
    """By torch's dispatcher: under torch.compile, modes and transforms, for tensor subclasses."""
    if not torch.compiler.is_compiling():
        for name, x in {"a": a, "w_gate_up": w_gate_up, "out": out}.items():
            if not isinstance(x, Tensor) and not (name == "out" and x is None):
                validate.check_matrix(name, x)
    if out is None and workspace is None:
        return torch.ops.smkern.gemm_swiglu(
            a, w_gate_up, batch_invariant=batch_invariant, backend=backend,
            static_weights=static_weights, num_sms=num_sms,
        )  # fmt: skip
    if out is None:
        out = a.new_empty((a.shape[0], w_gate_up.shape[0] // 2))
    torch.ops.smkern.gemm_swiglu_out(
        a, w_gate_up, out, batch_invariant=batch_invariant, backend=backend,
        static_weights=static_weights, num_sms=num_sms, workspace=workspace,
    )  # fmt: skip
    return out


def _on_host(
    a: Any, w_gate_up: Any, out: Any, workspace: Any, batch_invariant: bool, backend: Any,
    static_weights: bool, num_sms: Any,
) -> Tensor:  # fmt: skip
    """CPU tensors run the reference; meta tensors only get shapes."""
    library.check_swiglu(a, w_gate_up, out, backend)
    if a.device.type != "cpu":
        return _through_library(
            a, w_gate_up, out, workspace, batch_invariant, backend, static_weights, num_sms
        )
    return library.gemm_swiglu_cpu(a, w_gate_up, out, backend, num_sms)
