"""Tokens that launches drew, handed to their requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from smkern.errors import ModelError, RequestError
from smkern.runtime.in_flight import InFlight
from smkern.runtime.interleaver import Ticket
from smkern.runtime.launcher import BatchLauncher
from smkern.runtime.live import Live, Output
from smkern.runtime.timeline.stats import StatsMeter

TOLD = 32
"""Tokens of a record of them: it takes some 10 us to be counted, between two polls."""


class OutputProcessor:
    """Hands out tokens: before the next launch where a request may end by them, else behind it.

    Args:
        launches: Are told when requests are looked at.
        meter: Counts tokens.
        finished: Told each request that is finished, or has an error.

    Attributes:
        outputs: What was handed out.
    """

    def __init__(
        self, launcher: BatchLauncher, meter: StatsMeter, finished: Callable[[Live], None]
    ) -> None:
        self.outputs: list[Output] = []
        self._launcher = launcher
        self._meter = meter
        self._finished = finished
        self._kept: list[tuple[InFlight, Sequence[int], float]] = []

    def over(self, ticket: Ticket, launch: InFlight) -> None:
        """A launch is over; its tokens are kept if all go on as they did."""
        rows = launch.rows
        if launch.batch is not None:
            rows = self._launcher.joined(launch.batch, launch.draw)
        if launch.draw is None:
            return
        assert ticket.seen_us is not None
        tokens, steady = launch.draw.read(), launch.steady
        if (
            steady is not None
            and steady is self._launcher.steady
            and steady.stays(tokens, launch.number)
        ):
            steady.token_us = ticket.seen_us
            self._kept.append((launch, tokens, ticket.seen_us))
            return
        self.flush()
        self._deliver(rows, tokens, ticket.seen_us)

    def flush(self) -> None:
        """Give requests what is owed to them: launches they were not told of, tokens kept."""
        self._launcher.settle()
        if not self._kept:
            return
        kept, self._kept = self._kept, []
        for launch, tokens, seen_us in kept:
            self._deliver(launch.rows, tokens, seen_us)

    def _deliver(
        self, rows: Sequence[tuple[Live, int]], tokens: Sequence[int], seen_us: float
    ) -> None:
        """Tokens of one launch to their requests."""
        outputs, finished = deliver(rows, tokens, seen_us)
        self.outputs += outputs
        ids = [output.id for output in outputs]
        for first in range(0, len(ids), TOLD):
            self._meter.delivered(ids[first : first + TOLD], seen_us)
        for live in finished:
            self._finished(live)


def deliver(
    rows: Iterable[tuple[Live, int]], tokens: Sequence[int], now_us: float
) -> tuple[list[Output], list[Live]]:
    """Hand a token to each request that a launch drew for.

    A request that ended, or began anew, since the launch gets none. One that draws again what it
    had drawn before it began anew emits nothing.

    Args:
        rows: A request and its epoch at the launch, by row.
        tokens: By row.
        now_us: When they were read.

    Returns:
        The outputs, and the requests that are finished by them.
    """
    outputs: list[Output] = []
    finished: list[Live] = []
    make = tuple.__new__  # half of what an output's own function takes
    for (live, epoch), token in zip(rows, tokens, strict=False):
        if live.epoch != epoch or live.stage == "done":
            continue
        live.ahead -= 1
        live.token_us = now_us
        request = live.request
        if live.again:
            if not _draws_again(live, token):
                finished.append(live)
            continue
        # What most tokens are: neither text nor an end. 128 of them are handed out a step.
        if request.detokenizer is None and token not in request.stop_token_ids:
            ids = request.ids
            ids.append(token)
            if len(ids) - request.prompt_len < request.max_new_tokens:
                outputs.append(make(Output, (request.index, token, None, None, None)))
                continue
            ids.pop()
        try:
            text, completion = request.accept(token)
        except Exception as reason:  # noqa: BLE001  a tokenizer's, which may raise anything
            live.error = RequestError(
                f"{request}: its tokenizer raised {type(reason).__name__} at the text of token "
                f"{token}: {reason}"
            )
            finished.append(live)
            continue
        live.completion = completion
        outputs.append(Output(live.id, token, text, completion))
        if completion is not None:
            finished.append(live)
    return outputs, finished


def _draws_again(live: Live, token: int) -> bool:
    """Take a token that was emitted before; False, with its error, where it is another one."""
    expected = live.again.pop(0)
    position = len(live.request.ids)
    live.request.ids.append(expected)
    if token == expected:
        return True
    live.error = ModelError(
        f"request {live.id} was computed again and drew {token} at position {position}, where it "
        f"had drawn {expected}: the model is not batch-invariant; pass preemption='keep'"
    )
    return False
