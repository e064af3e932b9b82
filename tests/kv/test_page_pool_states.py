"""Random sequences of calls on a pool of pages, against a memory that remembers its writers."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from smkern.errors import OutOfPagesError
from smkern.kv import PagePool
from smkern.kv.prefix import BlockChain

pytestmark = pytest.mark.slow

PAGES, SIZE = 8, 2
PROMPTS = st.sampled_from([[0] * 9, [0] * 6 + [1] * 3, [0] * 4 + [1] * 4, [1] * 5, [1]])


@dataclass
class FakeEvent:
    done: bool = False

    def query(self) -> bool:
        return self.done


@dataclass
class Running:
    """A request as its owner sees it."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)


def expected_page(running: Running, number: int) -> tuple[int, ...]:
    """What a request must find in its page: all tokens up to that page's end."""
    return tuple(running.tokens[: (number + 1) * SIZE])


class PoolMachine(RuleBasedStateMachine):
    """Requests come, compute, grow and go; memory says at each read who wrote it last."""

    events = Bundle("events")

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(PAGES, SIZE)
        self.running: dict[int, Running] = {}
        self.memory: dict[int, tuple[int, ...]] = {}
        self.readers: list[tuple[FakeEvent, dict[int, tuple[int, ...]]]] = []
        self.names = iter(range(10**9))

    def write(self, name: int, tokens: list[int]) -> None:
        """Compute tokens of a request: each goes into its page, which nobody else may read."""
        request = self.running[name]
        pages = self.pool.pages(name)
        for token in tokens:
            page = pages[len(request.tokens) // SIZE]
            for event, reads in self.readers:
                assert event.done or page not in reads, f"page {page} is written under a reader"
            for other in self.running:
                others = self.pool.pages(other)
                assert other == name or page not in others, f"page {page} is shared and written"
            request.tokens.append(token)
            self.memory[page] = expected_page(request, (len(request.tokens) - 1) // SIZE)

    def verify(self, name: int) -> None:
        """A request reads what it wrote, or what an equal prefix wrote."""
        request = self.running[name]
        for number in range(-(-len(request.tokens) // SIZE)):
            page = self.pool.pages(name)[number]
            assert self.memory[page] == expected_page(request, number)

    @rule(
        prompt=PROMPTS | st.lists(st.integers(0, 1), min_size=1, max_size=9),
        more=st.integers(0, 4),
    )
    def allocate(self, prompt: list[int], more: int) -> None:
        self.admit(prompt, more)

    def admit(self, prompt: list[int], more: int) -> int | None:
        name = next(self.names)
        before = self.pool.usage
        try:
            chain = BlockChain(prompt, SIZE)
            cached = self.pool.allocate(name, chain, num_tokens=len(prompt) + more)
        except OutOfPagesError:
            assert name not in self.pool.requests
            assert self.pool.usage.held <= before.held
            return None
        assert cached < len(prompt)
        self.running[name] = Running(prompt, prompt[:cached])
        self.verify(name)
        return name

    @rule(prompt=PROMPTS, event=st.none() | events)
    def serve(self, prompt: list[int], event: FakeEvent | None) -> None:
        """A whole life of a request, so that caches fill."""
        name = self.admit(prompt, 0)
        if name is not None:
            tokens = prompt[len(self.running[name].tokens) :]
            self.write(name, tokens)
            self.pool.commit(name, tokens)
            self.let_go(name, event)

    @rule(data=st.data(), count=st.integers(1, 5), event=st.none() | events)
    def compute(self, data: st.DataObject, count: int, event: FakeEvent | None) -> None:
        if not self.running:
            return
        name = data.draw(st.sampled_from(sorted(self.running)))
        request = self.running[name]
        room = self.pool.room(name) - len(request.tokens)
        rest = request.prompt[len(request.tokens) :] or [0, 1, 0, 1, 1]
        tokens = rest[: min(count, room)]
        self.write(name, tokens)
        self.pool.commit(name, tokens, event)
        self.verify(name)

    @rule(data=st.data(), more=st.integers(0, 6))
    def extend(self, data: st.DataObject, more: int) -> None:
        if not self.running:
            return
        name = data.draw(st.sampled_from(sorted(self.running)))
        before = self.pool.pages(name)
        try:
            new = self.pool.extend(name, len(before) * SIZE + more)
        except OutOfPagesError:
            new = []
        assert self.pool.pages(name) == (*before, *new)
        self.verify(name)

    @rule(more=st.integers(0, 6), most=st.integers(2, 3))
    def extend_all(self, more: int, most: int) -> None:
        before = {name: self.pool.pages(name) for name in sorted(self.running)[:most]}
        wanted = {name: len(pages) * SIZE + more for name, pages in before.items()}
        try:
            self.pool.extend_all(wanted)
        except OutOfPagesError:
            assert before == {name: self.pool.pages(name) for name in before}
        for name, pages in before.items():
            assert self.pool.pages(name, 0, len(pages)) == pages
            assert self.pool.room(name) >= len(pages) * SIZE
            self.verify(name)

    @rule(target=events)
    def launch(self) -> FakeEvent:
        return FakeEvent()

    @rule(event=consumes(events))
    def complete(self, event: FakeEvent) -> None:
        event.done = True

    @rule(data=st.data(), event=st.none() | events)
    def release(self, data: st.DataObject, event: FakeEvent | None) -> None:
        if not self.running:
            return
        self.let_go(data.draw(st.sampled_from(sorted(self.running))), event)

    def let_go(self, name: int, event: FakeEvent | None) -> None:
        self.verify(name)
        if event is not None:
            pages = self.pool.pages(name)
            reads = {page: self.memory[page] for page in pages if page in self.memory}
            self.readers.append((event, reads))
        del self.running[name]
        self.pool.release(name, event)

    @rule()
    def poll(self) -> None:
        waiting = self.pool.poll()
        assert waiting == sum(1 for event, _ in self.pool.releases if not event.query())

    @rule()
    def forget(self) -> None:
        self.pool.forget_prefixes()

    @invariant()
    def every_page_is_accounted_for(self) -> None:
        self.pool.check()
        assert sum(self.pool.usage) == PAGES

    @invariant()
    def requests_and_readers_see_their_tokens(self) -> None:
        for name in self.running:
            self.verify(name)
        for event, reads in self.readers:
            assert event.done or all(self.memory[page] == is_ for page, is_ in reads.items())

    def teardown(self) -> None:
        for event, _ in self.readers:
            event.done = True
        for name in self.running:
            self.pool.release(name)
        assert self.pool.poll() == 0
        assert self.pool.usage.held == 0
        self.pool.check()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40)


@pytest.mark.parametrize("pages", [1, 3])
def test_released_page_waits_for_its_event(pages: int) -> None:
    pool, event = PagePool(pages, SIZE), FakeEvent()
    tokens = list(range(pages * SIZE))
    pool.allocate("a", tokens, num_tokens=len(tokens))
    pool.release("a", event)
    with pytest.raises(OutOfPagesError, match=f"0 of {pages} can be had"):
        pool.allocate("b", tokens, num_tokens=len(tokens))
    event.done = True
    pool.allocate("b", tokens, num_tokens=len(tokens))
    pool.check()


def test_cached_block_of_a_read_release_is_shared_but_not_written() -> None:
    pool, event = PagePool(2, SIZE), FakeEvent()
    pool.allocate("a", [1, 2, 3], num_tokens=3)
    pool.commit("a", [1, 2, 3])
    first = pool.pages("a")[0]
    pool.release("a", event)
    with pytest.raises(OutOfPagesError):
        pool.allocate("b", [1, 2, 9], num_tokens=3)
    assert pool.match_prefix([1, 2, 9]) == SIZE
    assert pool.index.match(pool.chain([1, 2, 9]), 1) == [first]


def test_block_is_found_only_once_it_is_written() -> None:
    pool, event = PagePool(4, SIZE), FakeEvent()
    pool.allocate("a", [1, 2, 3], num_tokens=3)
    pool.commit("a", [1, 2, 3], event)
    assert pool.match_prefix([1, 2, 9]) == 0
    event.done = True
    assert pool.match_prefix([1, 2, 9]) == SIZE


def test_evicts_the_longest_unused_and_the_end_of_a_prefix_first() -> None:
    pool = PagePool(4, 1)
    for name, prompt in (("old", [1, 2]), ("new", [3, 4])):
        pool.allocate(name, prompt, num_tokens=2)
        pool.commit(name, prompt)
    old, new = list(pool.pages("old")), list(pool.pages("new"))
    pool.release("old")
    pool.release("new")
    assert pool.states.cached_pages() == [old[1], old[0], new[1], new[0]]
    pool.allocate("x", [9], num_tokens=3)
    assert pool.pages("x") == (old[1], old[0], new[1])
    assert pool.match_prefix([3, 4, 5]) == 1


def test_a_shared_page_of_the_cache_is_not_counted_as_free_too() -> None:
    pool = PagePool(3, 1)
    pool.allocate("a", [1, 2, 3], num_tokens=3)
    pool.commit("a", [1, 2, 3])
    pool.release("a")
    with pytest.raises(OutOfPagesError, match="needs 2 more pages of 1 tokens, 1 of 3"):
        pool.allocate("b", [1, 2, 3], num_tokens=4)
    pool.check()
    assert pool.usage.cached == 3


def test_a_million_pages_are_cheap() -> None:
    """No call looks at all pages: what one takes is the same in a pool of any size."""
    pool = PagePool(1_000_000, 16)
    pool.allocate("a", [7], num_tokens=16)
    assert pool.pages("a") == (0,)
    pool.release("a")
    assert pool.states._free == [0]
    assert pool.usage.free == 1_000_000
