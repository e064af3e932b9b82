"""Tokens that launches drew, handed to their requests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from smkern.errors import ModelError, RequestError
from smkern.runtime.answers import tokens_error
from smkern.runtime.handle import Output
from smkern.runtime.in_flight import InFlight, LaunchError, preemptions_of
from smkern.runtime.input_processor import InputProcessor
from smkern.runtime.launcher import BatchLauncher
from smkern.runtime.request import Completion, Request
from smkern.runtime.step_log import StepLog
from smkern.runtime.ticket import Ticket
from smkern.runtime.timeline.stats import StatsMeter


class OutputProcessor:
    """Hands out tokens: before the next launch where a request may end by them, else behind it.
    Requests that end leave behind that where the device has its next step: no token waits for pages
    to be given back.

    A prompt on SMs of its own ends in the midst of a decode step, and its request joins the one
    behind that. Its first token is held until then, so that no gap is longer than a step.

    Args:
        launcher: Is told when requests are looked at.
        meter: Counts tokens, where there is no log.
        inputs: Says whether any token is looked at.
        finished: Told each request that is finished, or has an error.
        log: Is told when tokens came; then `outputs` are the ends of requests alone, and tokens by
            which none ends are kept until somebody looks at their requests.

    Attributes:
        outputs: What was handed out.
        leaving: Requests that end by it, or by an error, and have not left.
    """

    def __init__(
        self,
        launcher: BatchLauncher,
        meter: StatsMeter,
        inputs: InputProcessor,
        finished: Callable[[Request], None],
        log: StepLog | None,
    ) -> None:
        self.outputs: list[Output] = []
        self.leaving: list[Request] = []
        self._log = log
        self._inputs = inputs
        self._launcher = launcher
        self._meter = meter
        self._finished = finished
        self._kept: list[tuple[InFlight, Sequence[int], float]] = []
        self._held: list[tuple[Request, Output]] = []

    def over(self, ticket: Ticket, launch: InFlight) -> None:
        """A launch is over; its tokens are kept if all go on as they did.

        Raises:
            LaunchError: they could not be read; it names those that they were for.
        """
        self.end()  # who is through gets no token of the next step
        if launch.batch is not None:
            self._launcher.joined(launch.batch)
        draw, steady = launch.draw, launch.steady
        if draw is None:
            return
        if launch.batch is not None:
            launch.preemptions = preemptions_of(draw.requests)
        assert ticket.seen_us is not None
        if self._held and ticket.lane == "decode":
            self._release(launch, ticket.seen_us)
        try:
            tokens: Sequence[int] = draw.read()
            stays = (
                steady is not None
                and steady is self._launcher.steady
                and len(tokens) == len(draw.requests)
                and steady.stays(tokens, launch.number)
            )
        except Exception as reason:
            rows = zip(draw.requests, launch.preemptions, strict=True)
            lost = [x for x, preemptions in rows if x.num_preemptions == preemptions]
            raise LaunchError(lost, reason, "its tokens were read") from reason
        if stays and steady is not None:
            steady.token_us = ticket.seen_us
            self._kept.append((launch, tokens, ticket.seen_us))
            return
        self.hand_out()
        self._deliver([(launch, tokens, ticket.seen_us)])
        if self._step() is None:
            self.end()

    @property
    def is_counting(self) -> bool:
        """Whether no token is looked at: all that matters is how many there are."""
        return not self._inputs.reads_tokens

    def step_over(self) -> None:
        """A step of the loop ends: its tokens go out, or, with a log, wait."""
        if self._log is None:
            self.hand_out()
        else:
            self._launcher.settle()

    def skipped(self, launch: InFlight, times_us: Sequence[float]) -> None:
        """Launches like one on its way were made, and their tokens came at these times."""
        self.flush()
        assert launch.draw is not None
        assert self._log is not None
        first, count = self._log.add_steps(times_us), len(times_us)
        for request in launch.draw.requests:
            request.num_pending += count
        rows = zip(launch.draw.requests, launch.preemptions, strict=True)
        ended = count_tokens(rows, count, times_us[-1], self._log, first)
        assert not ended, "requests that end by a step are looked at"

    def flush(self) -> None:
        """Give requests what is owed to them, and let those leave that end."""
        self.hand_out()
        self.end()

    def hand_out(self) -> None:
        """Give requests what is owed to them: launches they were not told of, tokens kept."""
        self._launcher.settle()
        if self._kept:
            kept, self._kept = self._kept, []
            self._deliver(kept)

    def end(self) -> None:
        """Let those leave that end."""
        while self.leaving:
            self._finished(self.leaving[0])
            del self.leaving[0]  # behind it: where it raises, who had a last token is told no more

    def _step(self) -> InFlight | None:
        """The decode launch that runs; None: none is on its way."""
        launches = self._launcher.in_flight.items()
        return next((launch for ticket, launch in launches if ticket.lane == "decode"), None)

    def _release(self, ended: InFlight, now_us: float) -> None:
        """Hand out first tokens, as a step has ended: theirs whom the next one draws for, or whom
        none will that is on its way."""
        step, held = self._step(), self._held
        self._held = []
        for request, output in held:
            waits = step is not None and request not in step.requests
            if waits and request.stage == "running" and request not in ended.requests:
                self._held.append((request, output))
            elif request.stage != "done":
                request.token_us = request.first_token_us = now_us
                if self._log is not None:
                    self._log.add_tokens(request.index, self._log.add_steps([now_us]), 1)
                else:
                    self.outputs.append(output)
                    self._meter.delivered([request.index], now_us)

    def _hold(self, launch: InFlight, outputs: list[Output]) -> list[Output]:
        """Keep first tokens by which no request ends; the other outputs."""
        assert launch.draw is not None
        requests = {request.index: request for request in launch.draw.requests}
        others = []
        for output in outputs:
            request = requests[output.id]
            if output.completion is None and not request.first_token_us:
                request.token_us = 0.0
                self._held.append((request, output))
            else:
                others.append(output)
        return others

    def _deliver(self, kept: list[tuple[InFlight, Sequence[int], float]]) -> None:
        """Tokens of launches that drew for the same rows to their requests."""
        log, first_launch = self._log, kept[0][0]
        holds = first_launch.batch is not None and self._step() is not None
        if log is not None and self.is_counting and not holds:
            draw = first_launch.draw
            assert draw is not None
            first = log.add_steps([seen_us for _, _, seen_us in kept])
            rows = zip(draw.requests, first_launch.preemptions, strict=True)
            for request in count_tokens(rows, len(kept), kept[-1][2], log, first):
                self.outputs.append(Output(request.index, None, completion=request.completion))
                self.leaving.append(request)
            return
        for launch, tokens, seen_us in kept:
            self.end()  # an error of a text may end who has tokens of the next launch
            assert launch.draw is not None
            error = tokens_error(tokens, len(launch.draw.requests))
            if error is None:
                drawn = zip(launch.draw.requests, launch.preemptions, tokens, strict=True)
                outputs, finished = deliver(drawn, seen_us)
            else:
                outputs, finished = fail(launch, error)
            if holds:
                outputs = self._hold(launch, outputs)
            if launch.steady is None:  # a first token never comes from a step like the one before
                for request in launch.draw.requests:
                    request.first_token_us = request.first_token_us or request.token_us
            ids = [output.id for output in outputs]
            if log is not None:
                step = log.add_steps([seen_us])
                for id_ in ids:
                    log.add_tokens(id_, step, 1)
                outputs = [x._replace(token=None) for x in outputs if x.completion is not None]
            else:
                self._meter.delivered(ids, seen_us)
            self.outputs += outputs
            self.leaving += finished


def count_tokens(
    rows: Iterable[tuple[Request, int]], count: int, now_us: float, log: StepLog, first: int
) -> list[Request]:
    """Hand so many tokens, which are only counted, to each request that launches drew for.

    Args:
        rows: A request, and how often it had begun anew when the launches were made.
        count: Launches, by none of which but the last any request ends.
        now_us: When the last one's tokens were read.
        log: Where they are counted.
        first: The step of the first launch there.

    Returns:
        The requests that are finished by them.
    """
    finished: list[Request] = []
    for request, preemptions in rows:
        if request.num_preemptions != preemptions or request.stage == "done":
            continue
        request.num_pending -= count
        request.token_us = now_us
        request.first_token_us = request.first_token_us or now_us
        ids = request.ids
        ids.length += count
        log.add_tokens(request.index, first, count)
        if ids.length - request.prompt_len >= request.max_new_tokens:
            request.finish_reason = "length"
            request.completion = Completion(
                request.index, request.prompt_len, (), None, "length", request.cached_tokens or 0
            )
            finished.append(request)
    return finished


def fail(launch: InFlight, error: ModelError) -> tuple[list[Output], list[Request]]:
    """No token for those that a launch drew for: they are finished by an error."""
    assert launch.draw is not None
    rows = zip(launch.draw.requests, launch.preemptions, strict=True)
    finished = [x for x, n in rows if x.num_preemptions == n and x.stage != "done"]
    for request in finished:
        request.error = error
    return [], finished


def deliver(
    rows: Iterable[tuple[Request, int, int]], now_us: float
) -> tuple[list[Output], list[Request]]:
    """Hand a token to each request that a launch drew for.

    A request that ended, or began anew, since the launch gets none. One that draws again what it
    had drawn before it began anew emits nothing.

    Args:
        rows: A request, how often it had begun anew when the launch was made, and its token.
        now_us: When the tokens were read.

    Returns:
        The outputs, and the requests that are finished by them. Ends come last: who reads them has
        more to do, such as submitting another prompt, than the other tokens should wait for.
    """
    outputs: list[Output] = []
    ends: list[Output] = []
    finished: list[Request] = []
    make = tuple.__new__  # half of what an output's own function takes
    for request, preemptions, token in rows:
        if request.num_preemptions != preemptions or request.stage == "done":
            continue
        request.num_pending -= 1
        request.token_us = now_us
        if request.to_repeat:
            if not _repeats(request, token):
                finished.append(request)
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
            request.error = RequestError(
                f"{request}: its tokenizer raised {type(reason).__name__} at the text of token "
                f"{token}: {reason}"
            )
            finished.append(request)
            continue
        request.completion = completion
        output = Output(request.index, token, text, completion)
        if completion is None:
            outputs.append(output)
        else:
            ends.append(output)
            finished.append(request)
    return outputs + ends, finished


def _repeats(request: Request, token: int) -> bool:
    """Take a token that was emitted before; False, with its error, where it is another one."""
    expected, position = request.to_repeat[0], len(request.ids)
    request.ids += request.to_repeat[:1]  # no calls, behind which an interrupt might come
    del request.to_repeat[0]
    if token == expected:
        return True
    request.error = ModelError(
        f"request {request.index} was computed again and drew {token} at position {position}, "
        f"where it had drawn {expected}: the model is not batch-invariant; pass preemption='keep'"
    )
    return False
