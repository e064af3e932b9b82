"""Ragged batches over shuffled pages, with NaN wherever nothing is appended."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from smkern.ops.append.call import Call
from smkern.ops.append.operators import APPEND, APPEND_KV
from smkern.ops.operator_warmup import aligned
from smkern.rope import Rope
from smkern.tuning.append import AppendProblem

Made = tuple[tuple[Tensor, ...], dict[str, Any]]
NAMES = ("q", "k", "v", "k_cache", "v_cache", "page_table", "kv_lens")
"""Of the tensors that are made."""
NAN = float("nan")
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Case:
    """A batch: (new tokens, length) of each request, and options. A row shows what differs."""

    requests: tuple[tuple[int, int], ...] = ((1, 37), (3, 40), (0, 5), (9, 9))
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    dtype: torch.dtype = torch.float16
    cache_dtype: torch.dtype | None = None
    rope: Rope | None = None
    norm: bool = False
    flat: bool = False
    heads_first: bool = False
    fill: float = NAN
    gap: int = 0
    """Elements behind each token's heads."""
    padding: int = 0
    """Tokens behind the last request's."""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return sum(q_len for q_len, _ in self.requests) + self.padding


DECODE = Case(requests=((1, 37), (1, 5), (1, 16)))
ALL = Case(rope=Rope(64), norm=True)


def make(case: Case, device: str = "cpu") -> Made:
    """Tensors and options of a call, by torch's seed.

    q, k and v are views of one qkv matrix. Table entries behind a length are no pages.
    """
    heads = case.q_heads + 2 * case.kv_heads
    wide = torch.randn(case.tokens, heads * case.head_dim + case.gap).to(case.dtype).to(device)
    qkv = wide[:, : heads * case.head_dim].unflatten(1, (heads, case.head_dim))
    rows = qkv.split([case.q_heads, case.kv_heads, case.kv_heads], 1)
    counts = [-(-kv_len // case.page_size) for _, kv_len in case.requests]
    pages = sum(counts) + 3
    order = torch.randperm(pages)[: sum(counts)].int()
    bounds = [0, *torch.tensor(counts).cumsum(0).tolist()]
    table = torch.full((len(counts), max([*counts, 1]) + 1), -7, dtype=torch.int32)
    for r, (begin, end) in enumerate(pairwise(bounds)):
        table[r, : end - begin] = order[begin:end]
    inner = (case.page_size, case.kv_heads)
    shape = (pages, *(inner[::-1] if case.heads_first else inner), case.head_dim)
    caches = [torch.full(shape, case.fill).to(case.cache_dtype or case.dtype) for _ in range(2)]
    if case.heads_first:
        caches = [x.transpose(1, 2) for x in caches]
    kv_lens = torch.tensor([kv_len for _, kv_len in case.requests], dtype=torch.int32)
    options = dict(case.options)
    q_lens = [q_len for q_len, _ in case.requests]
    if any(q_len != 1 for q_len in q_lens):
        options["cu_q_lens"] = torch.tensor([0, *q_lens]).cumsum(0).int().to(device)
    if case.flat:
        table = order
        options["page_indptr"] = torch.tensor(bounds, dtype=torch.int32, device=device)
    if case.rope is not None:
        longest = max([kv_len for _, kv_len in case.requests], default=0)
        options["cos_sin"] = case.rope.table(max(longest, 64), device)
        options["interleaved"] = case.rope.interleaved
    if case.norm:
        weights = torch.randn(2, case.head_dim).to(case.dtype).to(device)
        options |= {"q_norm": weights[0], "k_norm": weights[1]}
    others = (*caches, table, kv_lens)
    return (*rows, *(x.to(device) for x in others)), options


def plain_options(options: dict[str, Any]) -> dict[str, Any]:
    """Those of `append_kv`."""
    names = ("cu_q_lens", "page_indptr", "k_scale", "v_scale", "num_sms", "check")
    return {name: options[name] for name in names if name in options}


def problem(made: Made, *, plain: bool = False, whole: bool | None = None) -> AppendProblem:
    """What a launch is decided by; `whole`: whether addresses count as whole 16 bytes."""
    args, options = made
    op = APPEND_KV if plain else APPEND
    call = Call(None, *args[1:], **plain_options(options)) if plain else Call(*args, **options)
    found = op.problem(call, aligned(op, call) if whole is None else whole)
    assert found is not None
    return found


def check_caches(args: tuple[Tensor, ...], same: tuple[Tensor, ...]) -> None:
    """Two calls have written the same, and left NaN in the same places."""
    for x, y in zip(args[3:5], same[3:5], strict=True):
        assert torch.equal(x.float().nan_to_num(77.0), y.float().nan_to_num(77.0))
