"""Rows of requests on a GPU: changed in the order of streams, without waiting or loading."""

from __future__ import annotations

from contextlib import nullcontext
from random import Random
from typing import Any

import pytest
import torch

import smkern
from smkern.models import SamplingParams
from smkern.runtime.executor import PrefillChunk
from smkern.runtime.model.input_batch import InputBatch
from smkern.runtime.model.row_state import RowState
from smkern.runtime.model.row_updates import STAGES
from smkern.runtime.request import Request
from tests.runtime.model.slot_rows import Play, new_pool, new_state

LONG = 200_000_000
"""Cycles, some 0.1 s: the host is far ahead of the device."""


class EndlessPool:
    """Pages of one token, named by request and entry."""

    page_size = 1

    def pages(self, request: Any, start: int = 0, stop: int | None = None) -> tuple[int, ...]:
        assert stop is not None
        return tuple(1000 * request.index + entry for entry in range(start, stop))


def a_request(index: int, length: int) -> Request:
    return Request(index, SamplingParams(), index, frozenset(), 500, [index] * length, length)


def a_table(running: int = 4, max_pages: int = 400) -> InputBatch:
    state = RowState.make(
        max_running=running, max_prefill=2, max_pages=max_pages, device="cuda", max_stop_tokens=2
    )
    return InputBatch(state, EndlessPool())


@pytest.mark.parametrize("place", ["device", "partition"])
def test_rows_hold_what_their_requests_have(place: str, ladder: smkern.Ladder) -> None:
    partition = ladder.split(decode=16).decode if place == "partition" else nullcontext()
    for seed in range(3):
        pool, state = new_pool(), new_state("cuda")
        play = Play(InputBatch(state, pool), pool, Random(seed))
        with partition:
            for _ in range(10):
                play.turn()
            torch.cuda.current_stream().synchronize()
        del play, state


def test_more_updates_than_stages_while_the_device_is_behind() -> None:
    table, requests = a_table(), [a_request(i, 3) for i in range(4)]
    table.arrange(requests, [3] * 4)
    table.take().send()
    torch.cuda._sleep(LONG)
    for step in range(3 * STAGES):
        table.arrange(requests, [4 + step] * 4)
        table.take().send()
    first, last = table.state.first_slot, 3 + 3 * STAGES
    found = table.state.page_table[first:, :last].tolist()
    assert found == [[1000 * i + entry for entry in range(last)] for i in range(4)]


def test_a_long_context_moves_whole() -> None:
    """More entries than a stage holds come in several launches, and move in one."""
    length = 20_000
    table = a_table(2, length)
    requests = [a_request(1, 3), a_request(2, 3)]
    table.arrange(requests, [3, length])
    table.take().send()
    table.arrange(requests[1:], [length])
    table.take().send()
    row = table.state.page_table[table.state.first_slot].tolist()
    assert row == list(range(2000, 2000 + length))
    assert table.state.finished.tolist() == [True] * 4 + [False, True]


def test_a_prefill_row_is_overwritten_behind_its_move_on_another_stream() -> None:
    table = a_table()
    old, new = a_request(1, 300), a_request(2, 350)
    row = table.state.first_slot - 1
    table.write_prefill_rows(row, [PrefillChunk(old, 0, 300, draws=True)])
    table.take().send()
    decode, prefill = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(decode):
        torch.cuda._sleep(LONG)
        table.arrange([old], [301], {old: row})
        table.take().send()
    with torch.cuda.stream(prefill):
        table.write_prefill_rows(row, [PrefillChunk(new, 0, 350, draws=True)])
        table.take().send()
    torch.cuda.synchronize()
    inputs = table.state.inputs(row, 2)
    assert inputs.kv_lens.tolist() == [350, 300]
    assert inputs.page_table[0, :350].tolist() == list(range(2000, 2350))
    assert inputs.page_table[1, :301].tolist() == list(range(1000, 1301))
    assert inputs.finished.tolist() == [False, False]


def test_nothing_is_loaded_or_allocated_by_an_update() -> None:
    table, requests = a_table(64), [a_request(i, 3) for i in range(64)]
    counters, memory = smkern.counters(), torch.cuda.memory_allocated()
    for count in (1, 64, 40, 3, 0, 64):
        table.arrange(requests[:count], [50] * count)
        table.take().send()
        table.write_prefill_rows(0, [PrefillChunk(a_request(99, 9), 0, 9, draws=False)])
        table.take().send()
    assert smkern.counters() == counters
    assert torch.cuda.memory_allocated() == memory
    assert table.nbytes >= table.state.nbytes
