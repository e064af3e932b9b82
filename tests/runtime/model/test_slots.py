"""Rows of requests: who sits where, and what the device hears of it."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smkern.errors import ArgumentError
from smkern.kv import PagePool
from smkern.runtime.executor import PrefillChunk
from smkern.runtime.model.input_batch import InputBatch
from smkern.runtime.model.row_state import RowState
from smkern.runtime.model.row_updates import STAGE_WORDS, Records
from smkern.runtime.request import Request
from tests.runtime.model.slot_rows import (
    CONTEXT,
    PREFILL,
    RUNNING,
    Play,
    new_pool,
    new_request,
    new_state,
)


class CountingSender:
    """Keeps what was sent."""

    nbytes = 0

    def __init__(self) -> None:
        self.sent: list[Records] = []

    def send(self, records: Records) -> None:
        self.sent.append(records)


def a_request(index: int, length: int = 3) -> Request:
    request = new_request(index, Random(index))
    request.ids = [index] * length
    request.prompt_len = length
    return request


def seated(
    count: int, pool: PagePool | None = None
) -> tuple[InputBatch, list[Request], CountingSender]:
    """A table in which so many requests of 3 tokens sit, and what it sends from then on."""
    pool, sender = pool or new_pool(), CountingSender()
    table = InputBatch(new_state(), pool, sender=sender)
    requests = [a_request(i) for i in range(count)]
    for request in requests:
        pool.allocate(request, request.ids, num_tokens=CONTEXT)
    table.arrange(requests, [3] * count)
    table.take().send()
    sender.sent.clear()
    return table, requests, sender


@settings(max_examples=40)
@given(st.integers(0, 10**6))
def test_rows_hold_what_their_requests_have(seed: int) -> None:
    pool = new_pool()
    play = Play(InputBatch(new_state(), pool), pool, Random(seed))
    for _ in range(12):
        play.turn()
        pool.check()


def test_nothing_is_sent_where_nothing_changed() -> None:
    table, requests, sender = seated(4)
    assert table.arrange(requests, [4] * 4) == tuple(requests)
    table.take().send()
    assert sender.sent == []


def test_pages_that_a_request_got_are_sent_alone() -> None:
    pool = new_pool()
    table, requests, sender = seated(4, pool)
    table.arrange(requests, [4, 4, 5, 4])
    table.take().send()
    (records,) = sender.sent
    row = table.state.first_slot + 2
    assert records.words == [row, -1, 0, 0, 1, 1, 0, 0]
    assert records.numbers == [pool.pages(requests[2])[1]]


def test_the_last_request_moves_into_a_gap() -> None:
    table, requests, sender = seated(4)
    stay = [requests[3], requests[0], requests[2]]
    assert table.arrange(stay, [3] * 3) == (requests[0], requests[3], requests[2])
    table.take().send()
    (records,) = sender.sent
    first = table.state.first_slot
    assert (records.targets, records.sources) == ({first + 1}, {first + 3})


def test_an_update_is_sent_once() -> None:
    table, requests, sender = seated(2)
    table.arrange(requests[:1], [3])
    update = table.take()
    assert not update.sent
    update.send()
    update.send()
    assert (update.sent, len(sender.sent)) == (True, 1)


def test_what_was_dropped_goes_with_the_next_update_in_order() -> None:
    """Also where that one changes nothing: its launch reads the rows that were told to move."""
    pool, sender = new_pool(), CountingSender()
    table = InputBatch(new_state(), pool, sender=sender, in_order=True)
    requests = [a_request(i) for i in range(2)]
    for request in requests:
        pool.allocate(request, request.ids, num_tokens=CONTEXT)
    table.arrange(requests, [3, 3])
    dropped = table.take()
    table.arrange(requests, [3, 3])
    table.take().send()
    assert dropped.sent
    assert len(sender.sent) == 1


def test_what_was_dropped_goes_with_the_next_update_of_slots() -> None:
    table, requests, sender = seated(3)
    table.arrange(requests[1:], [3, 3])
    dropped = table.take()
    table.arrange(requests[1:], [5, 3])
    table.take().send()
    assert dropped.sent
    assert len(sender.sent) == 2


def test_an_update_of_prefill_rows_does_not_wait_for_one_of_slots() -> None:
    pool = new_pool()
    table, requests, sender = seated(2, pool)
    prefill_row = a_request(7)
    pool.allocate(prefill_row, prefill_row.ids)
    table.arrange(requests[1:], [3])
    slots = table.take()
    table.write_prefill_rows(0, [PrefillChunk(prefill_row, 0, 3, draws=True)])
    table.take().send()
    assert (slots.sent, len(sender.sent)) == (False, 1)


def test_a_row_is_read_by_a_launch_of_its_own_before_it_is_written() -> None:
    pool = new_pool()
    table = InputBatch(new_state(), pool)
    first, second = a_request(1), a_request(2, length=9)
    for request in (first, second):
        pool.allocate(request, request.ids, num_tokens=CONTEXT)
    row = table.state.first_slot - 1
    table.write_prefill_rows(row, [PrefillChunk(first, 0, 3, draws=True)])
    table.take().send()
    table.arrange([first], [4], {first: row})
    table.write_prefill_rows(row, [PrefillChunk(second, 0, 9, draws=True)])
    update = table.take()
    assert len(update.launches) == 2
    update.send()
    inputs = table.state.inputs(row, 2)
    assert inputs.kv_lens.tolist() == [9, 3]
    assert inputs.finished.tolist() == [False, False]


def test_more_than_a_stage_holds_is_several_launches() -> None:
    pages = STAGE_WORDS + 100
    pool, request = LongPool(), a_request(0)
    state = RowState.make(max_running=2, max_prefill=1, max_pages=pages, device="cpu")
    table = InputBatch(state, pool)
    table.arrange([request], [pages])
    update = table.take()
    sizes = [len(x.words) + len(x.numbers) for x in update.launches]
    assert len(sizes) == 2
    assert max(sizes) <= STAGE_WORDS
    update.send()
    assert state.page_table[state.first_slot].tolist() == list(range(1, pages + 1))


class LongPool:
    """Pages of one token for ever."""

    page_size = 1

    def pages(self, request: object, start: int = 0, stop: int | None = None) -> tuple[int, ...]:
        assert stop is not None
        return tuple(range(start + 1, stop + 1))


def test_a_forgotten_request_comes_anew() -> None:
    table, requests, sender = seated(2)
    table.forget(requests[0])
    requests[0].ids += [9, 9]
    table.arrange(requests, [5, 3])
    table.take().send()
    (records,) = sender.sent
    assert records.targets == {table.state.first_slot}
    assert records.numbers[:2] == [9, 5]


def test_arrangements_that_cannot_be_are_refused() -> None:
    table, requests, _ = seated(2)
    many = [a_request(i) for i in range(RUNNING + 1)]
    cases = [
        (many, [3] * len(many), {}, f"{RUNNING} rows"),
        (requests[:1] * 2, [3, 3], {}, "twice"),
        (requests[:1], [3, 3], {}, "2 lengths for 1"),
        (requests, [3], {}, "1 lengths for 2"),
        (requests, [3, 3], {requests[0]: 0}, "not in prefill row 0"),
        (requests, [3, CONTEXT + 1], {}, "a row has 12 pages of 4"),
    ]
    for asked, lengths, prefill_rows, words in cases:
        with pytest.raises(ArgumentError, match=words):
            table.arrange(asked, lengths, prefill_rows)


def test_pages_that_the_pool_never_gave_are_refused() -> None:
    pool = new_pool()
    table, requests, sender = seated(2, pool)
    short = a_request(5)
    pool.allocate(short, short.ids)
    with pytest.raises(ArgumentError, match="has 1 pages of 4: extend it"):
        table.arrange([short, requests[1]], [9, 3])
    table.arrange(requests, [3, 3])
    table.take().send()
    assert sender.sent == []


def test_prefill_batches_have_rows_of_their_own() -> None:
    table, requests, _ = seated(1)
    with pytest.raises(ArgumentError, match="prefill rows are 0 to 5"):
        table.write_prefill_rows(2 * PREFILL, [PrefillChunk(requests[0], 0, 3, draws=True)])


@pytest.mark.parametrize(
    "wrong", [{"max_running": 0}, {"max_prefill": 0}, {"max_pages": 0}, {"max_stop_tokens": 65}]
)
def test_sizes_of_rows_are_checked(wrong: dict[str, int]) -> None:
    sizes = {"max_running": 2, "max_prefill": 1, "max_pages": 1} | wrong
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        RowState.make(device="cpu", **sizes)
