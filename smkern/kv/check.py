"""The invariants of a pool of pages."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from smkern.errors import PoolCorruptError

if TYPE_CHECKING:
    from smkern.kv.held import RequestPages
    from smkern.kv.page_pool import PagePool


def check_pool(pool: PagePool) -> None:
    """Check that every page is in one state, and that each reference has one owner.

    O(pages): for tests and for a look at a running pool, not for each step.

    Raises:
        PoolCorruptError: naming the page or request, what is said of it and what contradicts that.
    """
    _check_references(pool)
    _check_states(pool)
    _check_index(pool)
    for name, held in pool._held.items():
        _check_request(pool, repr(name), held)


def _fail(what: str) -> None:
    raise PoolCorruptError(
        f"KV pool: {what}; stop using the pool, and report the calls that led here"
    )


def _check_references(pool: PagePool) -> None:
    owners: Counter[int] = Counter()
    for held in pool._held.values():
        owners.update(held.pages)
    for _, pages in pool.releases:
        owners.update(pages)
    for page in owners:
        if not 0 <= page < pool.states.num_pages:
            _fail(f"page {page} is held, the pool has {pool.states.num_pages}")
    for page, refs in enumerate(pool.states.refs):
        if refs != owners[page]:
            _fail(f"page {page} counts {refs} references, {owners[page]} owners hold it")


def _check_states(pool: PagePool) -> None:
    states = pool.states
    free, cached = states.free_pages(), states.cached_pages()
    for kind, pages in (("free", free), ("cached", cached)):
        if len(set(pages)) != len(pages):
            twice = next(page for page, count in Counter(pages).items() if count > 1)
            _fail(f"page {twice} is listed as {kind} twice")
        for page in pages:
            if states.refs[page]:
                _fail(f"page {page} is listed as {kind} with {states.refs[page]} references")
    if both := set(free) & set(cached):
        _fail(f"page {min(both)} is free and cached")
    held = sum(1 for refs in states.refs if refs)
    if held + len(free) + len(cached) != states.num_pages:
        lost = states.num_pages - held - len(free) - len(cached)
        _fail(f"{lost} of {states.num_pages} pages are neither held, cached nor free")


def _check_index(pool: PagePool) -> None:
    states, index = pool.states, pool.index
    named = {page for _, page in index.items()}
    if len(named) != len(index):
        _fail(f"{len(index)} blocks are known by {len(named)} pages")
    for digest, page in index.items():
        if index.digest_of(page) != digest:
            _fail(f"page {page} is known as {digest!r} but says {index.digest_of(page)!r}")
        if not states.refs[page] and not states.is_cached(page):
            _fail(f"page {page} is known as a block, and free")
    for page in states.cached_pages():
        if page not in index:
            _fail(f"page {page} is cached, but no block is known by it")


def _check_request(pool: PagePool, name: str, held: RequestPages) -> None:
    size = pool.page_size
    if len(set(held.pages)) != len(held.pages):
        _fail(f"request {name} holds a page twice: {held.pages}")
    if held.num_tokens > len(held.pages) * size:
        _fail(f"request {name} has {held.num_tokens} tokens in {len(held.pages)} pages of {size}")
    if pool.reuse and held.names is None and len(held.tail) != held.num_tokens % size:
        _fail(f"request {name} has {held.num_tokens} tokens and a tail of {len(held.tail)}")
    for page in held.pages[held.num_tokens // size :]:
        if pool.states.refs[page] != 1:
            _fail(f"request {name} writes page {page}, which {pool.states.refs[page]} hold")
        if page in pool.index:
            _fail(f"request {name} writes page {page}, which is known as a full block")
