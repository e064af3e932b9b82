"""Attention steps under test: random values in shuffled pages, poison wherever nothing is valid."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from smkern.tuning.attention.shapes import (
    AttentionDtype,
    AttentionProblem,
    AttentionShape,
    CacheDtype,
)

DEVICE = "cuda"
TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.float8_e4m3fn}
GUARD = 2
"""Poisoned tokens before and behind every output."""
SPARE = 3
"""Poisoned pages of no request, poisoned columns around a page table, tokens of no request."""

Layout = Literal["nhd", "hnd", "paired", "mixed"]
"""Token-major pages; head-major pages; K and V of a page side by side; K token-, V head-major."""


@dataclass(frozen=True, slots=True)
class Case:
    """One step. `q_lens` None: one query a request and no cu_q_lens. Scales are for fp8 caches."""

    kv_lens: tuple[int, ...] = (1, 130, 300, 777)
    q_lens: tuple[int, ...] | None = None
    q_heads: int = 8
    kv_heads: int = 2
    head_dim: int = 128
    page_size: int = 16
    dtype: AttentionDtype = "bf16"
    fp8: bool = False
    scales: Literal["none", "float", "tensor"] = "none"
    layout: Layout = "nhd"
    flat: bool = False
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    scale: float | None = None
    scaled: bool = False
    max_q_len: int = 0
    """0: the longest of q_lens."""

    def __str__(self) -> str:
        changed = []
        for each in fields(self):
            value = getattr(self, each.name)
            if value != each.default:
                if isinstance(value, tuple):
                    value = f"{len(value)}x{max(value, default=0)}"
                changed.append(f"{each.name}={value}")
        return ",".join(changed) or "plain"

    @property
    def batch(self) -> int:
        return len(self.kv_lens)

    @property
    def queries(self) -> tuple[int, ...]:
        return (1,) * self.batch if self.q_lens is None else self.q_lens

    @property
    def longest_q(self) -> int:
        return self.max_q_len or max(self.queries, default=1) or 1

    @property
    def pages(self) -> list[int]:
        """Pages of each request."""
        return [-(-kv_len // self.page_size) for kv_len in self.kv_lens]

    @property
    def num_tokens(self) -> int:
        """Rows of q: those of the requests, and a few of none where there is a cu_q_lens."""
        return sum(self.queries) + (0 if self.q_lens is None else SPARE)

    @property
    def cache_dtype(self) -> CacheDtype:
        return "fp8" if self.fp8 else self.dtype

    @property
    def shape(self) -> AttentionShape:
        """What the kernels' variants are chosen by; dispatch may bound the lengths otherwise."""
        longest = max(1, *self.kv_lens, 1)
        return AttentionShape(
            batch=self.batch, num_q_heads=self.q_heads, num_kv_heads=self.kv_heads,
            head_dim=self.head_dim, page_size=self.page_size, max_q_len=self.longest_q,
            max_kv_len=longest, max_tokens=self.num_tokens, max_total_kv=self.batch * longest,
            causal=self.causal, window=self.window or 0,
        )  # fmt: skip

    @property
    def problem(self) -> AttentionProblem:
        return AttentionProblem(
            self.shape, self.dtype, self.cache_dtype, self.softcap is not None, self.sinks,
            self.scaled,
        )  # fmt: skip


@dataclass(slots=True)
class Step:
    """Tensors of a case. `keys` and `values` are what the pages hold of each request, dense."""

    case: Case
    seed: int
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    page_table: Tensor
    page_indptr: Tensor | None
    kv_lens: Tensor
    cu_q_lens: Tensor | None
    sinks: Tensor | None
    k_scale: float | Tensor | None
    v_scale: float | Tensor | None
    keys: list[Tensor]
    values: list[Tensor]
    out: Tensor
    out_frame: Tensor
    lse: Tensor
    lse_frame: Tensor

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `smkern.paged_attention`, outputs and plan not among them."""
        case = self.case
        max_q_len = None if self.cu_q_lens is None else case.longest_q
        return {
            "page_indptr": self.page_indptr, "cu_q_lens": self.cu_q_lens, "max_q_len": max_q_len,
            "causal": case.causal, "scale": case.scale, "window": case.window,
            "softcap": case.softcap, "sinks": self.sinks, "k_scale": self.k_scale,
            "v_scale": self.v_scale,
        }  # fmt: skip

    def on_host(self) -> Step:
        """The same on the CPU, so that no library's kernel has to run for the truth."""

        def moved(x: Any) -> Any:
            return x.cpu() if isinstance(x, Tensor) else x

        host = replace(self, **{f.name: moved(getattr(self, f.name)) for f in fields(self)})
        host.keys, host.values = ([moved(x) for x in kept] for kept in (self.keys, self.values))
        tokens = slice(GUARD, GUARD + len(self.out))
        host.out, host.lse = host.out_frame[tokens], host.lse_frame[tokens]
        return host

    def poison_outputs(self) -> None:
        self.out_frame.fill_(float("nan"))
        self.lse_frame.fill_(float("nan"))


def fresh_seed() -> int:
    """A new seed, or SMKERN_TEST_SEED where a failure is to be seen again; printed either way."""
    seed = int(os.environ.get("SMKERN_TEST_SEED") or secrets.randbits(31))
    print(f"SMKERN_TEST_SEED={seed}")
    return seed


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def framed(tokens: int, *rest: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[tokens, *rest] of NaN and the frame of NaN that it lies in."""
    frame = torch.full((tokens + 2 * GUARD, *rest), float("nan"), dtype=dtype, device=DEVICE)
    return frame[GUARD : GUARD + tokens], frame


def poisoned_caches(case: Case, num_pages: int) -> tuple[Tensor, Tensor]:
    """K and V, [pages, page_size, kv_heads, head_dim] in the case's layout, of NaN bytes."""
    size, heads, dim = case.page_size, case.kv_heads, case.head_dim

    def full(*shape: int) -> Tensor:
        if case.fp8:
            made = torch.full(shape, 0x7F, dtype=torch.uint8, device=DEVICE)
            return made.view(torch.float8_e4m3fn)
        return torch.full(shape, float("nan"), dtype=TORCH[case.dtype], device=DEVICE)

    if case.layout == "paired":
        both = full(num_pages, 2, size, heads, dim)
        return both[:, 0], both[:, 1]
    by_token, by_head = (num_pages, size, heads, dim), (num_pages, heads, size, dim)
    k = full(*by_head).transpose(1, 2) if case.layout == "hnd" else full(*by_token)
    v = full(*by_token) if case.layout == "nhd" else full(*by_head).transpose(1, 2)
    return k, v


def as_integers(x: Tensor) -> Tensor:
    """The same bytes as integers, which torch can index and compare whatever they mean."""
    return x.view(torch.uint8 if x.element_size() == 1 else torch.int16)


def put(cache: Tensor, pages: Tensor, rows: Tensor) -> None:
    """Write the first len(rows) keys of a request into its pages."""
    at = torch.arange(len(rows), device=cache.device)
    size = cache.shape[1]
    as_integers(cache)[pages[at // size].long(), at % size] = as_integers(rows)


def page_table(case: Case, order: Tensor, num_pages: int) -> tuple[Tensor, Tensor | None]:
    """The case's page table and page_indptr; entries of no page hold what must not be followed."""
    poison = [int(order[-1]), -1, num_pages, 2**31 - 1, -(2**31)]
    pages, most = case.pages, max(case.pages, default=0) + 1
    columns = SPARE + most + SPARE

    def junk(count: int) -> Tensor:
        return int32([poison[i % len(poison)] for i in range(count)])

    if case.flat:
        table = torch.cat([order[: sum(pages)].int(), junk(SPARE)])
        return table, int32([sum(pages[:i]) for i in range(case.batch + 1)])
    frame = junk(case.batch * columns).view(case.batch, columns)
    table, at = frame[:, SPARE : SPARE + most], 0
    for request, count in enumerate(pages):
        table[request, :count] = order[at : at + count]
        at += count
    return table, None


def make_step(case: Case, seed: int | None = None, *, sharp: float = 2.0) -> Step:
    """Fresh random tensors of a case.

    `sharp` multiplies the queries: at 2 the logits spread by 2, so that single keys weigh enough
    for one too many or too few to show; 0 makes all keys of a row count alike.
    """
    seed = fresh_seed() if seed is None else seed
    generator = torch.Generator(DEVICE).manual_seed(seed)
    dtype, cached = TORCH[case.dtype], TORCH[case.cache_dtype]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE, generator=generator)

    num_pages = sum(case.pages) + SPARE
    order = torch.randperm(num_pages, device=DEVICE, generator=generator)
    k_cache, v_cache = poisoned_caches(case, num_pages)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    at = 0
    for kv_len, count in zip(case.kv_lens, case.pages, strict=True):
        for cache, kept in ((k_cache, keys), (v_cache, values)):
            kept.append(normal(kv_len, case.kv_heads, case.head_dim).to(cached))
            put(cache, order[at : at + count], kept[-1])
        at += count
    table, indptr = page_table(case, order, num_pages)

    tokens, used = case.num_tokens, sum(case.queries)
    # as a fused QKV projection leaves them: rows further apart than the heads need
    fused = torch.full(
        (tokens, case.q_heads + 2 * case.kv_heads, case.head_dim), float("nan"), device=DEVICE
    ).to(dtype)
    q = fused[:, : case.q_heads]
    q[:used] = (sharp * normal(used, case.q_heads, case.head_dim)).to(dtype)
    out, out_frame = framed(tokens, case.q_heads, case.head_dim, dtype=dtype)
    lse, lse_frame = framed(tokens, case.q_heads, dtype=torch.float32)
    scales: list[float | Tensor | None] = [None, None]
    if case.scales == "float":
        scales = [0.75, 1.5]
    elif case.scales == "tensor":
        scales = [torch.full((1,), x, device=DEVICE) for x in (0.6, 1.7)]
    ends = [sum(case.queries[:i]) for i in range(case.batch + 1)]
    return Step(
        case=case, seed=seed, q=q, k_cache=k_cache, v_cache=v_cache, page_table=table,
        page_indptr=indptr, kv_lens=int32(case.kv_lens),
        cu_q_lens=None if case.q_lens is None else int32(ends),
        sinks=normal(case.q_heads) if case.sinks else None,
        k_scale=scales[0], v_scale=scales[1], keys=keys, values=values,
        out=out, out_frame=out_frame, lse=lse, lse_frame=lse_frame,
    )  # fmt: skip
