"""Steps of our decoder by hand, without transformers: ranks that are processes import this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smkern.models import ActivationBuffers, Decoder, Step

PAGE_SIZE = 16


@dataclass(slots=True)
class Session:
    """Requests of a decoder: their pages, scattered, and what is cached of each."""

    decoder: Decoder
    activations: ActivationBuffers
    caches: list[tuple[Tensor, Tensor]]
    page_table: Tensor
    lengths: list[int]
    max_kv_len: int

    @classmethod
    def make(
        cls,
        decoder: Decoder,
        batch: int,
        max_kv_len: int = 256,
        cache_dtype: torch.dtype | None = None,
    ) -> Session:
        config, device = decoder.config, decoder.device
        pages = -(-max_kv_len // PAGE_SIZE)
        shape = (batch * pages, config.num_kv_heads, PAGE_SIZE, config.head_dim)
        caches = [
            tuple(
                torch.full(
                    shape, float("nan"), dtype=cache_dtype or config.dtype, device=device
                ).transpose(1, 2)
                for _ in "kv"
            )
            for _ in range(config.num_layers)
        ]
        order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(1))
        table = order.int().view(batch, pages).to(device)
        activations = ActivationBuffers(config, batch * max_kv_len, batch, device)
        return cls(decoder, activations, caches, table, [0] * batch, max_kv_len)  # type: ignore[arg-type]

    def step(self, chunks: Sequence[Sequence[int]], *, ragged: bool = True) -> Step:
        """A step that appends these tokens to the requests."""
        device = self.decoder.device
        counts = [len(chunk) for chunk in chunks]
        self.lengths = [n + m for n, m in zip(self.lengths, counts, strict=True)]
        starts = [sum(counts[:i]) for i in range(len(counts) + 1)]
        return Step.make(
            self.activations,
            token_ids=torch.tensor([x for chunk in chunks for x in chunk], device=device),
            kv_lens=torch.tensor(self.lengths, dtype=torch.int32, device=device),
            page_table=self.page_table,
            caches=self.caches,
            max_kv_len=self.max_kv_len,
            cu_q_lens=torch.tensor(starts, dtype=torch.int32, device=device) if ragged else None,
            max_q_len=max(counts) if ragged else 1,
        )

    def logits(self, chunks: Sequence[Sequence[int]], *, ragged: bool = True) -> Tensor:
        """[batch, vocab] fp32 behind each request's last token."""
        return self.decoder.forward(self.step(chunks, ragged=ragged)).float().clone()
