"""The pool on a GPU: sized from free memory, numbers copied in stream order, real events."""

from __future__ import annotations

import pytest
import torch

from smkern.errors import OutOfPagesError
from smkern.kv import KvPool, KvSizes, Staging

SIZES = KvSizes(2, num_kv_heads=2, head_dim=128)


def test_a_pool_takes_a_fraction_of_free_memory() -> None:
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    pool = KvPool(SIZES, memory_fraction=0.05, device="cuda")
    wanted = int(0.05 * free) // SIZES.page_bytes
    assert abs(pool.num_pages - wanted) <= wanted // 100 + 1
    assert pool.storage.nbytes == pool.num_pages * SIZES.page_bytes
    with pytest.raises(OutOfPagesError, match="raise memory_fraction"):
        KvPool(SIZES, memory_fraction=1e-12, device="cuda")


def test_numbers_change_in_the_order_of_the_stream() -> None:
    """Copies of many sends are in flight behind a busy stream; each read sees its own."""
    table = torch.zeros(4, 512, dtype=torch.int32, device="cuda")
    staging = Staging(table.device)
    seen, wanted = [], []
    torch.cuda._sleep(50_000_000)
    for turn in range(3):
        new = [100 * turn + i for i in range(8)]
        staging.send([(table[1, 8 * turn : 8 * turn + 8], new), (table[3], [turn] * 512)])
        seen.append(table.clone())
        expected = torch.zeros(4, 512, dtype=torch.int32)
        for earlier in range(turn + 1):
            ids = [100 * earlier + i for i in range(8)]
            expected[1, 8 * earlier : 8 * earlier + 8] = torch.tensor(ids)
        expected[3] = turn
        wanted.append(expected)
    for got, expected in zip(seen, wanted, strict=True):
        assert torch.equal(got.cpu(), expected)


def test_many_sends_reuse_their_pinned_memory() -> None:
    table = torch.zeros(2, 4096, dtype=torch.int32, device="cuda")
    staging = Staging(table.device)
    for turn in range(20):
        pages = [turn * 5000 + i for i in range(1 + 200 * turn)]
        row = table[turn % 2, : len(pages)]
        staging.send([(row, pages)])
        assert row.tolist() == pages


def test_pages_wait_for_the_event_of_their_reader() -> None:
    pool = KvPool(SIZES, num_pages=4, device="cuda")
    stream = torch.cuda.Stream()
    pool.allocate("a", [1] * 64)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        event = torch.cuda.Event()
        event.record(stream)
    pool.release("a", event)
    assert pool.poll() == 1
    with pytest.raises(OutOfPagesError):
        pool.allocate("b", [2] * 64)
    event.synchronize()
    assert pool.allocate("b", [2] * 64) == 0
    pool.check()
