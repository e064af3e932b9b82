"""A pool without memory: the same as one with, by the same code."""

from __future__ import annotations

import pytest

from smkern.errors import ArgumentError, OutOfPagesError
from smkern.kv import KvPool, KvSizes, PagePool


def test_pools_with_and_without_memory_agree() -> None:
    sizes = KvSizes(1, num_kv_heads=1, head_dim=64, page_size=16)
    prompt = list(range(40))
    seen = []
    for pool in (PagePool(6, 16), KvPool(sizes, num_pages=6, device="cpu")):
        cached = [pool.allocate("a", prompt)]
        pool.commit("a", prompt)
        cached.append(pool.allocate("b", prompt, num_tokens=60))
        with pytest.raises(OutOfPagesError):
            pool.extend("b", 100)
        rooms = (pool.room("a"), pool.room("b"))
        pool.release("a")
        pool.check()
        seen.append((cached, rooms, pool.usage, pool.pages("b"), pool.requests, pool.page_size))
    assert seen[0] == seen[1]
    assert seen[0][:2] == ([0, 32], (48, 64))


def test_room_of_a_request_without_pages_is_refused() -> None:
    with pytest.raises(ArgumentError, match="holds no pages"):
        PagePool(4, 16).room("a")


@pytest.mark.parametrize(("pages", "size"), [(0, 16), (4, 0)])
def test_pools_without_pages_are_refused(pages, size) -> None:
    with pytest.raises(ArgumentError, match="at least 1"):
        PagePool(pages, size)
