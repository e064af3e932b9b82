"""What the device keeps of each running request: arrays of rows, and views of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from smkern.kernels.slots_launch import FIELDS, SlotLayout
from smkern.models.graph import DecodeInputs
from smkern.ops.checks import as_int

STOP_TOKENS = 8
"""Stop tokens of a row, unless told otherwise; the host looks for all that a request has."""
MAX_STOP_TOKENS = 64
"""One warp moves a row's values."""
_ALIGNED_ROWS = 16


@dataclass(frozen=True, slots=True, eq=False)
class RowState:
    """Arrays with a row a request: rows of prompts first, then the slots that decode.

    With C = max_prefill and B = max_running, rows [0, 2C) are for prompts, [2C, 2C + B) the slots.
    The chunks of a mixed step have the last rows for prompts: they and the requests that decode are
    one range, [2C - chunks, 2C + batch), and nothing is gathered.

    A row means what `DecodeInputs` says. All rows are finished at first.

    Attributes:
        layout: Layout of `words`.
        words: All values but the next two in one array, of which `inputs` gives views.
        finished: [rows] bool.
        page_table: [rows, max_pages] int32; entries never written are 0.
        max_prefill: C.
        max_running: B.

    Example:
        >>> state = RowState.make(max_running=4, max_prefill=2, max_pages=8, device="cpu")
        >>> state.first_slot, state.num_rows
        (4, 8)
        >>> state.inputs(3, 5).token_ids.shape
        torch.Size([5])
    """

    layout: SlotLayout
    words: Tensor
    finished: Tensor
    page_table: Tensor
    max_prefill: int
    max_running: int

    @classmethod
    def make(
        cls,
        *,
        max_running: int,
        max_prefill: int,
        max_pages: int,
        device: torch.device | str,
        max_stop_tokens: int = STOP_TOKENS,
    ) -> RowState:
        """Rows of which every one is finished.

        Args:
            max_running: Requests that decode at a time.
            max_prefill: Half of the rows for prompts.
            max_pages: Pages of a request.
            device: Where the arrays are.
            max_stop_tokens: Stop tokens of a row.

        Raises:
            ArgumentError: sizes below 1; stop tokens below 0 or above 64.
        """
        as_int("max_running", max_running, 1)
        as_int("max_prefill", max_prefill, 1)
        as_int("max_pages", max_pages, 1)
        as_int("max_stop_tokens", max_stop_tokens, 0, MAX_STOP_TOKENS)
        rows = 2 * max_prefill + max_running
        aligned = -(-rows // _ALIGNED_ROWS) * _ALIGNED_ROWS
        layout = SlotLayout(aligned, max_pages, max(max_stop_tokens, 1))
        state = cls(
            layout,
            torch.zeros(layout.size, dtype=torch.int32, device=device),
            torch.ones(rows, dtype=torch.bool, device=device),
            torch.zeros(rows, max_pages, dtype=torch.int32, device=device),
            max_prefill,
            max_running,
        )
        inputs = state.inputs(0, rows)
        inputs.max_lengths.fill_(2**31 - 1)
        inputs.stop_tokens.fill_(-1)
        inputs.top_p.fill_(1.0)
        return state

    @property
    def device(self) -> torch.device:
        """Where the arrays are."""
        return self.words.device

    @property
    def num_rows(self) -> int:
        """2C + B."""
        return 2 * self.max_prefill + self.max_running

    @property
    def first_slot(self) -> int:
        """The row of slot 0: 2C."""
        return 2 * self.max_prefill

    @property
    def nbytes(self) -> int:
        """Device memory, bytes."""
        return self.words.nbytes + self.finished.nbytes + self.page_table.nbytes

    def inputs(self, first: int, count: int) -> DecodeInputs:
        """Views of rows [first, first + count): what a graph, a prefill or a mixed step reads.

        The slots of a decode batch of b are `inputs(state.first_slot, b)`.
        """
        assert 0 <= first <= first + count <= self.num_rows, (first, count, self.num_rows)
        step, rows = self.layout.rows, slice(first, first + count)
        fields = self.words[: FIELDS * step].view(FIELDS, step)
        floats = fields.view(torch.float32)
        token_ids, kv_lens, max_lengths, _, top_k, _, _ = (fields[i, rows] for i in range(FIELDS))
        temperature, top_p, min_p = (floats[i, rows] for i in (3, 5, 6))
        seeds = self.words[FIELDS * step : (FIELDS + 2) * step].view(torch.int64)
        stop = self.words[(FIELDS + 2) * step :].view(step, self.layout.stop_tokens)
        return DecodeInputs(
            token_ids=token_ids,
            kv_lens=kv_lens,
            page_table=self.page_table[rows],
            finished=self.finished[rows],
            max_lengths=max_lengths,
            stop_tokens=stop[rows],
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seeds=seeds[rows],
        )
