"""Measured attention steps: lengths, bytes and FLOPs, operands, and the reference result."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from smkern.latency.cost import visible_pairs
from smkern.measure.timing import sets_for
from smkern.tuning.attention.shapes import AttentionProblem, AttentionShape

Kind = Literal["decode", "prefill", "mixed"]
CacheDtype = Literal["bf16", "fp8"]
Layout = Literal["HND", "NHD"]

BUDGETS = (16, 24, 32, 48, 64, 84, 100, 116, 132)
QUICK_BUDGETS = (16, 132)

REFERENCE_ELEMENTS = 1 << 28
"""Scores that the reference computes at a time, in fp32: 1 GB."""
GENERATED_ELEMENTS = 1 << 27
"""Cache elements generated at a time."""


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One attention step over a paged cache, causal.

    `q_lens` are the requests' new tokens, `kv_lens` their lengths including those. In a mixed case
    decode requests come first.
    """

    name: str
    kind: Kind
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    cache_dtype: CacheDtype = "bf16"
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16

    @property
    def op(self) -> str:
        return "paged_attention"

    @property
    def batch(self) -> int:
        return len(self.kv_lens)

    @property
    def num_tokens(self) -> int:
        """Query tokens of the step."""
        return sum(self.q_lens)

    @property
    def cu_q_lens(self) -> tuple[int, ...]:
        return tuple(accumulate(self.q_lens, initial=0))

    @property
    def num_decode(self) -> int:
        """Leading requests with one query token each."""
        return next((i for i, q_len in enumerate(self.q_lens) if q_len > 1), self.batch)

    @property
    def is_dense(self) -> bool:
        """Requests of equal length with nothing cached, which operators without pages can run."""
        return (
            self.kind == "prefill" and len(set(self.kv_lens)) == 1 and self.q_lens == self.kv_lens
        )

    @property
    def bytes_moved(self) -> int:
        """K and V of all keys once, q once, the output once."""
        element_bytes = 1 if self.cache_dtype == "fp8" else 2
        kv = 2 * sum(self.kv_lens) * self.num_kv_heads * self.head_dim * element_bytes
        return kv + 2 * 2 * self.num_tokens * self.num_q_heads * self.head_dim

    @property
    def flops(self) -> int:
        """Both matrix products over every visible (query, key) pair."""
        pairs = sum(map(visible_pairs, self.q_lens, self.kv_lens))
        return 4 * self.head_dim * self.num_q_heads * pairs

    @property
    def problem(self) -> AttentionProblem:
        """The case as dispatch sees it, with exact host numbers."""
        shape = AttentionShape(
            batch=self.batch,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=self.page_size,
            max_q_len=max(self.q_lens),
            max_kv_len=max(self.kv_lens),
            max_tokens=self.num_tokens,
            max_total_kv=sum(self.kv_lens),
        )
        return AttentionProblem(shape, "bf16", self.cache_dtype)

    @property
    def num_sets(self) -> int:
        """Caches to rotate over, so that a launch finds none of its own in L2; at most 16."""
        return sets_for(self.bytes_moved, least=1, most=16)

    @property
    def about(self) -> dict[str, Any]:
        """The `case` of a results cell; the same for every provider."""
        return {
            "kind": self.kind,
            "name": self.name,
            "batch": self.batch,
            "tokens": self.num_tokens,
            "kv_tokens": sum(self.kv_lens),
            "q_heads": self.num_q_heads,
            "kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "page_size": self.page_size,
            "dtype": "bf16",
            "cache_dtype": self.cache_dtype,
        }


@dataclass(frozen=True, slots=True)
class PageTables:
    """The shuffled pages of a case's keys, in the formats that the providers take.

    `table` [batch, max_pages] int32 on the device, padded with 0; on the host, int32: `indptr`
    [batch + 1], `indices` [pages used], `last_page_len` [batch].
    """

    table: Tensor
    indptr: Tensor
    indices: Tensor
    last_page_len: Tensor
    num_pages: int

    @classmethod
    def of(cls, case: AttentionCase, device: str, generator: torch.Generator) -> PageTables:
        counts = [-(-kv_len // case.page_size) for kv_len in case.kv_lens]
        total = sum(counts)
        order = torch.randperm(total, generator=generator).to(torch.int32)
        indptr = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        table = torch.zeros(case.batch, max(counts), dtype=torch.int32)
        last = []
        for row, count in enumerate(counts):
            begin = int(indptr[row])
            table[row, :count] = order[begin : begin + count]
            last.append(case.kv_lens[row] - (count - 1) * case.page_size)
        return cls(table.to(device), indptr, order, torch.tensor(last, dtype=torch.int32), total)


@dataclass(frozen=True, slots=True)
class AttentionSet:
    """One cache with its queries and its output.

    q and out [tokens, q_heads, d]; k and v [pages, page_size, kv_heads, d] views of HND memory.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor


@dataclass(slots=True)
class AttentionOperands:
    """The operands of a case, shared by all budgets and providers; values are standard normal.

    There are `case.num_sets` caches over one page table. `kv_lens` [batch] and `cu_q_lens`
    [batch + 1] are int32 on the device.
    """

    case: AttentionCase
    device: str = "cuda"
    pages: PageTables = field(init=False)
    kv_lens: Tensor = field(init=False)
    cu_q_lens: Tensor = field(init=False)
    sets: list[AttentionSet] = field(init=False)
    _pools: dict[tuple[int, Layout], tuple[Tensor, Tensor]] = field(default_factory=dict)
    _reference: Tensor | None = None

    def __post_init__(self) -> None:
        case = self.case
        self.pages = PageTables.of(case, self.device, torch.Generator().manual_seed(case.batch))
        self.kv_lens = torch.tensor(case.kv_lens, dtype=torch.int32, device=self.device)
        self.cu_q_lens = torch.tensor(case.cu_q_lens, dtype=torch.int32, device=self.device)
        generator = torch.Generator(self.device).manual_seed(1 + case.batch)
        self.sets = []
        for index in range(case.num_sets):
            k, v = (self._random_pool(generator) for _ in range(2))
            self._pools[index, "HND"] = k, v
            shape = (case.num_tokens, case.num_q_heads, case.head_dim)
            q = torch.randn(shape, generator=generator, device=self.device, dtype=torch.bfloat16)
            views = k.transpose(1, 2), v.transpose(1, 2)
            self.sets.append(AttentionSet(q, *views, torch.empty_like(q)))

    def _random_pool(self, generator: torch.Generator) -> Tensor:
        """[pages, kv_heads, page_size, d] of the cache's dtype."""
        case = self.case
        dtype = torch.float8_e4m3fn if case.cache_dtype == "fp8" else torch.bfloat16
        inner = (case.num_kv_heads, case.page_size, case.head_dim)
        pool = torch.empty(self.pages.num_pages, *inner, dtype=dtype, device=self.device)
        step = max(1, GENERATED_ELEMENTS // (inner[0] * inner[1] * inner[2]))
        for part in pool.split(step):
            drawn = torch.randn(
                part.shape, generator=generator, device=self.device, dtype=torch.bfloat16
            )
            part.copy_(drawn)
        return pool

    def pool(self, index: int, layout: Layout) -> tuple[Tensor, Tensor]:
        """K and V of a set in the layout's own shape: HND or NHD, contiguous, the same values."""
        if (index, layout) not in self._pools:
            hnd = self._pools[index, "HND"]
            k, v = (x.transpose(1, 2).contiguous() for x in hnd)
            self._pools[index, layout] = k, v
        return self._pools[index, layout]

    def gathered(self, index: int, row: int) -> tuple[Tensor, Tensor]:
        """K and V of one request in token order, [kv_len, kv_heads, d]."""
        case, pages = self.case, self.pages
        begin, end = int(pages.indptr[row]), int(pages.indptr[row + 1])
        chosen = pages.indices[begin:end].long().to(self.device)
        found = []
        for pool in (self.sets[index].k, self.sets[index].v):
            bits = pool.view(torch.uint8) if case.cache_dtype == "fp8" else pool
            rows = bits[chosen].view(pool.dtype)
            found.append(rows.reshape(-1, case.num_kv_heads, case.head_dim)[: case.kv_lens[row]])
        return found[0], found[1]

    def dense(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v [batch, heads, length, d] of a dense case; k and v are copies without pages."""
        case = self.case
        pairs = [self.gathered(index, row) for row in range(case.batch)]
        k, v = (torch.stack(parts).transpose(1, 2) for parts in zip(*pairs, strict=True))
        q = self.sets[index].q.view(case.batch, -1, case.num_q_heads, case.head_dim)
        return q.transpose(1, 2), k, v

    def reference(self) -> Tensor:
        """The result of set 0 in fp32 by torch, [tokens, q_heads, d]."""
        if self._reference is None:
            q = self.sets[0].q
            out = torch.empty(q.shape, dtype=torch.float32, device=self.device)
            starts = self.case.cu_q_lens
            for row, (begin, end) in enumerate(pairwise(starts)):
                k, v = (x.float() for x in self.gathered(0, row))
                attend(q[begin:end], k, v, out[begin:end])
            self._reference = out
        return self._reference

    def poison(self) -> None:
        """Fill set 0's output with NaN, so that rows left unwritten show."""
        self.sets[0].out.fill_(float("nan"))

    def error(self, out: Tensor) -> float:
        """|out - reference| / |reference| of set 0; NaN where a row was not written."""
        reference = self.reference()
        norm = torch.linalg.vector_norm
        return float(norm(out.float() - reference) / norm(reference))


def attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
    """Causal attention of one request's last tokens, written to `out`; fp32 throughout.

    q and out [q_len, q_heads, d]; k and v [kv_len, kv_heads, d] fp32.
    """
    q_len, q_heads, head_dim = q.shape
    kv_len, kv_heads = k.shape[:2]
    step = max(1, REFERENCE_ELEMENTS // (q_heads * kv_len))
    position = torch.arange(q_len, device=q.device) + kv_len - q_len
    key = torch.arange(kv_len, device=q.device)
    for begin in range(0, q_len, step):
        part = q[begin : begin + step].float().view(-1, kv_heads, q_heads // kv_heads, head_dim)
        scores = torch.einsum("qhgd,khd->hgqk", part, k).mul_(head_dim**-0.5)
        scores.masked_fill_(key > position[begin : begin + step, None], float("-inf"))
        mean = torch.einsum("hgqk,khd->qhgd", scores.softmax(-1), v)
        out[begin : begin + step] = mean.reshape(-1, q_heads, head_dim)
