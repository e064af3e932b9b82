"""Requests that wait, run or are paused, and their pages: no launches, no clock."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from smkern.errors import ArgumentError, OutOfPagesError, PoolCorruptError, SmkernError
from smkern.kv.page_pool import PagePool
from smkern.limits import shown
from smkern.policies import Order, Waiting
from smkern.policies.order import fcfs
from smkern.runtime.request import Request
from smkern.runtime.waiting_queue import WaitingQueue

Preemption = Literal["recompute", "keep"]


class RequestQueues:
    """The requests of a runtime by stage, and their pages.

    Requests wait by priority, then the policy's order; those that run have a rank: priority, then
    arrival. When pages run out the last by rank gives way: "recompute" gives its pages back and
    computes it again later, "keep" lets it pause with its pages until there is room, and recomputes
    only where none could go on otherwise.

    Attributes:
        pool: The pages.
        waiting_queue: What waits, and what a policy sees of it.
        waiting: Its requests, in the order in which they are served.
        running, paused: Requests by rank.
        version: Counts requests that begin to run, and that stop running.
        holders: Requests that may hold pages: also those of which a call that raised left it open.

    Args:
        pool: The pages.
        preemption: How the last gives way.
        restart: Whether a recomputed request draws its tokens again from its prompt on: then every
            key is computed the same way, so all bits are the same.
        max_running: Requests that may decode at a time.
        gave_way: Told which request gave way, and whether it begins anew, before that is done.
        order: The policy's key of a request that waits.
        failed: Told an error of the order.

    Raises:
        ArgumentError: another `preemption`; or `restart` with a pool that finds prefixes again:
            what is behind one would be computed as a chunk of another size.
    """

    def __init__(
        self,
        pool: PagePool,
        preemption: Preemption,
        restart: bool,
        max_running: int,
        gave_way: Callable[[Request, bool], None],
        order: Order = fcfs,
        failed: Callable[[SmkernError], None] = lambda error: None,
    ) -> None:
        if not isinstance(preemption, str) or preemption not in ("recompute", "keep"):
            raise ArgumentError(f"preemption={shown(preemption)}: 'recompute' or 'keep'")
        if restart and pool.reuse:
            raise ArgumentError(
                "batch_invariant=True with a pool that finds prefixes again: a prompt's chunks, "
                "and so its bits, would follow from who came before; make it with reuse=False"
            )
        self.pool = pool
        self.waiting_queue = WaitingQueue(pool, order, failed)
        self.waiting: list[Request] = self.waiting_queue.requests
        # Those of them that hold pages: some of their prompt is computed.
        self._begun: dict[Request, None] = {}
        self.running: list[Request] = []
        self.paused: list[Request] = []
        self.version = 0
        self.holders: set[Request] = set()
        self._preemption = preemption
        self._restart = restart
        self._max_running = max_running
        self._gave_way = gave_way

    @property
    def has_any(self) -> bool:
        """Whether any request waits, runs or is paused."""
        return bool(self.running or self.waiting or self.paused)

    def views(self) -> tuple[Waiting, ...]:
        """What a policy sees of those that wait. The first is looked up again where it lacks
        pages, or would without those that it shares."""
        waiting, pool = self.waiting_queue.views(), self.pool
        if not waiting:
            return waiting
        first = self.waiting[0]
        if waiting[0].pages + first.num_shared <= pool.num_available - len(self.running):
            return waiting
        pool.poll()  # pages of requests that left may have come back
        self.waiting_queue.look_up_again(first)
        return self.waiting_queue.views()

    def wait(self, request: Request) -> None:
        """Put a request into the queue."""
        request.stage = "waiting"
        request.forget_view()
        self.waiting_queue.add(request)
        if request.room:
            self._begun[request] = None

    def run(self, request: Request) -> None:
        """A request decodes from now on."""
        request.stage = "running"
        self.version += 1
        insort(self.running, request, key=lambda x: x.rank)

    def drop(self, request: Request) -> None:
        """Take a request out of wherever it is."""
        self.version += request.stage == "running"
        if request.queue_key is not None:
            self.waiting_queue.remove(request)
            self._begun.pop(request, None)
            return
        group = {"running": self.running, "paused": self.paused}.get(request.stage)
        if group is not None:
            at = bisect_left(group, request.rank, key=lambda x: x.rank)
            assert group[at] is request, request
            del group[at]

    def admit(self, request: Request) -> bool:
        """Give a waiting request the pages of its prompt; False where there are too few, or where
        one in front of it is paused for lack of pages."""
        if request.room:
            return True
        if self.paused and self.paused[0].rank < request.rank:
            return False
        if request.chain is None:
            request.chain = self.pool.chain(request.ids)
        self.holders.add(request)
        try:
            cached = self.pool.allocate(request, request.chain)
        except OutOfPagesError:
            self.holders.discard(request)
            return False
        length, page = len(request.ids), self.pool.page_size
        if type(cached) is not int or not 0 <= cached < length or cached % page:
            raise PoolCorruptError(
                f"allocate() of {request} answered that {shown(cached)} of its {length} tokens are "
                f"there: whole pages of {page}, and one token at least is left to compute"
            )
        request.chain = None
        request.num_shared = 0
        request.num_computed = cached
        request.room = -(-length // page) * page
        if request.cached_tokens is None:
            request.cached_tokens = cached
        self._begun[request] = None
        self.waiting_queue.look_again(request)
        return True

    def reserve(self, steps: int) -> int:
        """Pages for so many decode steps of all that run, or for fewer; how many.

        0: none now; what was given back is still read, or a request has given way: ask again.
        """
        for count in range(steps, 0, -1):
            if self._extend(count):
                return count
        if self.pool.poll():
            return 0
        if not self._make_way():
            return 0
        return self.reserve(1) if self.running else 0

    def resume(self) -> None:
        """Let the paused decode again while there is room for a page each."""
        while self.paused and len(self.running) < self._max_running:
            request = self.paused[0]
            # What it drew before it paused is written again from the host, so it must be there.
            if request.num_pending or (
                self.running and self.pool.num_available <= 2 * (len(self.running) + 1)
            ):
                return
            self.paused.pop(0)
            self.run(request)

    def release(self, request: Request) -> None:
        """Give a request's pages back, for writing once its last launch is over."""
        if request.room:
            request.room = 0
            self.waiting_queue.look_again(request)
            self.pool.release(request, request.last_use)
            self.holders.discard(request)
            request.last_use = None  # a launch holds what it ran

    def recompute(self, request: Request) -> None:
        """Let a request begin anew: it waits, without pages, and keeps what it has drawn."""
        self.commit(request)
        self.drop(request)
        self._gave_way(request, True)
        request.num_preemptions += 1
        request.num_pending = 0
        self.release(request)
        request.num_computed = 0
        request.chain = request.num_expected = None
        request.num_shared = 0
        if self._restart and len(request.ids) > request.prompt_len:
            request.to_repeat = request.ids[request.prompt_len :] + request.to_repeat
            del request.ids[request.prompt_len :]
        self.wait(request)

    def commit(self, request: Request) -> None:
        """Let later requests find the blocks whose tokens were drawn and are computed."""
        if not request.room or self._restart:
            return
        # The prompt is known already, and the last token drawn is in no page yet.
        computed = request.ids[request.num_computed : len(request.ids) - 1]
        if request.stage in ("running", "paused") and computed:
            self.pool.commit(request, computed)

    def extend(self, num_tokens: Mapping[Request, int]) -> bool:
        """Give each request pages for more tokens than it has room for; False: too few, for all."""
        try:
            self.pool.extend_all(num_tokens)
        except OutOfPagesError:
            return False
        page = self.pool.page_size
        for request, tokens in num_tokens.items():
            request.room = -(-tokens // page) * page
        return True

    def unblock(self, *, is_stuck: bool) -> Request | None:
        """Where nothing is on its way: give back pages that stand in the way of all.

        Args:
            is_stuck: Whether nothing could be launched, so that those that run cannot go on.

        Returns:
            A request that cannot go on, since another owner holds the pages.
        """
        self.resume()
        if self.pool.poll():
            return None
        if self.running:
            is_out = is_stuck and not self.reserve(1) and len(self.running) == 1
            return self.running[0] if is_out else None
        if self.make_room() or not self.waiting or self.paused or self.waiting[0].room:
            return None
        return None if self.admit(self.waiting[0]) else self.waiting[0]

    @property
    def is_outranked(self) -> bool:
        """Whether the first that waits, which there is, goes before the last that decodes."""
        highest, running, paused = self.waiting[0].priority, self.running, self.paused
        if running and running[-1].priority < highest:
            return True
        return bool(paused) and paused[-1].priority < highest

    def who_yields(self, requests: Sequence[Request], free_rows: int) -> list[Request]:
        """The last of lower priority, whose rows and pages these need, which wait.

        Nobody yields to his own priority, or in vain: pages that others hold, too, do not come
        back. Those that do when launches are over count as free.

        Args:
            requests: The first that wait.
            free_rows: Requests that may begin.
        """
        coming = sum([len(pages) for _, pages in self.pool.releases])
        free_pages = self.pool.num_available + coming - len(self.running)
        holders: list[Request] = []
        gone: list[Request] = []
        # References to shared pages once these requests have theirs and those are gone.
        left: dict[int, int] = {}
        for request in requests:
            self.waiting_queue.look_up_again(request)
            free_pages -= request.view(self.pool.pages_for).pages
            free_rows -= 1
            if free_pages < 0 and request.num_shared:
                self._join(request, left)
            last: list[Request] = []
            while free_rows < 0 or free_pages < 0:
                if not (holders or gone or last):
                    everyone = (*self.running, *self.paused, *self._begun)
                    holders = sorted(everyone, key=lambda x: x.rank)
                lower = [x for x in holders if x.priority < request.priority]
                if free_rows < 0:
                    lower = [x for x in lower if x.stage != "waiting"]
                if not lower:
                    return gone
                holder = lower[-1]
                holders.remove(holder)
                last.append(holder)
                # A page is kept for the growth of each that runs.
                free_pages += self._leave(holder, left) + (holder.stage == "running")
                free_rows += holder.stage != "waiting"
            gone += last
        return gone

    def _join(self, request: Request, left: dict[int, int]) -> None:
        """Count a waiting request among those that hold the pages that it shares."""
        assert request.chain is not None, request
        refs = self.pool.states.refs
        for page in self.pool.index.match(request.chain, request.num_shared):
            left[page] = left.get(page, refs[page]) + 1

    def _leave(self, holder: Request, left: dict[int, int]) -> int:
        """Count a request no more among those that hold its pages; how many come back."""
        pages, refs = self.pool.held(holder).pages, self.pool.states.refs
        back = 0
        for at, page in enumerate(pages):
            if refs[page] == 1 and page not in left:  # what is behind it is not shared either
                return back + len(pages) - at
            left[page] = left.get(page, refs[page]) - 1
            back += not left[page]
        return back

    def make_room(self) -> bool:
        """Where nothing runs or can be admitted: the last request with pages gives them back.

        Returns:
            Whether one did.
        """
        holders = [*self.paused, *(x for x in self._begun if x is not self.waiting[0])]
        if not holders:
            return False
        self.recompute(max(holders, key=lambda x: x.rank))
        return True

    def _extend(self, steps: int) -> bool:
        needs: dict[Request, int] = {}
        for request in self.running:
            tokens = request.num_tokens + steps - 1
            if tokens > request.room:
                tokens = min(tokens, request.max_tokens_held)
                if tokens > request.room:
                    needs[request] = tokens
        return not needs or self.extend(needs)

    def _make_way(self) -> bool:
        """The last by rank gives way; False where only the first of those that run is left."""
        candidates = [*self.running[1:], *self.paused, *self._begun]
        if not candidates:
            return False
        request = max(candidates, key=lambda x: x.rank)
        if request.stage == "running" and self._preemption == "keep":
            self.drop(request)
            self._gave_way(request, False)
            request.stage = "paused"
            insort(self.paused, request, key=lambda x: x.rank)
        else:
            self.recompute(request)
        return True


def no_pages_error(request: Request, pool: PagePool) -> OutOfPagesError:
    """The error of a request whose pages another owner holds."""
    return OutOfPagesError(
        f"{request} needs {pool.pages_for(len(request.ids))} pages and nothing runs that "
        "could give some back: somebody else holds pages of this pool; release them"
    )
