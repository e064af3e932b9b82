"""Tokens known by their number and the names of their blocks share pages as real ones do."""

from __future__ import annotations

from random import Random

import pytest

from smkern.errors import ArgumentError
from smkern.kv import PagePool, VirtualTokens


def test_pages_are_shared_as_far_as_names_are():
    pool = PagePool(200, 64)
    pool.allocate("a", VirtualTokens(1300, (1, 2, 3)))
    pool.commit("a", range(1300))
    assert pool.match_prefix(VirtualTokens(1300, (1, 2, 3))) == 1280  # the third block's 4 pages
    assert pool.match_prefix(VirtualTokens(1600, (1, 2, 3, 4))) == 1280
    assert pool.match_prefix(VirtualTokens(1300, (1, 9, 3))) == 512
    assert pool.match_prefix(VirtualTokens(1300, (2, 1))) == 0
    assert pool.match_prefix(VirtualTokens(1024, (1, 2))) == 960  # a token is left to compute
    assert pool.match_prefix(VirtualTokens(1300)) == 0


def test_what_follows_a_prompt_is_its_own():
    pool = PagePool(200, 16)
    first, second = (VirtualTokens(40, (1,), block_tokens=64) for _ in range(2))
    for name, tokens in (("a", first), ("b", second)):
        pool.allocate(name, tokens, num_tokens=100)
        pool.commit(name, range(100 - pool.held(name).num_tokens))
    assert [p in pool.pages("b") for p in pool.pages("a")] == [True, True, *[False] * 5]
    first.length = 100
    assert pool.match_prefix(first) == 96  # it finds its own again
    assert pool.match_prefix(first.copy()) == 32
    pool.check()
    pool.forget_prefixes()
    pool.extend("a", 120)
    pool.commit("a", range(20))
    assert pool.match_prefix(first) == 0
    pool.check()


@pytest.mark.parametrize("seed", range(3))
def test_names_share_what_equal_tokens_share(seed):
    """Random prompts over a few blocks, real ones in one pool, virtual ones in another."""
    draw, real, virtual = Random(seed), PagePool(40, 4), PagePool(40, 4)
    held: list[int] = []
    for id_ in range(200):
        blocks = tuple(draw.choice(((1, 2, 3), (1, 2), (1, 4), (5, 2, 3)))[: draw.randrange(4)])
        own = draw.choice((0, 1, 3, 9))
        length = 8 * len(blocks) + own
        if not length:
            continue
        tokens = [block for block in blocks for _ in range(8)] + [100 + id_] * own
        names = VirtualTokens(length, blocks, block_tokens=8)
        while real.num_available * 4 < length + 8:
            real.release(held[0])
            virtual.release(held.pop(0))
        assert real.allocate(id_, tokens) == virtual.allocate(id_, names)
        for pool in (real, virtual):
            pool.commit(id_, tokens[pool.held(id_).num_tokens :])
        assert real.pages(id_) == virtual.pages(id_)
        held.append(id_)
    assert real.usage == virtual.usage
    virtual.check()


def test_numbers_that_cannot_be():
    with pytest.raises(ArgumentError, match="num_tokens=0: give a whole number of at least 1"):
        VirtualTokens(0)
    with pytest.raises(ArgumentError, match="block_tokens=0: give a whole number of at least 1"):
        VirtualTokens(4, (1,), block_tokens=0)
    with pytest.raises(ArgumentError, match=r"block_tokens=32\.0 is no whole number"):
        VirtualTokens(4, (1,), block_tokens=32.0)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="blocks=None: pass a list"):
        VirtualTokens(4, None)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="blocks of 512 tokens in pages of 48"):
        PagePool(8, 48).chain(VirtualTokens(600, (1,)))
    assert PagePool(8, 48).match_prefix(VirtualTokens(300)) == 0, "no block, none to be cut"
