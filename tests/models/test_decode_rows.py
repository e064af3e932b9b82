"""Rows of a decode batch: without gaps, and on the device what their requests have."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smkern.kv import KvPool, KvSizes
from smkern.models import SamplingParams
from smkern.models.decode_rows import DecodeRows, batch_bucket, context_bucket
from smkern.models.request import Request

BATCH, CONTEXT = 6, 64


def new_request(index: int) -> Request:
    params = SamplingParams(temperature=index / 4, top_k=index, top_p=0.5, min_p=0.25)
    ids = [index + 1] * (1 + index % 5)
    return Request(index, params, 100 + index, frozenset(), 50, ids, len(ids))


def assert_rows(rows: DecodeRows, pool: KvPool, wanted: set[Request]) -> None:
    assert set(rows.requests) == wanted
    assert len(rows.requests) == len(wanted)
    inputs = rows.inputs(BATCH)
    assert inputs.finished.tolist() == [False] * len(wanted) + [True] * (BATCH - len(wanted))
    for row, request in enumerate(rows.requests):
        pages = pool.pages(request)
        assert inputs.page_table[row, : len(pages)].tolist() == list(pages)
        assert int(inputs.token_ids[row]) == request.ids[-1]
        assert int(inputs.kv_lens[row]) == len(request.ids)
        assert int(inputs.seeds[row]) == request.seed
        assert float(inputs.temperature[row]) == request.params.temperature
        assert int(inputs.top_k[row]) == request.params.top_k
        assert (float(inputs.top_p[row]), float(inputs.min_p[row])) == (0.5, 0.25)


def replay(rows: DecodeRows, token: int) -> None:
    """What a graph does to its inputs, and the host to its requests."""
    count = len(rows.requests)
    inputs = rows.inputs(count)
    inputs.token_ids.fill_(token)
    inputs.kv_lens.add_(1)
    assert rows.tokens() == [token] * count
    for request in rows.requests:
        request.ids.append(token)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sets(st.integers(0, 9), max_size=BATCH), min_size=1, max_size=12))
def test_rows_follow_their_requests(batches: list[set[int]]) -> None:
    """Requests come, leave and come back with other pages, between replays."""
    pool = KvPool(KvSizes(1, 1, 64, page_size=1), num_pages=10 * CONTEXT, device="cpu")
    rows, requests = DecodeRows(pool, BATCH, CONTEXT), [new_request(i) for i in range(10)]
    for turn, batch in enumerate(batches):
        wanted = {requests[i] for i in batch}
        for request in requests:
            if request in pool.requests and request not in wanted:
                pool.release(request)
            elif request in pool.requests:
                pool.extend(request, len(request.ids))
            elif request in wanted:
                pool.allocate(request, request.ids)
        rows.arrange(sorted(wanted, key=lambda x: x.index))
        assert_rows(rows, pool, wanted)
        replay(rows, turn)
        pool.check()


def test_a_row_that_stays_is_not_sent_again() -> None:
    pool = KvPool(KvSizes(1, 1, 64), num_pages=8, device="cpu")
    rows, request = DecodeRows(pool, BATCH, CONTEXT), new_request(0)
    pool.allocate(request, request.ids)
    rows.arrange([request])
    inputs = rows.inputs(1)
    inputs.seeds.fill_(-5)
    inputs.page_table.fill_(-5)
    rows.arrange([request])
    assert inputs.seeds.tolist() == [-5]
    assert (inputs.page_table == -5).all()
    pool.extend(request, 17)
    request.ids += [1] * (17 - len(request.ids))
    rows.arrange([request])
    assert inputs.page_table[0, :3].tolist() == [-5, pool.pages(request)[1], -5]


def test_cleared_rows_are_sent_anew() -> None:
    pool = KvPool(KvSizes(1, 1, 64), num_pages=8, device="cpu")
    rows, request = DecodeRows(pool, BATCH, CONTEXT), new_request(1)
    pool.allocate(request, request.ids)
    rows.arrange([request])
    rows.inputs(BATCH).finished.fill_(True)
    rows.inputs(BATCH).page_table.fill_(99)
    rows.clear()
    rows.arrange([request])
    assert_rows(rows, pool, {request})


@pytest.mark.parametrize(
    ("batch", "rows"), [(1, 1), (2, 2), (3, 4), (9, 16), (16, 16), (17, 32), (40, 48), (99, 100)]
)
def test_buckets_of_batches(batch: int, rows: int) -> None:
    assert batch_bucket(batch, 100) == rows


def test_buckets_of_contexts() -> None:
    lengths = [1, 2048, 2049, 8192, 8193, 30_000]
    wanted = [2048, 2048, 8192, 8192, 30_000, 30_000]
    assert [context_bucket(x, 30_000) for x in lengths] == wanted


def test_inputs_of_all_sizes_are_one_memory() -> None:
    pool = KvPool(KvSizes(1, 1, 64), num_pages=8, device="cpu")
    rows = DecodeRows(pool, BATCH, CONTEXT)
    small, large = rows.inputs(2), rows.inputs(BATCH)
    assert small.token_ids.data_ptr() == large.token_ids.data_ptr()
    assert small.page_table.shape == (2, CONTEXT // 16)
    assert large.token_ids.dtype is torch.int32
