"""A small decoder whose products, norms and attention are smkern's, and the rest torch's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import smkern
from tests.engines.flat_layout import Batch

EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Sizes:
    layers: int = 3
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    width: int = 192
    vocab: int = 211


class Layer(NamedTuple):
    norm: Tensor
    qkv: Tensor
    o: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Model:
    """embed, layer(i) and head of a batch, each launched on the current stream."""

    def __init__(self, sizes: Sizes, device: str, dtype: torch.dtype, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            drawn = torch.randn(shape, generator=generator) * 1.5 / shape[-1] ** 0.5
            return drawn.to(device, dtype)

        self.sizes, self.device, self.dtype = sizes, torch.device(device), dtype
        s, qkv = sizes, (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
        self.embedding = draw(s.vocab, s.hidden)
        self.unembedding = draw(s.vocab, s.hidden)
        self.norm = 1 + draw(s.hidden)
        self.layers = [
            Layer(
                1 + draw(s.hidden), draw(qkv, s.hidden), draw(s.hidden, s.heads * s.head_dim),
                1 + draw(s.hidden), draw(2 * s.width, s.hidden), draw(s.hidden, s.width),
            )
            for _ in range(s.layers)
        ]  # fmt: skip
        half = torch.arange(s.head_dim // 2, device=device) / (s.head_dim // 2)
        self.frequencies = 10_000.0**-half

    def zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def embed(self, batch: Batch) -> None:
        torch.index_select(self.embedding, 0, batch.ids, out=batch.hidden)

    def layer(self, index: int, batch: Batch, k_cache: Tensor, v_cache: Tensor) -> None:
        w, hidden = self.layers[index], batch.hidden
        q, k, v = self._qkv(w, smkern.rms_norm(hidden, w.norm, eps=EPS), batch.positions)
        table = {"page_indptr": batch.indptr, "cu_q_lens": batch.cu_q_lens}
        smkern.append_kv(k, v, k_cache, v_cache, batch.indices, batch.kv_lens, **table)
        attended = smkern.paged_attention(
            q, k_cache, v_cache, batch.indices, batch.kv_lens, max_q_len=batch.max_q_len, **table
        )
        hidden += _product(attended.flatten(1), w.o)
        hidden += self._mlp(w, smkern.rms_norm(hidden, w.mlp_norm, eps=EPS))

    def head(self, batch: Batch) -> None:
        """Greedy tokens into `drawn`."""
        rows = batch.hidden
        if batch.cu_q_lens is not None:
            rows = rows.index_select(0, batch.cu_q_lens[1:] - 1)
        logits = _product(smkern.rms_norm(rows, self.norm, eps=EPS), self.unembedding)
        torch.argmax(logits, 1, out=batch.drawn)
        batch.host.copy_(batch.drawn, non_blocking=True)

    def _qkv(self, w: Layer, rows: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        s = self.sizes
        counts = [s.heads, s.kv_heads, s.kv_heads]
        found = _product(rows, w.qkv).view(len(rows), sum(counts), s.head_dim)
        angles = (positions[:, None] * self.frequencies)[:, None]
        q, k, v = found.split(counts, 1)
        return turned(q, angles), turned(k, angles), v

    def _mlp(self, w: Layer, rows: Tensor) -> Tensor:
        gate, up = _product(rows, w.gate_up).chunk(2, 1)
        return _product(functional.silu(gate) * up, w.down)


def _product(rows: Tensor, weights: Tensor) -> Tensor:
    """A row's bits follow from the row alone, so that any order of launches gives the same."""
    return smkern.gemm(rows, weights, batch_invariant=True)


def turned(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
