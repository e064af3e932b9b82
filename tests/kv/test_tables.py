"""Page tables: only what was written changes, at the flush."""

from __future__ import annotations

import pytest
import torch

from smkern.errors import ArgumentError
from smkern.kv import KvPool, KvSizes, PageTables


def test_a_flush_writes_what_was_asked_and_nothing_else() -> None:
    tables = PageTables(3, 4, device="cpu")
    tables.tensor.fill_(-9)
    tables.write(2, 1, [5, 6])
    tables.write(0, 0, [1])
    tables.write(2, 1, [7])
    assert (tables.tensor == -9).all()
    tables.flush()
    wanted = [[1, -9, -9, -9], [-9, -9, -9, -9], [-9, 7, 6, -9]]
    assert tables.tensor.tolist() == wanted
    tables.flush()
    assert tables.tensor.tolist() == wanted


@pytest.mark.parametrize(("row", "start", "pages"), [(3, 0, [1]), (-1, 0, [1]), (0, 3, [1, 2])])
def test_entries_outside_are_named(row: int, start: int, pages: list[int]) -> None:
    tables = PageTables(3, 4, device="cpu")
    with pytest.raises(ArgumentError, match="the tables have 3 rows of 4"):
        tables.write(row, start, pages)


def test_a_pool_makes_tables_for_tokens() -> None:
    pool = KvPool(KvSizes(1, 1, 64), num_pages=2, device="cpu")
    tables = pool.page_tables(5, 33)
    assert tables.tensor.shape == (5, 3)
    assert tables.tensor.dtype is torch.int32
