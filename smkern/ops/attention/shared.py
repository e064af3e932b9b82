"""Checks of the tensors that attention and the append take alike: pages, scales, `out`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smkern.errors import ArgumentError
from smkern.ops import checks

FP8 = torch.float8_e4m3fn


def check_pair(k_cache: Tensor, v_cache: Tensor) -> None:
    if k_cache.shape != v_cache.shape or k_cache.dtype is not v_cache.dtype:
        raise ArgumentError(
            f"k_cache is {list(k_cache.shape)} {k_cache.dtype}, v_cache {list(v_cache.shape)} "
            f"{v_cache.dtype}: both must be of one shape and dtype"
        )


def check_table(page_table: Any, page_indptr: Any, batch: int) -> None:
    """[batch, max_pages], or flat [total] with `page_indptr` [batch + 1]; int32."""
    if page_indptr is None:
        checks.check_tensor("page_table", page_table, 2, "[batch, max_pages] without page_indptr")
        if page_table.shape[0] != batch:
            raise ArgumentError(
                f"page_table has {page_table.shape[0]} rows, kv_lens {batch} requests: pass a row "
                "for each request"
            )
    else:
        checks.check_tensor("page_table", page_table, 1, "[total] with page_indptr")
        checks.check_vector("page_indptr", page_indptr, batch + 1, torch.int32, "[batch + 1]")
    checks.check_inner("page_table", page_table)
    if page_table.dtype is not torch.int32:
        raise ArgumentError(
            f"page_table is {page_table.dtype}, wanted torch.int32: convert it by .to(torch.int32)"
        )


def check_scale(
    name: str, value: Any, cache: Tensor, *, positive: bool = True, owner: tuple[str, Tensor]
) -> None:
    """A number (above 0 if `positive`), or one fp32 on the device of `owner`; of an fp8 cache."""
    if value is None:
        return
    if cache.dtype is not FP8:
        raise ArgumentError(
            f"{name} is given and the cache is {cache.dtype}: scales belong to {FP8} caches; leave "
            f"{name} at None"
        )
    if not isinstance(value, Tensor):
        checks.as_float(name, value, positive=positive)
    elif value.numel() != 1 or value.dtype is not torch.float32:
        raise ArgumentError(
            f"{name} has shape {list(value.shape)} and is {value.dtype}: pass a float, or one "
            "torch.float32 on the device"
        )
    else:
        checks.check_device(name, value, owner[1].device, owner[0])


def check_out(out: Any, q: Tensor) -> None:
    """[tokens, q_heads, head_dim] as q, of addresses of its own."""
    checks.check_tensor("out", out, 3, "[tokens, q_heads, head_dim]")
    checks.check_inner("out", out)
    if out.shape != q.shape or out.dtype is not q.dtype:
        raise ArgumentError(
            f"out is {list(out.shape)} {out.dtype}, q {list(q.shape)} {q.dtype}: they must agree"
        )
    if not writable(out):
        raise ArgumentError(
            f"out has strides {out.stride()} for shape {list(out.shape)}: two of its elements "
            "share an address; pass a tensor whose rows and heads lie apart"
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
