"""One replay: requests submitted as they come, tokens' times kept, to the end or to a verdict."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

from smkern.errors import SmkernError
from smkern.replay.limits import new_tokens, ttft_limits_s
from smkern.replay.named import name_of
from smkern.replay.records import Record, Served
from smkern.replay.slo import Slo
from smkern.replay.trace import Trace
from smkern.runtime.step_log import StepLog

if TYPE_CHECKING:
    from smkern.latency.predictor import Predictor
    from smkern.policies import Policy
    from smkern.runtime.multiplexer import Multiplexer

WARM = 0.2
"""Share of the requests, the first ones, that are not counted."""


class Session(Protocol):
    """A runtime that serves one replay, and how prompts are made for it.

    Attributes:
        mux: The runtime.
        log: What it is given; None: each output is a token, as it comes.
    """

    mux: Multiplexer
    log: StepLog | None

    def prompt(self, trace: Trace, number: int) -> Any:
        """The prompt of a request."""
        ...

    def lead_s(self, trace: Trace) -> float:
        """How long submitting takes, at most: the first request comes so much later."""
        ...

    def now_us(self) -> float:
        """The clock that arrivals and tokens are measured with."""
        ...

    def close(self, served: Served, live: Sequence[int]) -> None:
        """It is over: what the runtime knows goes into `served`, and requests that are not through
        (their numbers in the runtime) are cancelled."""
        ...


class Server(Protocol):
    """Serves traces, one after another.

    Attributes:
        name: What tables call it.
        predictor: Prices its launches, for policies.
        num_sms, num_layers: Of its device and its model.
        kv_tokens: Size of its pool.
        max_context: Tokens of a request.
    """

    name: str
    predictor: Predictor
    num_sms: int
    num_layers: int
    kv_tokens: int
    max_context: int

    def open(self, policy: Policy, *, keep: bool = False) -> Session:
        """A session under a policy; `keep`: with what a picture of it needs."""
        ...


def records_of(trace: Trace, kv_tokens: int) -> list[Record]:
    """The requests of a trace with their limits, before anything is served."""
    limits = ttft_limits_s(trace, kv_tokens)
    rows = zip(trace.requests, new_tokens(trace, kv_tokens), limits, strict=True)
    return [Record(x.at_s, x.prompt_tokens, new, x.output_tokens, limit) for x, new, limit in rows]


def replay(
    trace: Trace,
    server: Server,
    policy: Policy,
    *,
    name: str = "",
    slo: Slo | None = None,
    warm: float = WARM,
    drain: bool = True,
    keep: bool = False,
) -> Served:
    """Serve a trace in an open loop: requests come when it says, whatever the service does.

    Args:
        trace: Requests, at their rate.
        server: What serves.
        policy: Decides.
        name: What tables call the policy; "": its repr.
        slo: Limits; the replay ends as soon as they cannot be kept any more. None: it does not.
        warm: Share of the requests that come before anything is counted.
        drain: Whether requests are served to their last token; else the replay ends when each has
            its first, or has missed it.
        keep: Whether what ran is kept, for pictures and the runtime's figures; slower.

    Returns:
        What became of each request.
    """
    records = records_of(trace, server.kv_tokens)
    warm_s = records[min(int(warm * len(records)), len(records) - 1)].at_s
    session = server.open(policy, keep=keep)
    served = Served(name or name_of(policy), trace, records, warm_s, records[-1].at_s)
    loop = _Loop(session, trace, served, slo, drain)
    try:
        loop.run()
        if errors := session.mux.errors:
            served.failed_decision = str(errors[0][1])
    finally:
        session.close(served, loop.live)
    served.split = [(at_s - loop.begin_s, rung) for at_s, rung in served.split]
    return served


class _Loop:
    """The requests of one replay on their way: numbers in the trace to numbers in the runtime."""

    def __init__(
        self, session: Session, trace: Trace, served: Served, slo: Slo | None, drain: bool
    ) -> None:
        self._session = session
        self._mux = session.mux
        self._log = StepLog() if session.log is None else session.log
        self._trace = trace
        self._served = served
        self._records = served.records
        self._drain = drain
        self._watch = None if slo is None else slo.watch(self._records, served.warm_s)
        self._ids: dict[int, int] = {}
        self._live: dict[int, int] = {}
        self._begin_us = session.now_us() + 1e6 * session.lead_s(trace)

    @property
    def live(self) -> list[int]:
        """Numbers in the runtime of requests that are not through."""
        return list(self._live)

    @property
    def begin_s(self) -> float:
        """When the trace began, on the session's clock."""
        return 1e-6 * self._begin_us

    def run(self) -> None:
        """To the end of the trace, or until the verdict is certain."""
        log, is_told = self._log, self._session.log is not None
        self._submit()
        looked_s = 0.0
        for output in self._mux.run():
            now_us = self._session.now_us()
            if not is_told and output.token is not None:
                log.add_tokens(output.id, log.add_steps([now_us]), 1)
            if output.error is not None or output.completion is not None or output.token is None:
                self._ended(output.id, output.error)
            now_s = 1e-6 * (now_us - self._begin_us)
            if now_s > looked_s + 0.25:
                looked_s = now_s
                if self._is_decided(now_s):
                    break
        for number in list(self._live.values()):
            self._keep(number)

    def _submit(self) -> None:
        """All requests, before the first comes: the runtime knows when to wake."""
        from smkern.models.sampling import SamplingParams

        for number, record in enumerate(self._records):
            params = SamplingParams(max_new_tokens=record.output_tokens, ignore_eos=True)
            try:
                handle = self._mux.submit(
                    self._session.prompt(self._trace, number), params,
                    arrival_us=self._begin_us + 1e6 * record.at_s,
                    deadline_ms=1e3 * record.limit_s,
                )  # fmt: skip
            except SmkernError as error:
                record.error = str(error)
                continue
            self._ids[number] = handle.id
            self._live[handle.id] = number

    def _ended(self, id: int, error: SmkernError | None) -> None:
        number = self._live.pop(id, None)
        if number is None:
            return
        self._keep(number)
        if error is not None:
            self._records[number].error = str(error)
        if self._watch is not None:
            self._watch.ended(self._records[number])

    def _keep(self, number: int) -> None:
        """What is known of a request's tokens goes into its record."""
        id = self._ids.pop(number)
        times = self._log.token_us(id)
        begin_us = self._begin_us
        self._records[number].token_s = array("d", [1e-6 * (at_us - begin_us) for at_us in times])
        self._log.forget(id)

    def _is_decided(self, now_s: float) -> bool:
        if self._watch is not None:
            self._served.stopped = self._watch.verdict(now_s, self._first_s)
            if self._served.stopped:
                return True
        return not self._drain and now_s > self._served.end_s and self._all_began(now_s)

    def _all_began(self, now_s: float) -> bool:
        """Whether every request has its first token, or can only be late."""
        records = self._records
        return all(
            self._first_s(n) < inf or records[n].at_s + records[n].limit_s < now_s
            for n in self._live.values()
        )

    def _first_s(self, number: int) -> float:
        """When a request's first token came; infinity: not yet."""
        id = self._ids.get(number)
        if id is None:
            times = self._records[number].token_s
            return times[0] if len(times) else inf
        live = self._log.token_us(id)
        return 1e-6 * (live[0] - self._begin_us) if len(live) else inf
