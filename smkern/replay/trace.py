"""A trace: requests that came to some service, as plain records, and what is cut from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from numbers import Integral, Real
from random import Random
from typing import Literal, NamedTuple

from smkern.errors import TraceError
from smkern.limits import shown

Arrivals = Literal["poisson", "recorded"]
Overlong = Literal["drop", "truncate"]

ARRIVALS: tuple[Arrivals, ...] = ("poisson", "recorded")
OVERLONG: tuple[Overlong, ...] = ("drop", "truncate")
COMMON = 0.5
"""Share of all requests from which on a block is everybody's, such as a system prompt."""


class Arrival(NamedTuple):
    """A request of a trace.

    Attributes:
        at_s: When it came, after the trace's begin.
        prompt_tokens: Tokens of its prompt.
        output_tokens: Tokens that it generated.
        blocks: Names of its prompt's first blocks of `Trace.block_tokens` tokens: equal beginnings
            of names are equal beginnings of tokens. What no name covers is its own.
    """

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order in which they came.

    Attributes:
        name: What tables call it.
        requests: In the order of their arrivals.
        block_tokens: Tokens of a block of `Arrival.blocks`.
        overlong: Requests that `fitting` dropped or cut.

    Raises:
        TraceError: no requests, one whose numbers cannot be, or one that came before the one in
            front of it.

    Example:
        >>> trace = Trace("two", (Arrival(0.0, 500, 20), Arrival(0.5, 100, 80)))
        >>> trace.rate_rps, trace.scaled(4.0).requests[1].at_s
        (2.0, 0.25)
    """

    name: str
    requests: tuple[Arrival, ...]
    block_tokens: int = 512
    overlong: int = 0

    def __post_init__(self) -> None:
        if not self.requests:
            raise TraceError(f"{self.name}: no requests: give one at least")
        before_s = 0.0
        for number, request in enumerate(self.requests):
            at_s, prompt, output, _ = request
            is_time = isinstance(at_s, float | int | Real) and before_s <= at_s < inf
            if not (is_time and _is_count(prompt) and _is_count(output)):
                raise TraceError(f"{self.name}, request {number}: {_wrong(request, before_s)}")
            before_s = at_s

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def seconds(self) -> float:
        """How long requests come, a mean gap behind the last included."""
        count = len(self.requests)
        return self.requests[-1].at_s * count / (count - 1) if count > 1 else 0.0

    @property
    def rate_rps(self) -> float:
        """Requests a second; 0 where all come at once."""
        return len(self.requests) / self.seconds if self.seconds else 0.0

    def fitting(self, max_context: int, overlong: Overlong = "drop") -> Trace:
        """Without requests that a model cannot hold, or with these cut.

        Args:
            max_context: Tokens of a prompt and its output together.
            overlong: "drop" leaves them out; "truncate" cuts the prompt's end, and the output
                where that alone is too long. `Trace.overlong` of the result counts them.

        Raises:
            TraceError: nothing is left.
        """
        if overlong not in OVERLONG:
            raise TraceError(f"overlong={overlong!r}: there is {' and '.join(OVERLONG)}")
        kept: list[Arrival] = []
        count = 0
        for request in self.requests:
            if request.prompt_tokens + request.output_tokens > max_context:
                count += 1
                if overlong == "drop":
                    continue
                output = min(request.output_tokens, max_context - 1)
                prompt = min(request.prompt_tokens, max_context - output)
                request = request._replace(prompt_tokens=prompt, output_tokens=output)
            kept.append(request)
        if not kept:
            raise TraceError(
                f"{self.name}: all {count} requests are longer than the {max_context} tokens that "
                "are replayed at most; take overlong='truncate', or where the model's context is "
                "longer SimServer(sizes=replace(sizes, max_context=...))"
            )
        return replace(self, requests=tuple(kept), overlong=self.overlong + count)

    def sessions(self) -> list[int]:
        """Of each request the number of its session: requests that share a prefix which is not
        everybody's are of one, others each of their own."""
        uses = Counter(block for request in self.requests for block in set(request.blocks))
        most = max(COMMON * len(self.requests), 1.0)
        known: dict[int, int] = {}
        found = []
        for number, request in enumerate(self.requests):
            own = next((block for block in request.blocks if uses[block] <= most), None)
            found.append(number if own is None else known.setdefault(own, number))
        return found

    def thinned(self, count: int, seed: int = 0) -> Trace:
        """A smaller trace of whole sessions, drawn by chance, in the order of their arrivals.

        Args:
            count: Requests of it: of the last session drawn only the first ones, so that it is
                exact. More than there are: the trace is repeated, with blocks of its own each time.
            seed: Which sessions are drawn.
        """
        if not isinstance(count, Integral) or count < 1:
            raise TraceError(f"{self.name}: {shown(count)} requests are asked for: take 1 or more")
        requests = list(self.requests)
        if count > len(requests):
            requests = _repeated(self, count)
        sessions = replace(self, requests=tuple(requests)).sessions()
        members: dict[int, list[int]] = {}
        for number, session in enumerate(sessions):
            members.setdefault(session, []).append(number)
        order = list(members)
        Random(seed).shuffle(order)
        chosen: list[int] = []
        for session in order:
            if len(chosen) >= count:
                break
            chosen += members[session][: count - len(chosen)]
        chosen.sort()
        first_s = requests[chosen[0]].at_s
        kept = [x._replace(at_s=x.at_s - first_s) for x in (requests[n] for n in chosen)]
        return replace(self, requests=tuple(kept))

    def scaled(self, rate_rps: float) -> Trace:
        """The recorded arrivals at another rate: all gaps longer or shorter alike.

        Raises:
            TraceError: no rate above 0, or arrivals without any gap.
        """
        check_rate(rate_rps)
        if not self.rate_rps:
            raise TraceError(f"{self.name}: all requests come at once: take Poisson arrivals")
        factor = self.rate_rps / rate_rps
        return self._at([request.at_s * factor for request in self.requests])

    def poisson(self, rate_rps: float, seed: int = 0) -> Trace:
        """The same requests in the same order, with independent gaps (an open loop).

        The gaps of one seed are the same at all rates but for their scale, so that rates compare.
        """
        check_rate(rate_rps)
        draw, at_s, times = Random(seed), 0.0, []
        for _ in self.requests:
            times.append(at_s / rate_rps)
            at_s += draw.expovariate(1.0)
        return self._at(times)

    def at_rate(self, rate_rps: float, arrivals: Arrivals = "poisson", seed: int = 0) -> Trace:
        """At a rate, by either kind of arrivals."""
        if arrivals not in ARRIVALS:
            raise TraceError(f"arrivals={arrivals!r}: there is {' and '.join(ARRIVALS)}")
        return self.poisson(rate_rps, seed) if arrivals == "poisson" else self.scaled(rate_rps)

    def without_outputs(self) -> Trace:
        """One token for each request: as if decode were free of charge."""
        return replace(self, requests=tuple(x._replace(output_tokens=1) for x in self.requests))

    def _at(self, times: Iterable[float]) -> Trace:
        pairs = zip(self.requests, times, strict=True)
        return replace(self, requests=tuple(x._replace(at_s=at_s) for x, at_s in pairs))


def _is_count(value: object) -> bool:
    return isinstance(value, int | Integral) and not value < 1


def _wrong(request: Arrival, before_s: float) -> str:
    """What of a request cannot be; `before_s`: when the one in front of it came."""
    for name in ("prompt_tokens", "output_tokens"):
        value = getattr(request, name)
        if not _is_count(value):
            return f"{name}={shown(value)}: give a whole number of at least 1"
    said = f"at_s={shown(request.at_s)}: give a finite time of at least 0, in seconds"
    return said + (f", and sort by time: {before_s:g} is in front of it" if before_s else "")


def check_rate(rate_rps: float) -> None:
    """Raise TraceError for a rate that no requests can have."""
    if not isinstance(rate_rps, Real) or not 0 < rate_rps < float("inf"):
        raise TraceError(f"a rate of {shown(rate_rps)} requests/s: give a finite number above 0")


def mixed(traces: Sequence[Trace], seed: int = 0) -> Trace:
    """Traces of one size of block as one: their requests in turns drawn by chance, an arrival's
    place in the whole being its place in its own trace.

    Raises:
        TraceError: blocks of different sizes.
    """
    sizes = {trace.block_tokens for trace in traces if any(x.blocks for x in trace.requests)}
    if len(sizes) > 1:
        raise TraceError(f"blocks of {sorted(sizes)} tokens cannot be mixed in one trace")
    draw = Random(seed)
    labelled = [number for number, trace in enumerate(traces) for _ in trace.requests]
    draw.shuffle(labelled)
    rows = [
        iter(_apart(trace, number, len(traces)).requests) for number, trace in enumerate(traces)
    ]
    times = sorted(request.at_s for trace in traces for request in trace.requests)
    requests = [next(rows[n])._replace(at_s=at_s) for n, at_s in zip(labelled, times, strict=True)]
    name = "+".join(trace.name for trace in traces)
    return Trace(name, tuple(requests), sizes.pop() if sizes else 512)


def _apart(trace: Trace, number: int, of: int) -> Trace:
    """Its blocks under names that no other of so many traces has."""
    return replace(
        trace,
        requests=tuple(
            x._replace(blocks=tuple(of * block + number for block in x.blocks))
            for x in trace.requests
        ),
    )


def _repeated(trace: Trace, count: int) -> list[Arrival]:
    """The requests again and again; what is not everybody's in a trace is not shared by copies."""
    uses = Counter(block for request in trace.requests for block in set(request.blocks))
    most = max(COMMON * len(trace.requests), 1.0)
    copies = -(-count // len(trace.requests))
    span_s = trace.seconds
    found = []
    for copy in range(copies):
        for request in trace.requests:
            blocks = tuple(
                block if uses[block] > most else block + copy * (1 << 40)
                for block in request.blocks
            )
            found.append(request._replace(at_s=request.at_s + copy * span_s, blocks=blocks))
    return found
