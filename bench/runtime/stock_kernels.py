"""FlashInfer's kernels as a stock decoder calls them, beside `torch.mm`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from smkern.bench.attention.flashinfer import WORKSPACE_BYTES
from smkern.bench.ops.sampling import Settings
from smkern.bench.peers import flashinfer_with

PARTS = ("norm", "rope", "page", "activation", "sampling")
"""Modules of FlashInfer."""

DTYPES = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}

Cache = tuple[Tensor, Tensor]
"""k and v of a layer, [pages, page_size, kv_heads, head_dim] views of head-major pages."""
Attend = Callable[[Tensor, Cache, Tensor], None]
"""attend(q, cache, out): q and out are [tokens, q_heads, head_dim]."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The requests of a forward, as such kernels want them; a token each, or `counts` tokens.

    Attributes:
        counts: New tokens of each request.
        lengths: Keys of each, the new ones included.
        table: [batch, max_pages] int32.
        page_size: Tokens of a page.
        heads: (q_heads, kv_heads, head_dim).
    """

    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    table: Tensor
    page_size: int
    heads: tuple[int, int, int]

    def part(self, begin: int, end: int) -> Rows:
        """Some neighbouring requests."""
        return Rows(
            self.counts[begin:end], self.lengths[begin:end], self.table[begin:end],
            self.page_size, self.heads,
        )  # fmt: skip

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    @property
    def num_pages(self) -> list[int]:
        return [-(-length // self.page_size) for length in self.lengths]

    def indptr(self) -> Tensor:
        """[batch + 1] int32 on the host: where each request's pages begin."""
        return torch.tensor([0, *self.num_pages]).cumsum(0).int()

    def indices(self) -> Tensor:
        """[pages] int32: the pages of all requests, one after another."""
        return torch.cat([self.table[i, :n] for i, n in enumerate(self.num_pages)])

    def last_page_len(self) -> Tensor:
        """[batch] int32 on the host: tokens in each request's last page."""
        return torch.tensor([(n - 1) % self.page_size + 1 for n in self.lengths]).int()

    def positions(self) -> Tensor:
        """[tokens] int64 of each new token."""
        rows = zip(self.counts, self.lengths, strict=True)
        return torch.cat([torch.arange(n - count, n) for count, n in rows]).to(self.table.device)

    def requests(self) -> Tensor:
        """[tokens] int64: the request of each new token."""
        counts = torch.tensor(self.counts)
        return torch.repeat_interleave(torch.arange(len(counts)), counts).to(self.table.device)


class FlashInferKernels:
    """FlashInfer's; the workspaces of the two lanes are apart, as they run at the same time.

    Raises:
        ValueError: FlashInfer is absent.
    """

    def __init__(self) -> None:
        self._module, about = flashinfer_with(*PARTS)
        if self._module is None:
            raise ValueError(
                f"stock kernels are FlashInfer's among others, and it is absent: {about}"
            )
        self._workspaces = {
            name: torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
            for name in ("decode", "chunks")
        }

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        self._module.norm.rmsnorm(x, weight, eps, out=out)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        """residual += x; x = norm(residual)."""
        self._module.norm.fused_add_rmsnorm(x, residual, weight, eps)

    def rope(self, positions: Tensor, q: Tensor, k: Tensor, dim: int, table: Tensor) -> None:
        """Turn q and k, [tokens, heads * dim], in place."""
        self._module.rope.apply_rope_with_cos_sin_cache_inplace(positions, q, k, dim, table)

    def appender(self, rows: Rows) -> Callable[[Tensor, Tensor, Cache], None]:
        """What writes new keys and values of these rows into their pages."""
        append, device = self._module.page.append_paged_kv_cache, rows.table.device
        request, position = rows.requests().int(), rows.positions().int()
        where = (rows.indices(), rows.indptr().to(device), rows.last_page_len().to(device))

        def run(k: Tensor, v: Tensor, cache: Cache) -> None:
            append(k, v, request, position, _head_major(cache), *where, "HND")

        return run

    def silu_and_mul(self, x: Tensor, out: Tensor) -> None:
        self._module.activation.silu_and_mul(x, out)

    def decode(self, rows: Rows) -> Attend:
        """Attention of one token a request, planned."""
        wrapper = self._module.BatchDecodeWithPagedKVCacheWrapper(
            self._workspaces["decode"], "HND", use_tensor_cores=True, backend="fa2"
        )
        wrapper.plan(*_pages(rows), *rows.heads, rows.page_size, **DTYPES)
        return _planned(wrapper)

    def chunks(self, rows: Rows) -> Attend:
        """Causal attention of several tokens a request over their pages, planned."""
        wrapper = self._module.BatchPrefillWithPagedKVCacheWrapper(
            self._workspaces["chunks"], "HND", backend="fa3"
        )
        starts = torch.tensor([0, *rows.counts]).cumsum(0).int()
        wrapper.plan(starts, *_pages(rows), *rows.heads, rows.page_size, causal=True, **DTYPES)
        return _planned(wrapper)

    def sampler(self, rows: int, device: str) -> Callable[[Tensor], None]:
        """What draws a token a row."""
        settings, sampling = Settings.of(rows, device), self._module.sampling
        divisor, at_most = settings.divisor.clone(), settings.at_most.clone()

        def run(logits: Tensor) -> None:
            n = logits.shape[0]
            sampling.top_k_top_p_sampling_from_logits(
                logits.float() / divisor[:n], at_most[:n], settings.top_p[:n], seed=7, offset=0
            )

        return run


def _head_major(cache: Cache) -> Cache:
    return cache[0].transpose(1, 2), cache[1].transpose(1, 2)


def _pages(rows: Rows) -> Sequence[Tensor]:
    return rows.indptr(), rows.indices().cpu(), rows.last_page_len()


def _planned(wrapper: Any) -> Attend:
    def run(q: Tensor, cache: Cache, out: Tensor) -> None:
        wrapper.run(q, _head_major(cache), out=out)

    return run
