"""The invariants of a pool of pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence

from smkern.errors import PoolCorruptError
from smkern.kv.pages import PageStates, RequestPages
from smkern.kv.prefix import PrefixIndex


def check_pool(
    states: PageStates,
    index: PrefixIndex,
    requests: Mapping[Hashable, RequestPages],
    released: Iterable[Sequence[int]],
    *,
    page_size: int,
    reuse: bool,
) -> None:
    """Check that every page is in one state, and that each reference has one owner.

    Args:
        states: Of the pool's pages.
        index: The blocks that are known by a page.
        requests: What each request holds.
        released: Pages of requests that are gone, which a device still reads.
        page_size: Tokens of a page.
        reuse: Whether prefixes are found again.

    Raises:
        PoolCorruptError: naming the page or request, what is said of it and what contradicts that.
    """
    _check_references(states, [held.pages for held in requests.values()], released)
    _check_states(states)
    _check_index(states, index)
    for name, held in requests.items():
        _check_tokens(repr(name), held, page_size, reuse)
        _check_pages(repr(name), held, held.num_tokens // page_size, states, index)


def _fail(what: str) -> None:
    raise PoolCorruptError(
        f"KV pool: {what}; stop using the pool, and report the calls that led here"
    )


def _check_references(
    states: PageStates, held: Iterable[Sequence[int]], released: Iterable[Sequence[int]]
) -> None:
    owners: Counter[int] = Counter()
    for pages in (*held, *released):
        owners.update(pages)
    for page in owners:
        if not 0 <= page < states.num_pages:
            _fail(f"page {page} is held, the pool has {states.num_pages}")
    for page, refs in enumerate(states.refs):
        if refs != owners[page]:
            _fail(f"page {page} counts {refs} references, {owners[page]} owners hold it")


def _check_states(states: PageStates) -> None:
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


def _check_index(states: PageStates, index: PrefixIndex) -> None:
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


def _check_tokens(name: str, held: RequestPages, size: int, reuse: bool) -> None:
    if held.num_tokens > len(held.pages) * size:
        _fail(f"request {name} has {held.num_tokens} tokens in {len(held.pages)} pages of {size}")
    if reuse and held.names is None and len(held.tail) != held.num_tokens % size:
        _fail(f"request {name} has {held.num_tokens} tokens and a tail of {len(held.tail)}")


def _check_pages(
    name: str, held: RequestPages, full: int, states: PageStates, index: PrefixIndex
) -> None:
    """Behind its full blocks, a request's pages are its own."""
    if len(set(held.pages)) != len(held.pages):
        _fail(f"request {name} holds a page twice: {held.pages}")
    for page in held.pages[full:]:
        if states.refs[page] != 1:
            _fail(f"request {name} writes page {page}, which {states.refs[page]} hold")
        if page in index:
            _fail(f"request {name} writes page {page}, which is known as a full block")
