"""Chunks of prompts as one ragged forward, with inputs that stay where they are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from smkern import ops
from smkern.kv import KvPool, Staging
from smkern.models.arena import Arena
from smkern.models.decoder import Decoder
from smkern.models.scheduler import Chunk
from smkern.models.step import Caches, Step


class PromptRunner:
    """Runs chunks of prompts, and draws a token for each request whose prompt ends in its chunk.

    Args:
        decoder: The model.
        pool: Of the requests' pages.
        caches: A (k_cache, v_cache) a layer.
        arena: For `max_step_tokens` tokens of `max_batch` requests.
        max_context: Tokens of a request.
        num_sms: SMs of every operator. None: all that the current stream's partition has.
    """

    def __init__(
        self,
        decoder: Decoder,
        pool: KvPool,
        caches: Caches,
        arena: Arena,
        *,
        max_context: int,
        num_sms: int | None = None,
    ) -> None:
        self._decoder = decoder
        self._pool = pool
        self._caches = caches
        self._arena = arena
        self._num_sms = num_sms
        self._tables = pool.page_tables(arena.max_batch, max_context)
        self._staging = Staging(pool.device)

        def make(size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=pool.device)

        batch = arena.max_batch
        self._token_ids = make(arena.max_tokens)
        self._kv_lens, self._cu_q_lens = make(batch), make(batch + 1)
        self._top_k, self._seeds = make(batch), make(batch, torch.int64)
        self._temperature, self._top_p, self._min_p = (make(batch, torch.float32) for _ in "tpm")
        self._drawn = make(batch)

    def run(self, chunks: Sequence[Chunk]) -> list[int | None]:
        """One forward on the current stream; waits for it only where tokens are drawn.

        Returns:
            The token of each chunk, None where its prompt goes on.
        """
        step = self._step(chunks).planned()
        self._decoder.embed(step)
        for index in range(self._decoder.config.num_layers):
            self._decoder.layer(index, step)
        if not any(chunk.draws for chunk in chunks):
            return [None] * len(chunks)
        logits = self._decoder.head(step)
        drawn: list[int] = self._draw(chunks, logits).tolist()
        return [token if chunk.draws else None for chunk, token in zip(chunks, drawn, strict=True)]

    def _step(self, chunks: Sequence[Chunk]) -> Step:
        batch = len(chunks)
        counts = [chunk.count for chunk in chunks]
        lengths = [chunk.start + chunk.count for chunk in chunks]
        tokens = [id_ for x in chunks for id_ in x.request.ids[x.start : x.start + x.count]]
        self._staging.send(
            [
                (self._token_ids[: len(tokens)], tokens),
                (self._kv_lens[:batch], lengths),
                (self._cu_q_lens[: batch + 1], [0, *accumulate(counts)]),
            ]
        )
        for row, (chunk, length) in enumerate(zip(chunks, lengths, strict=True)):
            pages = self._pool.pages(chunk.request, 0, self._pool.pages_for(length))
            self._tables.write(row, 0, pages)
        self._tables.flush()
        return Step.make(
            self._arena,
            token_ids=self._token_ids[: len(tokens)],
            kv_lens=self._kv_lens[:batch],
            page_table=self._tables.tensor[:batch],
            caches=self._caches,
            max_kv_len=max(lengths),
            cu_q_lens=self._cu_q_lens[: batch + 1],
            max_q_len=max(counts),
            max_total_kv=sum(lengths),
            num_sms=self._num_sms,
        )

    def _draw(self, chunks: Sequence[Chunk], logits: torch.Tensor) -> torch.Tensor:
        n, params = len(chunks), [chunk.request.params for chunk in chunks]
        self._staging.send(
            [
                (self._temperature[:n], [p.temperature for p in params]),
                (self._top_k[:n], [p.top_k for p in params]),
                (self._top_p[:n], [p.top_p for p in params]),
                (self._min_p[:n], [p.min_p for p in params]),
                (self._seeds[:n], [chunk.request.seed for chunk in chunks]),
            ]
        )
        return ops.sample(
            logits,
            temperature=self._temperature[:n],
            top_k=self._top_k[:n],
            top_p=self._top_p[:n],
            min_p=self._min_p[:n],
            seeds=self._seeds[:n],
            # as a decode graph counts: the tokens in front of the one that is drawn
            steps=self._kv_lens[:n],
            out=self._drawn[:n],
            num_sms=self._num_sms,
        )
