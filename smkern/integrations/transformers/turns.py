"""Cosines and sines of a step's tokens, in memory that outlives streams and graphs."""

from __future__ import annotations

import torch
from torch import Tensor

from smkern.models.step import Step
from smkern.ops.streams import Home


class Turns:
    """The rotary embedding of each token of a step, found once a step on the device.

    Steps that may run side by side have residual streams of their own, so their memory names the
    rows here. What grew stays for graphs that were captured with it; all of it is allocated on the
    stream that was current first, so that a partition owns none.

    Args:
        cos: [positions, rotary_dim], the model's dtype.
        sin: Likewise.
    """

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self._table = cos, sin
        self._home = Home(cos.device)
        self._rows: dict[int, Tensor] = {}
        self._outgrown: list[Tensor] = []

    def set(self, step: Step) -> None:
        """Find the rows of a step, on the current stream."""
        positions = positions_of(step)
        rows = self._room(step.buffers.hidden.data_ptr(), step.num_tokens)
        for table, out in zip(self._table, rows, strict=True):
            torch.index_select(table, 0, positions, out=out[: step.num_tokens])

    def get(self, step: Step) -> tuple[Tensor, Tensor] | None:
        """[1, tokens, rotary_dim] cosines and sines; None: `set` never saw such a step."""
        rows = self._rows.get(step.buffers.hidden.data_ptr())
        if rows is None or rows.shape[1] < step.num_tokens:
            return None
        return rows[0, None, : step.num_tokens], rows[1, None, : step.num_tokens]

    def _room(self, key: int, tokens: int) -> Tensor:
        held = self._rows.get(key)
        if held is not None and held.shape[1] >= tokens:
            return held
        if held is not None:
            self._outgrown.append(held)
        room = 1 << max(tokens - 1, 0).bit_length()
        table = self._table[0]
        rows = self._rows[key] = self._home.make(lambda: table.new_empty(2, room, table.shape[1]))
        return rows


def positions_of(step: Step) -> Tensor:
    """[tokens] positions in their requests; lengths are not read on the host."""
    if step.cu_q_lens is None:
        found = step.kv_lens - 1
    else:
        tokens = torch.arange(step.num_tokens, dtype=torch.int32, device=step.kv_lens.device)
        ends = step.cu_q_lens[1:]
        rows = torch.searchsorted(ends, tokens, right=True).clamp_(max=step.batch - 1)
        found = tokens + (step.kv_lens - ends).index_select(0, rows)
    # rows of padding have no keys, tokens behind the last request belong to none
    return found.clamp_(min=0, max=step.max_kv_len - 1)
