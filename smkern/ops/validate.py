"""What a GEMM call must satisfy; every message gives the value, the limit and the remedy.

The checks here depend on sizes, strides, dtypes and devices only, so they run once for each
combination. What depends on addresses (alignment, overlap) is in `aliasing.py` and runs each time.
"""

from __future__ import annotations

import operator
from typing import Any, get_args

import torch
from torch import Tensor

from smkern.errors import ArgumentError, BudgetError, DeviceError
from smkern.tuning.config import Activation, Budget, Dtype, Kernel

ACTIVATIONS = get_args(Activation)
BACKENDS = (*get_args(Kernel), "own", "model")
"""`backend=` choices: one kernel; "own" (no cuBLAS); "model" (no tuned table)."""

MIN_CAPABILITY = (8, 0)
MAX_SIZE = 2**31 - 1


def dtype_name(dtype: torch.dtype) -> Dtype:
    """The name by which configs and tables know a torch dtype.

    Raises:
        ArgumentError: for a dtype that no GEMM here takes.
    """
    if dtype is torch.bfloat16:
        return "bf16"
    if dtype is torch.float16:
        return "fp16"
    if dtype is torch.float32:
        return "fp32"
    raise ArgumentError(
        f"dtype {dtype} is not supported: use torch.bfloat16 or torch.float16 "
        "(torch.float32 on CPU tensors only)"
    )


def check_choices(activation: Any, backend: Any) -> None:
    """Raise ArgumentError for an activation or a backend that does not exist."""
    if activation is not None and activation not in ACTIVATIONS:
        raise ArgumentError(f"activation={activation!r}: use None or one of {list(ACTIVATIONS)}")
    if backend is not None and backend not in BACKENDS:
        raise ArgumentError(f"backend={backend!r}: use None or one of {list(BACKENDS)}")


def check_not_yet(a_scale: Any, w_scale: Any, out_dtype: Any) -> None:
    """Raise ArgumentError for the arguments that are reserved for fp8."""
    reserved = {"a_scale": a_scale, "w_scale": w_scale, "out_dtype": out_dtype}
    for name, value in reserved.items():
        if value is not None:
            raise ArgumentError(f"{name}: fp8 GEMM is not there yet; leave {name} at None")


def check_matrix(name: str, x: Any, rows: int | None = None, cols: int | None = None) -> None:
    """Raise ArgumentError unless x is a strided [rows, cols] tensor with inner stride 1."""
    if not isinstance(x, Tensor):
        raise ArgumentError(f"{name} is {type(x).__name__}, not a torch.Tensor")
    if x.layout is not torch.strided or x.dim() != 2:
        raise ArgumentError(
            f"{name} has shape {list(x.shape)} ({x.layout}): a dense matrix of two dimensions is "
            "wanted; flatten leading dimensions first"
        )
    if (rows is not None and x.shape[0] != rows) or (cols is not None and x.shape[1] != cols):
        wanted = ["any" if size is None else str(size) for size in (rows, cols)]
        raise ArgumentError(
            f"{name} has shape {list(x.shape)}, wanted [{', '.join(wanted)}] "
            "(a [M, K], w [N, K], bias [N], residual and out [M, N])"
        )
    if max(x.shape) > MAX_SIZE:
        raise ArgumentError(f"{name} has shape {list(x.shape)}, the largest size is {MAX_SIZE}")
    if x.shape[1] > 1 and x.stride(1) != 1 and x.numel() > 0:
        raise ArgumentError(
            f"{name} has strides {x.stride()}: the inner stride must be 1 (row-major, rows may be "
            f"apart); call {name}.contiguous()"
        )
    if x.shape[0] > 1 and x.stride(0) > MAX_SIZE:
        raise ArgumentError(
            f"{name} has a row stride of {x.stride(0)} elements, the largest is {MAX_SIZE}: call "
            f"{name}.contiguous()"
        )


def check_bias(bias: Any, n: int) -> None:
    """Raise ArgumentError unless bias is a dense vector [n]."""
    if not isinstance(bias, Tensor):
        raise ArgumentError(f"bias is {type(bias).__name__}, not a torch.Tensor")
    if bias.shape != (n,):
        raise ArgumentError(f"bias has shape {list(bias.shape)}, wanted [{n}], w's rows")
    if n > 1 and bias.stride(0) != 1:
        raise ArgumentError(f"bias has stride {bias.stride(0)}, wanted 1: call bias.contiguous()")


def check_writable(out: Tensor) -> None:
    """Raise ArgumentError where two elements of out share an address."""
    rows, cols = out.shape
    if rows > 1 and out.stride(0) < cols:
        raise ArgumentError(
            f"out has row stride {out.stride(0)} and {cols} columns: its rows overlap; "
            "pass a tensor whose row stride is at least its width"
        )


def check_same(a: Tensor, others: dict[str, Tensor | None]) -> None:
    """Raise ArgumentError unless every tensor has a's dtype and device."""
    for name, x in others.items():
        if x is None:
            continue
        if x.dtype is not a.dtype:
            raise ArgumentError(f"{name} is {x.dtype}, a is {a.dtype}: convert {name} to {a.dtype}")
        if x.device != a.device:
            raise ArgumentError(f"{name} is on {x.device}, a on {a.device}: move {name} there")


def check_tensors(
    a: Any, w: Any, bias: Any, residual: Any, out: Any, activation: Any, backend: Any
) -> tuple[int, int, int]:
    """Check everything about the tensors but their addresses.

    Returns:
        (M, N, K).

    Raises:
        ArgumentError: naming the argument, its value, what is wanted and what to do.
    """
    check_choices(activation, backend)
    check_matrix("a", a)
    m, k = a.shape
    check_matrix("w", w, None, k)
    n = w.shape[0]
    if residual is not None:
        check_matrix("residual", residual, m, n)
    if out is not None:
        check_matrix("out", out, m, n)
        check_writable(out)
    if bias is not None:
        check_bias(bias, n)
    dtype_name(a.dtype)
    check_same(a, {"w": w, "bias": bias, "residual": residual, "out": out})
    return m, n, k


def check_capability(device: torch.device, capability: tuple[int, int]) -> None:
    """Raise DeviceError for a GPU that is older than the kernels can be."""
    if capability < MIN_CAPABILITY:
        major, minor = capability
        raise DeviceError(
            f"{device} has compute capability {major}.{minor}, smkern needs 8.0 or later: use a "
            "newer GPU, or CPU tensors for the reference"
        )


def check_cuda(a: Tensor, capability: tuple[int, int]) -> None:
    """Raise unless the GPU kernels can take a's dtype on a device of this capability."""
    check_capability(a.device, capability)
    if a.dtype is torch.float32:
        raise ArgumentError("dtype torch.float32 on a GPU: use torch.bfloat16 or torch.float16")


def as_num_sms(num_sms: Any) -> int:
    """`num_sms` as an int; BudgetError for anything that is no whole number of at least 1."""
    try:
        count = operator.index(num_sms)
    except TypeError:
        raise BudgetError(
            f"num_sms={num_sms!r} is no whole number: pass an int, or None for the stream's own"
        ) from None
    if isinstance(num_sms, bool) or count < 1:
        raise BudgetError(
            f"num_sms={num_sms!r}: a budget is at least 1 SM; pass None for all that the stream has"
        )
    return count


def resolve_budget(num_sms: Any, stream: Budget, device_sms: int) -> Budget:
    """The budget of a call: what it asks for, within what its stream has.

    Args:
        num_sms: The argument; None takes all that the stream has.
        stream: What the stream has.
        device_sms: SMs of the device.

    Returns:
        The stream's own budget, or a smaller one that only the grid confines.

    Raises:
        BudgetError: below 1, above the device, or above the stream's partition.
    """
    if num_sms is None:
        return stream
    count = as_num_sms(num_sms)
    if count > device_sms:
        raise BudgetError(
            f"num_sms={count} is above the device's {device_sms} SMs: pass at most {device_sms}"
        )
    if count > stream.num_sms:
        raise BudgetError(
            f"num_sms={count} is above the {stream.num_sms} SMs of the stream's partition: pass at "
            f"most {stream.num_sms}, or launch on a stream that has more"
        )
    if count == stream.num_sms:
        return stream
    return Budget(count, "grid", stream.clusters)
