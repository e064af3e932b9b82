"""Ragged batches over shuffled pages, with NaN wherever nobody may look."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

NAN = float("nan")
FP8 = torch.float8_e4m3fn
NAMES = ("q", "k_cache", "v_cache", "page_table", "kv_lens")
"""Of a made case's arguments."""
SIZES = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 16, "max_kv_len": 64}
"""Of a plan for cases that differ from the default in nothing of these."""


@dataclass(frozen=True, slots=True)
class Case:
    """A batch: (q_len, kv_len) of each request, and how it is stored. A row shows what differs."""

    lengths: tuple[tuple[int, int], ...] = ((1, 37), (3, 40), (9, 9))
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    dtype: torch.dtype = torch.float16
    cache_dtype: torch.dtype | None = None
    flat: bool = False
    heads_first: bool = False
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Made:
    """A case's tensors: `args` and `options` of a call, and each request's own keys and values."""

    args: tuple[Tensor, ...]
    options: dict[str, Any]
    keys: list[Tensor]
    values: list[Tensor]
    ranges: list[tuple[int, int]]


def make(case: Case, device: str = "cpu") -> Made:
    """Tensors of a case, by torch's seed; pages come shuffled and unused room holds NaN."""
    cache_dtype = case.cache_dtype or case.dtype
    counts = [-(-kv_len // case.page_size) for _, kv_len in case.lengths]
    pages = sum(counts) + 3
    order = torch.randperm(pages)[: sum(counts)]
    layout = (pages, case.page_size, case.kv_heads, case.head_dim)
    stored = [
        torch.full(layout, NAN).transpose(1, 2).contiguous().transpose(1, 2)
        if case.heads_first
        else torch.full(layout, NAN)
        for _ in range(2)
    ]
    keys: list[Tensor] = []
    values: list[Tensor] = []
    first = 0
    for (_, kv_len), count in zip(case.lengths, counts, strict=True):
        mine = order[first : first + count]
        first += count
        for cache, kept in zip(stored, (keys, values), strict=True):
            x = torch.randn(kv_len, case.kv_heads, case.head_dim).to(cache_dtype)
            kept.append(x.to(device))
            at = torch.arange(kv_len)
            cache[mine[at // case.page_size], at % case.page_size] = x.float()
    k_cache, v_cache = (x.to(cache_dtype).to(device) for x in stored)
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    if case.flat:
        table = order.int()
    else:
        table = torch.full((len(counts), max([*counts, 1]) + 1), -7, dtype=torch.int32)
        for r, count in enumerate(counts):
            table[r, :count] = order[starts[r] : starts[r + 1]]
    q_lens = [q_len for q_len, _ in case.lengths]
    cu = torch.tensor([0, *q_lens]).cumsum(0).int()
    q = torch.randn(int(cu[-1]), case.q_heads, case.head_dim).to(case.dtype)
    kv_lens = torch.tensor([kv_len for _, kv_len in case.lengths], dtype=torch.int32)
    options = dict(case.options)
    if any(q_len != 1 for q_len in q_lens):
        options |= {"cu_q_lens": cu.to(device), "max_q_len": max(q_lens)}
    if case.flat:
        options["page_indptr"] = starts.to(device)
    if options.get("sinks"):
        options["sinks"] = torch.randn(case.q_heads).to(device)
    args = tuple(x.to(device) for x in (q, k_cache, v_cache, table, kv_lens))
    ranges = list(pairwise(cu.tolist()))
    return Made(args, options, keys, values, ranges)
