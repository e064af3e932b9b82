"""Requests turned into launches: prefill layers, decode steps, mixed forwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import ParamSpec, TypeVar

from smkern.errors import ArgumentError
from smkern.runtime.answers import begun_batch, decode_steps, layers_of, mixed_forward
from smkern.runtime.device import Work
from smkern.runtime.executor import Executor, PrefillChunk, cut
from smkern.runtime.in_flight import InFlight, LaunchError, PrefillBatch, Written, preemptions_of
from smkern.runtime.interleaver import Interleaver
from smkern.runtime.place import Lane
from smkern.runtime.queues import RequestQueues
from smkern.runtime.request import Request
from smkern.runtime.steady_batch import SteadyBatch
from smkern.runtime.ticket import Ticket
from smkern.tuning.attention.shapes import DECODE_MAX_Q

P = ParamSpec("P")
Result = TypeVar("Result")

PLENTY = 4
"""Free pages a request that decodes, from which on pages are taken a step early: while the device
computes, not between two of its steps."""


class BatchLauncher:
    """Launches what was decided, and remembers what is on its way.

    Args:
        executor: Prepares the work.
        lanes: Launches it.
        queues: Requests and pages.
        invariant: Whether chunks are cut so that attention computes every prompt the same way.
        flush: Gives requests what is owed to them, before they are looked at one by one.

    Raises:
        ArgumentError: forwards too small to cut every prompt so.

    Attributes:
        batch: The batch whose layers run.
        preempted: The one that waits for it.
        in_flight: By launch.
        flush: As given.
    """

    def __init__(
        self,
        executor: Executor,
        lanes: Interleaver,
        queues: RequestQueues,
        invariant: bool,
        flush: Callable[[], None],
    ) -> None:
        self.batch: PrefillBatch | None = None
        self.preempted: PrefillBatch | None = None
        self.in_flight: dict[Ticket, InFlight] = {}
        self._executor = executor
        self._lanes = lanes
        self._queues = queues
        # Such short chunks take attention's decode path, whose sums run in another order.
        self._least = DECODE_MAX_Q if invariant else 0
        if invariant and executor.max_tokens <= 2 * DECODE_MAX_Q:
            raise ArgumentError(
                f"max_tokens={executor.max_tokens} of the executor: the batch-invariant mode cuts "
                f"prompts into chunks of more than {DECODE_MAX_Q} tokens; give it at least "
                f"{2 * DECODE_MAX_Q + 1}"
            )
        self._num_layers = executor.config.num_layers
        # Requests for which the decode lane's last launch drew: their tokens are on the device.
        self._drawn: set[Request] = set()
        self._steady: SteadyBatch | None = None
        # Decode steps that their requests have not been told of, and how many tokens these lacked
        # before, where they may become a steady batch.
        self._owed: list[Ticket] = []
        self._mixed: Ticket | None = None
        self._forming: list[int] | None = None
        self.flush = flush

    @property
    def steady(self) -> SteadyBatch | None:
        """All that run, where the decode lane's last launch drew for just these."""
        steady, queues = self._steady, self._queues
        if steady is None or steady.version == queues.version or steady.is_valid(queues):
            return steady
        return None

    def settle(self) -> None:
        """Tell requests of their last steps, and get their next pages where there are many."""
        if not self._owed:
            return
        owed, self._owed = self._owed, []
        first, count = self.in_flight[owed[0]], len(owed)
        requests = first.requests
        for request in requests:
            request.last_use = owed[-1]
            request.num_pending += count
        left, self._forming = self._forming, None
        if left is not None and requests == self._queues.running:
            assert first.draw is not None
            self._steady = SteadyBatch(self._queues, first.draw.requests, [n - count for n in left])
            for number, ticket in enumerate(owed, 1 - count):
                launched = self.in_flight[ticket]
                launched.steady, launched.number = self._steady, number
        steady, is_rich = self.steady, self._queues.pool.num_available > PLENTY * len(requests)
        if steady is None:
            return
        steady.count()
        if is_rich and steady.extend(self._queues, count):
            with suppress(Exception):  # `decode` prepares what this did not, or says why not
                self._executor.prepare_next(steady.requests, count)

    @property
    def free_rows(self) -> int:
        """Requests that may still be admitted."""
        taken = len(self._queues.running) + len(self._queues.paused) + self.prefilling
        return self._executor.max_running - taken - sum([len(x.requests) for x in self._ending()])

    @property
    def prefilling(self) -> int:
        """Requests whose prompts are on their way through the layers."""
        count = 0 if self.batch is None else len(self.batch.requests)
        return count if self.preempted is None else count + len(self.preempted.requests)

    @property
    def mixes(self) -> bool:
        """Whether a mixed forward is on its way."""
        return self._mixed is not None and not self._mixed.is_over

    @property
    def joining(self) -> int:
        """Requests whose prompts' last layers are on their way, and that decode behind these: not
        those whose prompt goes on, or whose first token is their last."""
        draws = [x.draw for x in self._ending() if x.draw is not None]
        return sum([request.num_left > 1 for draw in draws for request in draw.requests])

    def _ending(self) -> list[InFlight]:
        """Launches on their way that run a batch's last layers."""
        # Lists, here and above: half of what generators take, and every decision asks.
        return [x for x in self.in_flight.values() if x.batch is not None]

    def make_way(self) -> None:
        """Let lower priorities give way to the first that wait and lack rows or pages."""
        queues, batch = self._queues, self.batch
        if not queues.waiting or self.preempted is not None or not queues.is_outranked:
            return
        if batch is not None and batch.view().priority >= queues.waiting[0].priority:
            return
        queues.views()  # looks up what others hold of them
        gone = queues.who_yields(queues.waiting[: self._executor.max_prefill], self.free_rows)
        if gone:
            self.flush()
        for request in gone:
            self._drawn.discard(request)
            if request.stage != "done":
                queues.recompute(request)

    def decode(self, steps: int) -> int:
        """Launch decode steps of all that run; how many.

        Raises:
            ModelError: the launch failed; its `requests` are the requests of it.
        """
        steady = self.steady
        if steady is not None and steady.least_left > 0:
            count = min(steps, steady.most_left)
            if steady.extend(self._queues, count):
                return self._go_on(steady, count)
        self.flush()
        self._steady = None
        version = self._queues.version
        requests, left = self._decoding()
        count = self._queues.reserve(min(steps, max(left))) if requests else 0
        if self._queues.version != version:  # a request has given way
            requests, left = self._decoding()
        if not requests or not count:
            return 0
        works = self._call(requests, decode_steps, self._executor, tuple(requests), count)
        preemptions: list[int] = []
        for work, draw in works:
            ticket = self._launch("decode", work, requests)
            if ticket is None:
                break
            preemptions = preemptions or preemptions_of(draw.requests)
            self.in_flight[ticket] = InFlight(requests, draw, preemptions)
            self._drawn = set(requests)
            self._owed.append(ticket)
            self._forming = left
        return len(self._owed)

    def _go_on(self, steady: SteadyBatch, steps: int) -> int:
        """Launch decode steps like those before; how many. Their requests hear of it later."""
        if self._owed:
            self.settle()
        requests = steady.requests
        works = self._call(requests, decode_steps, self._executor, requests, steps, steady.rows)
        for work, draw in works:
            ticket = self._launch("decode", work, requests)
            if ticket is None:
                break
            self.in_flight[ticket] = InFlight(
                requests, draw, steady.preemptions, steady=steady, number=steady.advance()
            )
            self._owed.append(ticket)
        return len(self._owed)

    def mixed(self, requests: Iterable[Request], tokens: int) -> int | None:
        """Launch one forward of chunks of these prompts and a token of all that run; its tokens.

        None: not now, the lane's queue is full. 0: none of them can begin.

        Raises:
            ModelError: see `decode`; only the prompts' requests have failed.
        """
        self.flush()
        chunks, chosen = self._next_chunks(requests, tokens)
        if not chunks:
            return 0
        running, _ = self._decoding()
        if running and not self._queues.reserve(1):
            running = []
        # Requests that gave way for it are out, prompts among them too.
        running = [request for request in running if request.stage == "running"]
        keep = [i for i, request in enumerate(chosen) if request.room]
        chunks, chosen = [chunks[i] for i in keep], [chosen[i] for i in keep]
        if not chunks:
            return 0
        # Requests that are not part of it have no row from here on, launched or not.
        self._steady = None
        self._drawn.intersection_update(running)
        try:
            work, draw = self._call(chosen, mixed_forward, self._executor, chunks, running)
            ticket = self._launch("decode", work, chosen)
        except LaunchError as error:
            error.beside = running
            self._drawn.clear()
            raise
        if ticket is None:
            return None
        self._mixed = ticket
        everyone = [*chosen, *running]
        self.in_flight[ticket] = InFlight(everyone, draw, preemptions_of(draw.requests))
        for request in everyone:
            request.last_use = ticket
        for request in draw.requests:
            request.num_pending += 1
        self._drawn = set(draw.requests)
        for request, chunk in zip(chosen, chunks, strict=True):
            self._computed(request, chunk, ticket)
            if chunk.draws:
                self._queues.drop(request)
                self._queues.run(request)
        return sum(chunk.count for chunk in chunks) + len(running)

    def begin(self, requests: Iterable[Request], tokens: int, *, preempt: bool) -> bool:
        """Make a batch of these prompts, in front of the running one; False where none has pages.

        Raises:
            ModelError: see `decode`.
        """
        chunks, chosen = self._next_chunks(requests, tokens)
        if not chunks:
            return False
        slot = 0 if self.batch is None else 1 - self.batch.run.slot
        run = self._call(chosen, begun_batch, self._executor, chunks, slot)
        assert preempt or self.batch is None
        self.preempted = self.batch
        self.batch = PrefillBatch(run, chosen, self._lanes.device.now_us())
        for request in chosen:
            self._queues.drop(request)
            request.stage = "prefill"
        return True

    def layers(self, count: int) -> int:
        """Launch the next layers of the batch; how many.

        Raises:
            ModelError: see `decode`.
        """
        batch = self.batch
        if batch is None:
            return 0
        count = min(count, self._num_layers - batch.layers)
        work = self._call(batch.requests, layers_of, self._executor, batch.run, batch.layers, count)
        ticket = self._launch("prefill", work, batch.requests)
        if ticket is None:
            return 0
        batch.layers += count
        batch.view()  # made behind the launch, not when a policy is asked
        launched = self.in_flight[ticket] = InFlight(batch.requests)
        for request in batch.requests:
            request.last_use = ticket
        if batch.layers == self._num_layers:
            launched.batch, launched.draw = batch, batch.run.draw
            self.batch, self.preempted = self.preempted, None
        return count

    def joined(self, batch: PrefillBatch) -> None:
        """A batch is through its last layer: its requests decode, or wait for their next chunk."""
        for request, chunk in zip(batch.requests, batch.run.chunks, strict=True):
            if request.stage == "done":  # cancelled meanwhile
                self._queues.release(request)
                self._executor.forget(request)
                continue
            self._computed(request, chunk, None)
            if chunk.draws:
                request.num_pending += 1
                self._queues.run(request)
            else:
                self._queues.wait(request)

    def reset(self) -> None:
        """Forget all that is on its way, and all batches."""
        self.in_flight.clear()
        self._owed.clear()
        self.batch = self.preempted = self._steady = None

    def lose(self, requests: Iterable[Request]) -> list[Request]:
        """Forget the batches of requests that have failed; these, and all others of the batches:
        what a batch has computed of a prompt is lost with it."""
        gone = dict.fromkeys(requests)
        if self.preempted is not None and not gone.keys().isdisjoint(self.preempted.requests):
            gone |= dict.fromkeys(self.preempted.requests)
            self.preempted = None
        if self.batch is not None and not gone.keys().isdisjoint(self.batch.requests):
            gone |= dict.fromkeys(self.batch.requests)
            self.batch, self.preempted = self.preempted, None
        return list(gone)

    def _launch(self, lane: Lane, work: Work, requests: Iterable[Request]) -> Ticket | None:
        return self._call(requests, self._lanes.try_launch, lane, work)

    def _call(
        self, requests: Iterable[Request], function: Callable[P, Result], /,
        *args: P.args, **options: P.kwargs,
    ) -> Result:  # fmt: skip
        """Call the executor or the lanes; what they raise is attributed to these requests."""
        try:
            return function(*args, **options)
        except Exception as error:
            raise LaunchError(requests, error) from error

    def _decoding(self) -> tuple[list[Request], list[int]]:
        """Those that run, have tokens to draw when all that is launched is over, and whose last
        token is known: on the device to the decode lane's last launch, or here; and how many."""
        found: list[Request] = []
        left: list[int] = []
        drawn = self._drawn
        for request in self._queues.running:
            count = request.num_left
            if count > 0 and (not request.num_pending or request in drawn):
                found.append(request)
                left.append(count)
        most = self._executor.max_running
        return found[:most], left[:most]

    def _next_chunks(
        self, requests: Iterable[Request], tokens: int
    ) -> tuple[list[PrefillChunk], list[Request]]:
        """The next chunks of these prompts, those whose pages there are."""
        chunks: list[PrefillChunk] = []
        chosen: list[Request] = []
        room, free_rows = min(tokens, self._executor.max_tokens), self.free_rows
        for request in requests:
            if len(chunks) == min(self._executor.max_prefill, free_rows) or not room:
                break
            if not self._queues.admit(request):
                break
            length = len(request.ids)
            if self._least and not chunks:  # else a small room might never do for a rest
                room = min(max(room, 2 * self._least + 2), self._executor.max_tokens)
            count = cut(length - request.num_computed, room, self._least)
            if not count:
                break
            draws = request.num_computed + count == length
            chunks.append(PrefillChunk(request, request.num_computed, count, draws))
            chosen.append(request)
            room -= count
        return chunks, chosen

    def _computed(self, request: Request, chunk: PrefillChunk, written: Ticket | None) -> None:
        """A chunk is in its pages once `written` is over."""
        over = None if written is None else Written(written)
        self._queues.pool.commit(request, chunk.ids, over)
        request.num_computed = chunk.end
        self._queues.waiting_queue.look_again(request)
