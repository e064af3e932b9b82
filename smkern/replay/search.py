"""The highest rate at which a service keeps its limits: found by bisection, each rate a replay."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from statistics import fmean, median
from typing import TYPE_CHECKING, Protocol

from smkern.errors import ArgumentError, TraceError
from smkern.latency import Chunk, Size
from smkern.policies import Policy
from smkern.replay.records import Served
from smkern.replay.run import Server, replay
from smkern.replay.slo import Slo
from smkern.replay.trace import Arrivals, Trace

if TYPE_CHECKING:
    from smkern.latency.predictor import Predictor

PRECISION = 0.02
"""The result is a rate that is kept; one higher by this share is not."""
STEP = 1.15
"""Ratio of two rates while a bracket is sought."""
LARGEST_STEP = 2.0
RANGE = 1e3
"""A rate so many times the first one, or a part of it, is the last that is tried."""
SHORT = 5.0
"""A replay that is shorter than so many limits of first tokens is told of: what waits when it ends
is in time. Of chats with limits of 1 s, 2.6 s of requests gave 2.2 times the rate that 40 s gave,
8.4 s 1.26 times it."""
ROWS = 64
"""Decode rows with which a trace's capacity is estimated."""


class Criterion(Protocol):
    """What must hold of a replay."""

    def is_met(self, served: Served) -> bool: ...


@dataclass(slots=True)
class Goodput:
    """The highest rate that is kept.

    Attributes:
        rate_rps: Requests a second, the mean over seeds; 0 where no rate is kept.
        by_seed: That of each seed.
        served: The replay of each seed at its rate; None where no rate is kept.
        failed: The replay at the lowest rate that each seed did not keep.
        replays: How many were run.
    """

    rate_rps: float = 0.0
    by_seed: list[float] = field(default_factory=list)
    served: list[Served | None] = field(default_factory=list)
    failed: list[Served | None] = field(default_factory=list)
    replays: int = 0


def highest(
    is_kept: Callable[[float], bool],
    start: float,
    *,
    precision: float = PRECISION,
    step: float = STEP,
    floor: float | None = None,
) -> tuple[float, float]:
    """The highest rate that is kept, and the lowest tried that is not, at most `precision` apart.

    First the start, then steps away from it, longer each time, until one rate is kept and another
    is not; then the geometric middle of both again and again.

    Args:
        is_kept: Asked about rates; kept below some rate and not above, but for noise.
        start: The first rate.
        precision: Share of the rate.
        step: Ratio of the first two rates.
        floor: Below it no rate is tried; 0.0 is the answer where it is not kept.

    Returns:
        (kept, not kept); 0.0 and infinity where there was none.

    Raises:
        ArgumentError: a start or a precision that is no number above 0.

    Example:
        >>> kept, failed = highest(lambda rate: rate <= 10.0, 3.0)
        >>> kept <= 10.0 < failed <= 1.021 * kept
        True
    """
    if not start > 0 or not precision > 0 or not step > 1:
        raise ArgumentError(
            f"start={start}, precision={precision}, step={step}: give a start and a precision "
            "above 0, and a step above 1"
        )
    lowest, highest_rate = start / RANGE if floor is None else floor, start * RANGE
    low, high, rate, ratio = 0.0, inf, start, step
    while not low or high == inf:
        if is_kept(rate):
            low = rate
        else:
            high = rate
        if (low and rate >= highest_rate) or (not low and rate <= lowest):
            return low, high
        rate = rate * ratio if low else max(rate / ratio, lowest)
        ratio = min(ratio**1.5, LARGEST_STEP)
    while high > low * (1.0 + precision):
        middle = (low * high) ** 0.5
        if is_kept(middle):
            low = middle
        else:
            high = middle
    return low, high


def goodput(
    policy: Callable[[], Policy],
    trace: Trace,
    server: Server,
    criterion: Slo | Criterion,
    *,
    start_rps: float | None = None,
    seeds: Sequence[int] = (0,),
    arrivals: Arrivals = "poisson",
    requests: int | None = None,
    precision: float = PRECISION,
    floor_rps: float | None = None,
) -> Goodput:
    """The highest rate at which a policy keeps the limits on a trace.

    Each rate is a replay of the same requests; of a seed they come in the same pattern at every
    rate, faster or slower. A replay ends as soon as its limits are lost for certain. A short one
    keeps them at rates that a long one does not: there is a warning where the requests come within
    a few of their limits.

    Args:
        policy: Makes a new policy for each replay.
        trace: Requests; thinned to `requests` for each seed.
        server: What serves.
        criterion: p99 of TBT and 99% of first tokens (`Slo`), or a paper's criterion.
        start_rps: Where the search begins: near the answer it takes fewer replays. None: 1.
        seeds: Of which requests are drawn, and of their arrivals; one search each.
        arrivals: "poisson", or "recorded" ones scaled.
        requests: Requests of a replay. None: all of the trace.
        precision: Of the rate, as a share.
        floor_rps: Below it no rate is tried.

    Raises:
        TraceError: no request fits the model, or so few are replayed that no rate is too high.
        ArgumentError: a policy in place of what makes one.

    Example:
        >>> from smkern.policies import Chunked
        >>> from smkern.replay import SimServer, Slo, load_trace
        >>> trace, server = load_trace("arxiv-like", requests=150), SimServer("qwen3-8b")
        >>> found = goodput(
        ...     lambda: Chunked(512), trace, server, Slo(50.0), start_rps=4.0, precision=1.0)
        >>> found.rate_rps > 1.0
        True
    """
    if not callable(policy):
        raise ArgumentError(
            f"policy={policy!r:.200}: pass what makes one anew for each replay, such as "
            "lambda: Chunked(512)"
        )
    if not seeds:
        raise TraceError("no seeds: give one at least")
    result, slo = Goodput(), criterion if isinstance(criterion, Slo) else None
    start = start_rps or 1.0
    for seed in seeds:
        drawn = trace.fitting(server.max_context)
        drawn = drawn.thinned(len(drawn) if requests is None else requests, seed)
        found: dict[float, Served] = {}

        def is_kept(rate: float, seed: int = seed, drawn: Trace = drawn) -> bool:
            result.replays += 1
            served = replay(
                drawn.at_rate(rate, arrivals, seed), server, policy(), slo=slo, drain=slo is None
            )
            found[rate] = served  # noqa: B023  searched before the loop goes on
            return criterion.is_met(served)

        # a second seed's answer lies near the first's
        near = STEP if not result.by_seed or not start_rps else 1.0 + 2 * precision
        low, high = highest(is_kept, start, precision=precision, step=near, floor=floor_rps)
        if high == inf:
            raise TraceError(
                f"{trace.name}: even at {low:.0f} requests/s {len(drawn)} requests keep their "
                "limits, for all come before the first is due: replay more of them"
            )
        if low:
            _warn_if_short(found[low])
        result.by_seed.append(low)
        result.served.append(found.get(low))
        result.failed.append(found.get(high))
        start = start_rps = low or start
    result.rate_rps = fmean(result.by_seed)
    return result


def _warn_if_short(served: Served) -> None:
    """Tell of a replay that ends before requests that wait are due."""
    limit_s = median(record.limit_s for record in served.records)
    if served.end_s < SHORT * limit_s:
        warnings.warn(
            f"{served.trace.name}: {len(served.records)} requests come within {served.end_s:.1f} s "
            f"at {served.trace.rate_rps:.1f}/s, and first tokens are due within {limit_s:.1f} s: "
            "the goodput may be too high; replay more requests",
            RuntimeWarning,
            stacklevel=3,
        )


def capacity_rps(trace: Trace, predictor: Predictor, num_sms: int, num_layers: int) -> float:
    """About how many requests a second a device could serve: a start for a search.

    Prompts of the mean length on the whole device, and each output's share of steps of 64 rows.
    """
    count = len(trace.requests)
    prompt = max(1, round(sum(x.prompt_tokens for x in trace.requests) / count))
    output = sum(x.output_tokens for x in trace.requests) / count
    prompts = Size((Chunk(prompt),), num_layers, num_layers, head=True)
    step = Size((), num_layers, num_layers, False, ROWS, ROWS * round(prompt + output / 2))
    us = predictor.alone_us(prompts, num_sms)
    return 1e6 / (us + output / ROWS * predictor.alone_us(step, num_sms))
