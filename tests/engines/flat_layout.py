"""FlashInfer's layout of a cache with pages of one token, and a forward's rows that read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(slots=True, eq=False)
class Batch:
    """Tokens of a forward, where their keys are, and the residual stream.

    Attributes:
        ids, positions: [tokens].
        kv_lens: [batch].
        indptr, indices: The slots of request i are indices[indptr[i]:indptr[i + 1]].
        hidden: [tokens, hidden]; outlives a layer, so it is not allocated in one.
        drawn: [batch], the token behind each request; `host` gets it, pinned beside a GPU.
        cu_q_lens: [batch + 1]; None: a token a request.
        max_q_len: Of a request, the same for every batch so that no kernel is special to one.
    """

    ids: Tensor
    positions: Tensor
    kv_lens: Tensor
    indptr: Tensor
    indices: Tensor
    hidden: Tensor
    drawn: Tensor
    host: Tensor
    cu_q_lens: Tensor | None = None
    max_q_len: int | None = None

    @classmethod
    def make(cls, hidden: Tensor, batch: int, slots: int, *, ragged: bool) -> Batch:
        """For as many tokens as `hidden` has rows, and requests that hold so many slots."""
        tokens, device = hidden.shape[0], hidden.device

        def ints(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        drawn = torch.zeros(batch, dtype=torch.int64, device=device)
        host = torch.zeros(batch, dtype=torch.int64, pin_memory=device.type == "cuda")
        return cls(
            ints(tokens), ints(tokens), ints(batch), ints(batch + 1), ints(slots), hidden, drawn,
            host, ints(batch + 1) if ragged else None, tokens if ragged else None,
        )  # fmt: skip

    def first(self, tokens: int) -> Batch:
        """The same with fewer tokens."""
        return Batch(
            self.ids[:tokens], self.positions[:tokens], self.kv_lens, self.indptr, self.indices,
            self.hidden[:tokens], self.drawn, self.host, self.cu_q_lens, self.max_q_len,
        )  # fmt: skip

    def send(self, requests: Sequence[tuple[list[int], list[int], int]], pads: int = 0) -> None:
        """Each request's (ids, slots, first token that is new); rows of padding have no keys."""
        lens, nothing = [len(ids) for ids, _, _ in requests], [0] * pads
        new = [range(start, len(ids)) for ids, _, start in requests]
        _put(self.ids, [x[0][i] for x, r in zip(requests, new, strict=True) for i in r] + nothing)
        _put(self.positions, [i for r in new for i in r] + nothing)
        _put(self.kv_lens, lens + nothing)
        _put(self.indptr, [*accumulate(lens + nothing, initial=0)])
        _put(self.indices, [slot for ids, slots, _ in requests for slot in slots[: len(ids)]])
        if self.cu_q_lens is not None:
            _put(self.cu_q_lens, [*accumulate(map(len, new), initial=0)])


def _put(target: Tensor, values: Sequence[int]) -> None:
    """Into the front of a tensor, in the stream's order, without waiting for the stream."""
    source = torch.tensor(values, dtype=target.dtype, pin_memory=target.is_cuda)
    target[: len(values)].copy_(source, non_blocking=True)
