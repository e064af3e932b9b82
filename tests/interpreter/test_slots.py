"""The kernel that changes rows of requests, interpreted, against what the rows must hold."""

from __future__ import annotations

from random import Random

import pytest
import torch

from smkern.kernels import slots_triton
from smkern.kernels.slots_launch import RECORD, SlotVariant
from smkern.runtime.model.input_batch import InputBatch
from smkern.runtime.model.row_state import RowState
from smkern.runtime.model.row_updates import HostSender, Records, RowChange, RowUpdate
from tests.runtime.model.slot_rows import Play, new_pool, new_state


class InterpretedSender:
    """Makes changes by the kernel, on a grid."""

    nbytes = 0

    def __init__(self, state: RowState, ctas: int) -> None:
        self.state, self.ctas = state, ctas

    def send(self, records: Records) -> None:
        state = self.state
        layout = state.layout
        slots_triton.update_slots[(self.ctas,)](
            state.words,
            state.finished.view(torch.uint8),
            state.page_table,
            torch.tensor(records.words + records.numbers, dtype=torch.int32),
            len(records.words) // RECORD,
            layout.rows,
            layout.max_pages,
            **SlotVariant(layout.stop_tokens, 80).constants,
        )


@pytest.mark.parametrize(("seed", "ctas"), [(0, 1), (1, 3), (2, 16)])
def test_rows_hold_what_their_requests_have(seed: int, ctas: int) -> None:
    pool, state = new_pool(), new_state()
    play = Play(InputBatch(state, pool, sender=InterpretedSender(state, ctas)), pool, Random(seed))
    for _ in range(15):
        play.turn()


def filled(stop_tokens: int, max_pages: int) -> RowState:
    """Rows of which no two hold the same."""
    state = RowState.make(
        max_running=5, max_prefill=2, max_pages=max_pages, device="cpu", max_stop_tokens=stop_tokens
    )
    state.words.copy_(torch.arange(state.words.numel()))
    state.page_table.copy_(torch.arange(state.page_table.numel()).view_as(state.page_table))
    state.finished[::2] = False
    return state


@pytest.mark.parametrize(("stop_tokens", "max_pages"), [(0, 1), (1, 7), (8, 1300), (64, 512)])
def test_each_change_touches_its_rows_alone(stop_tokens: int, max_pages: int) -> None:
    """Moves, values, pages and ends of rows in one launch, word for word as in plain torch."""
    wanted, found = (filled(stop_tokens, max_pages) for _ in range(2))
    half, values = max_pages // 2, tuple(range(-5, wanted.layout.values - 5))
    changes = [
        RowChange(0, source=8, taken=max_pages),
        RowChange(1, source=5, taken=half, first=half, pages=range(90, 90 + max_pages - half)),
        RowChange(2, values=values, flags=2, first=0, pages=[77]),
        RowChange(3, flags=2 | 4),
        RowChange(4, first=max_pages - 1, pages=[99]),
    ]
    for state, sender in ((wanted, HostSender(wanted)), (found, InterpretedSender(found, 2))):
        update = RowUpdate(state, sender, None)
        update.put(changes)
        (records,) = update.launches
        assert len(records.words) == 5 * RECORD
        update.send()
    assert torch.equal(found.words, wanted.words)
    assert torch.equal(found.finished, wanted.finished)
    assert torch.equal(found.page_table, wanted.page_table)
    assert found.finished[[8, 5, 3]].all()
