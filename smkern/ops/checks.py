"""Checks of single arguments of attention; messages give the value, the limit and the remedy."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from smkern.errors import ArgumentError

HEAD_DIMS = (64, 96, 128, 256)
PAGE_SIZES = (1, 16, 32, 64, 128, 256)
MAX_SIZE = 2**31 - 1
MAX_FLOAT = torch.finfo(torch.float32).max


def as_int(name: str, value: Any, least: int, most: int | None = MAX_SIZE) -> int:
    """A whole number in [least, most]; ArgumentError for anything else."""
    try:
        number = operator.index(value)
    except TypeError:
        raise ArgumentError(f"{name}={value!r} is no whole number: pass an int") from None
    if isinstance(value, bool) or number < least or (most is not None and number > most):
        upper = "" if most is None else f" and at most {most}"
        raise ArgumentError(f"{name}={value!r}: give a whole number of at least {least}{upper}")
    return number


def as_float(name: str, value: Any, *, positive: bool = False) -> float:
    """A number that fp32 holds (above 0 where wanted); ArgumentError for anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ArgumentError(f"{name}={value!r} is no number: pass a float, or None") from None
    except OverflowError:  # of a whole number
        number = float("inf")
    if not abs(number) <= MAX_FLOAT or (positive and number <= 0):
        wanted = "a finite number above 0" if positive else "a finite number"
        if MAX_FLOAT < abs(number) < float("inf"):
            wanted += f" of at most {MAX_FLOAT:g}, the largest of fp32"
        raise ArgumentError(f"{name}={number!r}: pass {wanted}, or None")
    return number


def check_tensor(name: str, x: Any, dims: int, layout: str) -> Tensor:
    """Raise ArgumentError unless x is a strided tensor of so many dimensions."""
    if not isinstance(x, Tensor):
        raise ArgumentError(f"{name} is {type(x).__name__}, not a torch.Tensor")
    if x.layout is not torch.strided or x.dim() != dims:
        raise ArgumentError(
            f"{name} has shape {list(x.shape)} ({x.layout}), wanted {layout}: pass a dense tensor "
            f"of {dims} dimensions"
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


def check_head_counts(num_q_heads: Any, num_kv_heads: Any, head_dim: Any) -> None:
    """Raise ArgumentError unless query heads are whole groups and the head dim is served."""
    q_heads = as_int("num_q_heads", num_q_heads, 1)
    kv_heads = as_int("num_kv_heads", num_kv_heads, 1)
    if q_heads % kv_heads:
        raise ArgumentError(
            f"{q_heads} query heads over {kv_heads} KV heads: query heads must be a multiple of "
            "the KV heads; repeat or slice heads so that each KV head serves as many"
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
