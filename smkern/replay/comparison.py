"""Policies against each other on one trace: a table, a picture, and who won."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smkern.errors import ArgumentError
from smkern.limits import shown
from smkern.policies import Policy
from smkern.replay.load import load_trace
from smkern.replay.metrics import Report
from smkern.replay.named import name_of, policy_named
from smkern.replay.records import Served
from smkern.replay.run import Server, replay
from smkern.replay.search import Goodput, capacity_rps, goodput
from smkern.replay.simulated import SimServer
from smkern.replay.slo import Slo
from smkern.replay.trace import Arrivals, Overlong, Trace

Choice = str | Policy | Callable[[], Policy]
"""A policy by its name and settings, itself, or what makes it."""
LOAD = 0.7
"""Share of a trace's estimated capacity at which policies are compared where no rate is given."""


@dataclass(slots=True)
class Comparison:
    """What came of each policy.

    Attributes:
        title: What was replayed.
        slo: The limits.
        reports: Figures by policy, in the order given.
        served: The replays by policy.
        goodputs: The highest rates by policy; empty where they were not sought.
    """

    title: str
    slo: Slo
    reports: dict[str, Report] = field(default_factory=dict)
    served: dict[str, Served] = field(default_factory=dict)
    goodputs: dict[str, Goodput] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [self.title, *aligned(self.table()), self.verdict()]
        for name, one in self.served.items():
            if errors := [x.error for x in one.counted if x.error is not None]:
                lines.append(f"{name}: {len(errors)} requests failed: {errors[0]}")
        lines += [
            f"{name} failed, and plain decisions took its place: {failure}"
            for name in self.served
            if (failure := self._failure(name))
        ]
        return "\n".join(lines)

    def table(self) -> list[tuple[str, ...]]:
        """A row a policy under a row of names; times in ms."""
        names = [
            "policy",
            "TTFT p50",
            "p99",
            "TBT p50",
            "p99",
            "worst gap p99",
            "in TBT",
            "in TTFT",
        ]
        names += ["done/s", "tokens/s", "bubbles"]
        if self.goodputs:
            names.insert(1, "goodput")
        rows = [tuple(names)]
        for name, one in self.reports.items():
            row = [name]
            if self.goodputs:
                row.append(f"{self.goodputs[name].rate_rps:.2f}")
            row += [_ms(one.ttft_ms.p50), _ms(one.ttft_ms.p99)]
            row += [_ms(one.tbt_ms.p50), _ms(one.tbt_ms.p99), _ms(one.worst_gap_ms.p99)]
            row += [f"{one.tbt_kept or 0:.2%}", f"{one.ttft_kept:.2%}"]
            row += [f"{one.requests_per_s:.2f}", f"{one.tokens_per_s:.0f}"]
            row.append(f"{one.runtime['bubbles']:.1%}" if one.runtime else "-")
            rows.append(tuple(row))
        return rows

    def ranking(self) -> list[str]:
        """The policies, the best first: by goodput where it was sought; else those that keep both
        limits first, and by the share of gaps and first tokens that do, then by TTFT. Those whose
        decisions failed come last: their figures are of the decisions in place of these."""

        def rank(name: str) -> tuple[bool, bool, float, float]:
            one, is_kept = self.reports[name], self._keeps(name)
            has_failed = bool(self._failure(name))
            if self.goodputs:
                return has_failed, False, -self.goodputs[name].rate_rps, 0.0
            kept = 0.0 if is_kept else -one.kept
            return has_failed, not is_kept, kept, one.ttft_ms.mean or 0.0

        return sorted(self.reports, key=rank)

    def verdict(self) -> str:
        """Who won, and by what."""
        best, *others = self.ranking()
        if self.goodputs:
            rate = self.goodputs[best].rate_rps
            said = f"{best} wins: {rate:.2f} requests/s within the limits"
            if others:
                second = self.goodputs[others[0]].rate_rps
                said += f", {others[0]} {second:.2f}"
            return said + "."
        one = self.reports[best]
        if not self._keeps(best):
            return (
                f"None keeps the limits; {best} comes nearest: {one.kept:.1%} of its gaps or first "
                "tokens do."
            )
        said = f"{best} wins: it keeps the limits, mean TTFT {one.ttft_ms.mean or 0:.0f} ms"
        keep = [name for name in others if self._keeps(name)]
        if keep:
            second = self.reports[keep[0]].ttft_ms.mean or 0.0
            return f"{said}; of {len(keep) + 1} that do {keep[0]} is next, {second:.0f} ms."
        return f"{said}; no other does." if others else f"{said}."

    def _failure(self, name: str) -> str:
        """The first error of a policy's decisions, also while its goodput was sought; "": none."""
        sought = self.goodputs.get(name, Goodput())
        served = (self.served[name], *sought.served, *sought.failed)
        return next((x.failed_decision for x in served if x and x.failed_decision), "")

    def _keeps(self, name: str) -> bool:
        return self.reports[name].kept >= 1.0 - self.slo.tolerated

    def plot(self, path: Path | str) -> Path:
        """Draw all policies in one picture: first tokens, gaps, and the split over time."""
        from smkern.replay.plots import draw_comparison

        heading = f"{self.title}\n{self.verdict()}"
        return draw_comparison(heading, self.served, self.slo.tbt_ms, Path(path))

    def to_json(self) -> dict[str, Any]:
        """Figures by policy."""
        found: dict[str, Any] = {name: one.to_json() for name, one in self.reports.items()}
        for name, one in self.goodputs.items():
            found[name]["goodput_rps"] = round(one.rate_rps, 4)
        return found


def compare(
    policies: Iterable[Choice] | Mapping[str, Choice] | str | Policy,
    trace: Trace | Path | str,
    *,
    model: str = "qwen3-8b",
    tbt_ms: float = 30.0,
    rate_rps: float | None = None,
    requests: int | None = None,
    order: str = "fcfs",
    arrivals: Arrivals = "poisson",
    seed: int = 0,
    overlong: Overlong = "drop",
    find_goodput: bool = False,
    server: Server | None = None,
    on_served: Callable[[str], None] | None = None,
) -> Comparison:
    """Replay a trace under several policies, with the same requests at the same times.

    Args:
        policies: Names with settings ("chunked", "static_split:32"), policies, or what makes one;
            a mapping gives them names of its own. One alone needs no list.
        trace: A trace, a file, or a generator's name.
        model: A preset's name, where it is simulated.
        tbt_ms: Limit of p99 of the time between tokens. That of first tokens is the larger of 1 s
            and 1 ms for each new token.
        rate_rps: Requests a second. None: 0.7 of what the device could about serve.
        requests: Of the trace, whole sessions drawn by chance. None: all.
        order: In which order requests wait, for policies given by name.
        arrivals: "poisson", or "recorded" scaled to the rate.
        seed: Of requests and arrivals.
        overlong: What becomes of requests longer than the server's context, 40,960 tokens or the
            model's.
        find_goodput: Whether the highest rate within the limits is sought as well; some ten
            replays a policy.
        server: What serves. None: a simulated H200.
        on_served: Told each policy's name when it is done.

    Returns:
        Figures, a table (`print` it), `plot`, and who won.

    Raises:
        TraceError, ArgumentError: a trace, a policy or a limit that is none.

    Example:
        >>> import smkern
        >>> result = smkern.compare(["chunked", "static_split:32"], "sharegpt-like", requests=30)
        >>> result.ranking()[0] in ("chunked", "static_split:32")
        True
    """
    slo = Slo(tbt_ms)
    server = SimServer(model) if server is None else server
    if not hasattr(server, "max_context"):
        raise ArgumentError(
            f"server={server!r:.200}: pass what serves (smkern.replay.Server), or None: simulated"
        )
    loaded = trace if isinstance(trace, Trace) else load_trace(trace)
    fitting = loaded.fitting(server.max_context, overlong)
    drawn = fitting if requests is None else fitting.thinned(requests, seed)
    start_rps = capacity_rps(drawn, server.predictor, server.num_sms, server.num_layers)
    timed = drawn.at_rate(LOAD * start_rps if rate_rps is None else rate_rps, arrivals, seed)
    makers = _makers(policies, server, tbt_ms, order)
    title = (
        f"{loaded.name}, {len(timed)} requests at {timed.rate_rps:.2f}/s ({arrivals}) on "
        f"{server.name}, p99 TBT within {tbt_ms:g} ms"
    )
    if timed.overlong:
        title += f"; {timed.overlong} overlong: {overlong}"
    result = Comparison(title, slo)
    for name, make in makers.items():
        served = replay(timed, server, make(), name=name, keep=True)
        result.served[name] = served
        result.reports[name] = Report.of(served, slo)
        if find_goodput:
            result.goodputs[name] = goodput(
                make, fitting, server, slo, start_rps=start_rps, seeds=(seed,),
                arrivals=arrivals, requests=requests,
            )  # fmt: skip
        if on_served is not None:
            on_served(name)
    return result


def _makers(
    policies: Iterable[Choice] | Mapping[str, Choice] | str | Policy,
    server: Server,
    tbt_ms: float,
    order: str,
) -> dict[str, Callable[[], Policy]]:
    """What makes a new policy for each replay, by name."""
    given: Any = policies
    if isinstance(given, str) or hasattr(given, "decide"):
        given = [given]
    if not isinstance(given, Iterable):
        raise ArgumentError(
            f"policies={shown(given)}: give a list of policies, a mapping with their names, or "
            "one policy"
        )
    named = given.items() if isinstance(given, Mapping) else [(None, x) for x in given]
    found: dict[str, Callable[[], Policy]] = {}
    for name, choice in named:
        if isinstance(choice, str):
            make = _by_name(choice, server, tbt_ms, order)
        elif hasattr(choice, "decide") and not isinstance(choice, type):
            make = _copies(choice)
        elif callable(choice):
            make = choice
        else:
            raise ArgumentError(
                f"{choice!r} is no policy: give a name, a policy, or what makes one"
            )
        label = name or (choice if isinstance(choice, str) else name_of(make()))
        if label in found:
            raise ArgumentError(f"two policies are called {label!r}: give a mapping with names")
        found[label] = make
    if not found:
        raise ArgumentError("no policies: give one at least")
    return found


def _by_name(spec: str, server: Server, tbt_ms: float, order: str) -> Callable[[], Policy]:
    def make() -> Policy:
        return policy_named(spec, server.predictor, tbt_slo_ms=tbt_ms, order=order)

    make()  # what it refuses is said before anything is replayed
    return make


def _copies(policy: Policy) -> Callable[[], Policy]:
    """Each replay has its own: a policy keeps notes."""
    return lambda: deepcopy(policy)


def _ms(value: float | None) -> str:
    if value is None or value == float("inf"):
        return "-"
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as lines, the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
