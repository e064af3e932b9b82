"""Checks of single arguments; messages give the value, the limit and the remedy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smkern.device import Budget
from smkern.errors import ArgumentError, BudgetError, DeviceError
from smkern.limits import FP8_BLOCK as FP8_BLOCK
from smkern.limits import HEAD_DIMS as HEAD_DIMS
from smkern.limits import MAX_FLOAT as MAX_FLOAT
from smkern.limits import MAX_REQUESTS, as_index, shown
from smkern.limits import MAX_SIZE as MAX_SIZE
from smkern.limits import PAGE_SIZES as PAGE_SIZES
from smkern.limits import as_flag as as_flag
from smkern.limits import as_float as as_float
from smkern.limits import as_int as as_int
from smkern.tuning.config import Dtype

FP8 = torch.float8_e4m3fn
FLOATS: dict[torch.dtype, Dtype] = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32",
}  # fmt: skip
NAMES: dict[torch.dtype, Any] = FLOATS | {FP8: "fp8"}
"""Names by which problems, configs and tables know dtypes."""
DTYPES = {name: dtype for dtype, name in NAMES.items()}
MIN_CAPABILITY = (8, 0)
MAX_WINDOW = 2**30
"""Kernels subtract a window from positions in 32 bits; no cache has as many tokens."""


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raise ArgumentError unless a value is None or one of these names."""
    if value is not None and not (isinstance(value, str) and value in choices):
        raise ArgumentError(f"{name}={shown(value)}: use None or one of {list(choices)}")


def check_kind(name: str, x: Any) -> None:
    """Raise ArgumentError unless x is a dense tensor."""
    if not isinstance(x, Tensor):
        raise ArgumentError(f"{name} is {type(x).__name__}, not a torch.Tensor: pass a tensor")
    if x.is_nested or x.layout is not torch.strided:
        kind = "nested" if x.is_nested else str(x.layout)
        raise ArgumentError(f"{name} is a {kind} tensor: pass a dense one of all its elements")


def check_tensor(name: str, x: Any, dims: int, layout: str) -> Tensor:
    """Raise ArgumentError unless x is a strided tensor of so many dimensions."""
    check_kind(name, x)
    if x.dim() != dims:
        raise ArgumentError(
            f"{name} has shape {list(x.shape)}, wanted {layout}: pass a tensor of {dims} dimensions"
        )
    if x.numel() and max(x.shape) > MAX_SIZE:
        raise ArgumentError(f"{name} has shape {list(x.shape)}, the largest size is {MAX_SIZE}")
    return x


def check_inner(name: str, x: Tensor) -> None:
    """Raise ArgumentError unless the inner stride is 1."""
    if x.shape[-1] > 1 and x.stride(-1) != 1 and x.numel():
        raise ArgumentError(
            f"{name} has strides {x.stride()}: the inner stride must be 1; call {name}.contiguous()"
        )


def check_steps(name: str, x: Tensor) -> None:
    """Raise ArgumentError where rows are too far apart: kernels take the step in 32 bits."""
    step = max(
        (step for size, step in zip(x.shape, x.stride(), strict=True) if size > 1), default=0
    )
    if step > MAX_SIZE:
        raise ArgumentError(
            f"{name} has a row stride of {step} elements, the largest is {MAX_SIZE}: call "
            f"{name}.contiguous()"
        )


def check_rows(name: str, x: Any, dims: int, layout: str) -> None:
    """Raise ArgumentError unless x is a tensor of activations: rows may be apart."""
    check_tensor(name, x, dims, layout)
    check_inner(name, x)
    check_float(name, x)


def check_float(name: str, x: Tensor) -> None:
    """Raise ArgumentError unless x is of a dtype that activations have."""
    if x.dtype not in FLOATS:
        raise ArgumentError(
            f"{name} is {x.dtype}: use torch.bfloat16 or torch.float16 (torch.float32 on CPU "
            "tensors)"
        )


def check_same(name: str, x: Tensor, of: str, y: Tensor) -> None:
    """Raise ArgumentError unless x has y's dtype."""
    if x.dtype is not y.dtype:
        raise ArgumentError(f"{name} is {x.dtype}, {of} is {y.dtype}: convert {name}")


def check_sums(name: str, x: Any, shape: torch.Size, layout: str) -> None:
    """Raise ArgumentError unless x is fp32 of a shape, without gaps: log-sum-exps."""
    check_tensor(name, x, len(shape), layout)
    if x.shape != shape or x.dtype is not torch.float32 or not x.is_contiguous():
        raise ArgumentError(
            f"{name} is {list(x.shape)} {x.dtype} with strides {x.stride()}: wanted {list(shape)} "
            "torch.float32, contiguous"
        )


def check_device(name: str, x: Tensor, device: torch.device, of: str) -> None:
    """Raise ArgumentError unless x is on a device."""
    if x.device != device:
        raise ArgumentError(f"{name} is on {x.device}, {of} on {device}: move {name} there")


def check_vector(name: str, x: Any, count: int | None, dtype: torch.dtype, layout: str) -> int:
    """The length of a dense vector of a dtype; ArgumentError unless it is `count`."""
    check_tensor(name, x, 1, layout)
    if count is not None and x.shape[0] != count:
        raise ArgumentError(
            f"{name} has shape {list(x.shape)}, wanted [{count}] ({layout}): pass one of that size"
        )
    if x.dtype is not dtype:
        raise ArgumentError(f"{name} is {x.dtype}, wanted {dtype}: convert it by .to({dtype})")
    check_inner(name, x)
    return int(x.shape[0])


def check_lengths(kv_lens: Any, cu_q_lens: Any) -> int:
    """The batch that kv_lens and cu_q_lens tell of; ArgumentError where they cannot be."""
    batch = check_vector("kv_lens", kv_lens, None, torch.int32, "[batch]")
    if cu_q_lens is not None:
        check_vector("cu_q_lens", cu_q_lens, batch + 1, torch.int32, "[batch + 1]")
        check_device("cu_q_lens", cu_q_lens, kv_lens.device, "kv_lens")
    return batch


def check_requests(batch: int) -> None:
    """Raise ArgumentError for more requests than a plan holds."""
    if batch > MAX_REQUESTS:
        raise ArgumentError(
            f"kv_lens has {batch} requests: at most {MAX_REQUESTS} fit a plan; split the batch"
        )


def check_head_counts(num_q_heads: Any, num_kv_heads: Any, head_dim: Any) -> None:
    """Raise ArgumentError unless query heads are whole groups and the head dim is served."""
    q_heads = as_int("num_q_heads", num_q_heads, 1)
    kv_heads = as_int("num_kv_heads", num_kv_heads, 1)
    if q_heads % kv_heads:
        raise ArgumentError(
            f"{q_heads} query heads over {kv_heads} KV heads: query heads must be a multiple of "
            "the KV heads; slice or repeat heads, and look at the caches' layout: [pages, "
            "page_size, kv_heads, head_dim], of [pages, kv_heads, page_size, head_dim] a "
            "transpose(1, 2)"
        )
    if as_int("head_dim", head_dim, 1) not in HEAD_DIMS:
        raise ArgumentError(
            f"head_dim={head_dim}: there is {list(HEAD_DIMS)}; pad heads with zeros to the next "
            "and pass scale=head_dim ** -0.5 of your own"
        )


def check_page_size(page_size: Any) -> None:
    """Raise ArgumentError for a page size that no kernel reads."""
    if as_int("page_size", page_size, 1) not in PAGE_SIZES:
        raise ArgumentError(
            f"page_size={page_size}: there is {list(PAGE_SIZES)}; view larger pages of a dense "
            "cache as several smaller ones"
        )


def check_caches(k_cache: Any, v_cache: Any, of: str, like: Tensor) -> None:
    """Raise ArgumentError unless both are pages of one shape, in the dtype of `like` or in e4m3."""
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(name, x, 4, "[pages, page_size, kv_heads, head_dim]")
        check_inner(name, x)
        if x.dtype not in (like.dtype, FP8):
            raise ArgumentError(
                f"{name} is {x.dtype}, {of} is {like.dtype}: a cache has {of}'s dtype or {FP8}; "
                "convert one"
            )
    if k_cache.shape != v_cache.shape or k_cache.dtype is not v_cache.dtype:
        raise ArgumentError(
            f"k_cache is {list(k_cache.shape)} {k_cache.dtype}, v_cache {list(v_cache.shape)} "
            f"{v_cache.dtype}: both must be of one shape and dtype"
        )


def check_table(page_table: Any, page_indptr: Any, batch: int) -> None:
    """[batch, max_pages], or flat [total] with `page_indptr` [batch + 1]; int32."""
    if page_indptr is None:
        check_tensor("page_table", page_table, 2, "[batch, max_pages] without page_indptr")
        if page_table.shape[0] != batch:
            raise ArgumentError(
                f"page_table has {page_table.shape[0]} rows, kv_lens {batch} requests: pass a row "
                "for each request"
            )
    else:
        check_tensor("page_table", page_table, 1, "[total] with page_indptr")
        check_vector("page_indptr", page_indptr, batch + 1, torch.int32, "[batch + 1]")
    check_inner("page_table", page_table)
    if page_table.dtype is not torch.int32:
        raise ArgumentError(
            f"page_table is {page_table.dtype}, wanted torch.int32: convert it by .to(torch.int32)"
        )


def check_scale(name: str, value: Any, cache: Tensor, *, positive: bool = True) -> None:
    """A number (above 0 if `positive`), or one fp32 on the device; of an fp8 cache."""
    if value is None:
        return
    if cache.dtype is not FP8:
        raise ArgumentError(
            f"{name} is given and the cache is {cache.dtype}: scales belong to {FP8} caches; leave "
            f"{name} at None"
        )
    if not isinstance(value, Tensor):
        as_float(name, value, positive=positive)
        return
    check_kind(name, value)
    if value.numel() != 1 or value.dtype is not torch.float32:
        raise ArgumentError(
            f"{name} has shape {list(value.shape)} and is {value.dtype}: pass a float, or one "
            "torch.float32 on the device"
        )


def as_window(window: Any) -> int:
    """Keys that a query sees at most, 0 without a limit: as many as leave room in 32 bits."""
    return 0 if window is None else min(as_int("window", window, 1), MAX_WINDOW)


def check_uncaptured(capturing: bool) -> None:
    """Raise ArgumentError for `check=True` in a capture."""
    if capturing:
        raise ArgumentError(
            "check=True reads device memory, which a graph capture cannot: leave check at False "
            "there"
        )


def check_writable(name: str, x: Tensor) -> None:
    """Raise ArgumentError for a tensor that torch lets nobody write into."""
    if x.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            f"{name} requires a gradient, and is written: call under torch.no_grad(), or pass "
            f"{name}.detach()"
        )
    if x.is_inference() and not torch.is_inference_mode_enabled():
        raise ArgumentError(
            f"{name} was made in torch.inference_mode(), and is written outside it: call inside, "
            f"or pass {name}.clone()"
        )


def writable(out: Tensor) -> bool:
    """Whether no two elements share an address, by strides that nest."""
    extent = 1
    sizes = zip(out.shape, out.stride(), strict=True)
    for size, stride in sorted((x for x in sizes if x[0] > 1), key=lambda x: x[1]):
        if stride < extent:
            return False
        extent = stride * (size - 1) + extent
    return True


def dtype_name(dtype: torch.dtype) -> Dtype:
    """The name by which configs and tables know a torch dtype.

    Raises:
        ArgumentError: for a dtype that no kernel takes.
    """
    if dtype in FLOATS:
        return FLOATS[dtype]
    raise ArgumentError(
        f"dtype {dtype} is not supported: use torch.bfloat16 or torch.float16 "
        "(torch.float32 on CPU tensors only)"
    )


def check_capability(device: torch.device, capability: tuple[int, int]) -> None:
    """Raise DeviceError for a GPU that is older than the kernels can be."""
    if capability < MIN_CAPABILITY:
        major, minor = capability
        raise DeviceError(
            f"{device} has compute capability {major}.{minor}, smkern needs 8.0 or later: use a "
            "newer GPU, or CPU tensors for the reference"
        )


def as_num_sms(num_sms: Any) -> int:
    """`num_sms` as an int; BudgetError for anything that is no whole number in [1, MAX_SIZE]."""
    try:
        count = as_index(num_sms)
    except TypeError:
        raise BudgetError(
            f"num_sms={shown(num_sms)} is no whole number: pass an int, or None for the stream's "
            "own"
        ) from None
    if isinstance(num_sms, bool) or not 1 <= count <= MAX_SIZE:
        raise BudgetError(
            f"num_sms={shown(num_sms)}: a budget is at least 1 SM and at most {MAX_SIZE}; pass "
            "None for all that the stream has"
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
