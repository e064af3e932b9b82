"""Small append cases: ragged tokens over shuffled pages, views of one qkv matrix, poison."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from smkern.rope import Rope
from smkern.tuning.append import AppendProblem

NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Case:
    """A batch of requests (new tokens, length) and the options of an append."""

    requests: tuple[tuple[int, int], ...] = ((1, 40), (1, 1), (1, 17))
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    rope: Rope | None = None
    norm: bool = False
    fp8: bool = False
    flat: bool = False
    ragged: bool = True
    positions: torch.dtype | None = None
    heads_first: bool = False
    k_scale: float | Tensor = 1.0
    v_scale: float | Tensor = 1.0
    padding: int = 0
    """Tokens behind the last request's."""

    @property
    def tokens(self) -> int:
        return sum(q_len for q_len, _ in self.requests) + self.padding

    @property
    def problem(self) -> AppendProblem:
        rope = self.rope
        return AppendProblem(
            self.tokens, len(self.requests), self.q_heads, self.kv_heads, self.head_dim,
            self.page_size, "fp16", "fp8" if self.fp8 else "fp16",
            0 if rope is None else rope.rotary_dim, rope is not None and rope.interleaved,
            self.norm, self.ragged, self.flat, "fp32", "fp16", False,
        )  # fmt: skip


def inputs(case: Case, seed: int = 0) -> dict[str, Any]:
    """Keyword arguments of the operators; caches hold NaN, entries behind a length are no pages."""
    generator = torch.Generator().manual_seed(seed)
    heads = case.q_heads + 2 * case.kv_heads
    qkv = torch.randn(case.tokens, heads * case.head_dim + 8, generator=generator).half()
    qkv = qkv[:, : heads * case.head_dim].unflatten(1, (heads, case.head_dim))
    q, k, v = qkv.split([case.q_heads, case.kv_heads, case.kv_heads], 1)
    counts = [-(-kv_len // case.page_size) for _, kv_len in case.requests]
    total = sum(counts) + 2
    order = torch.randperm(total, generator=generator).int()
    bounds = [0, *torch.tensor(counts).cumsum(0).tolist()]
    table = torch.full((len(counts), max(counts) + 1), 1 << 30, dtype=torch.int32)
    table[:, -1] = -5
    for r, (begin, end) in enumerate(pairwise(bounds)):
        table[r, : end - begin] = order[begin:end]
    dtype = torch.float8_e4m3fn if case.fp8 else torch.float16
    inner = (case.kv_heads, case.page_size) if case.heads_first else (case.page_size, case.kv_heads)
    caches = [torch.full((total, *inner, case.head_dim), NAN).to(dtype) for _ in range(2)]
    if case.heads_first:
        caches = [x.transpose(1, 2) for x in caches]
    found: dict[str, Any] = {
        "k": k, "v": v, "k_cache": caches[0], "v_cache": caches[1],
        "page_table": order[: bounds[-1]].clone() if case.flat else table,
        "kv_lens": torch.tensor([n for _, n in case.requests], dtype=torch.int32),
    }  # fmt: skip
    if case.fp8:
        found |= {"k_scale": case.k_scale, "v_scale": case.v_scale}
    if case.q_heads:
        found["q"] = q
    if case.flat:
        found["page_indptr"] = torch.tensor(bounds, dtype=torch.int32)
    if case.ragged:
        ends = torch.tensor([0, *(n for n, _ in case.requests)]).cumsum(0)
        found["cu_q_lens"] = ends.int()
    if case.rope is not None:
        found["cos_sin"] = case.rope.table(64)
    if case.norm:
        weights = torch.randn(2, case.head_dim, generator=generator).half()
        found |= {"q_norm": weights[0], "k_norm": weights[1], "eps": 1e-3}
    if case.positions is not None:
        where = torch.randint(-3, 80, (case.tokens,), generator=generator)
        found["positions"] = where.to(case.positions)
    return found
