"""A timeline in a few figures."""

from __future__ import annotations

from itertools import pairwise
from statistics import median

from smkern.runtime.timeline.bubbles import LaneBubbles, bubbles
from smkern.runtime.timeline.trace import Span, Trace


def summarize(trace: Trace) -> list[tuple[str, str]]:
    """Rows of a name and its figures, for a table."""
    begin_us, end_us = trace.window_us
    found = bubbles(trace)
    rows = [
        ("Device", f"{trace.num_sms} SMs"),
        ("Window", _ms(end_us - begin_us)),
        ("Decode lane", _lane(found.decode)),
        ("Prefill lane", _lane(found.prefill)),
        ("Bubbles while work existed", f"{found.ratio:.1%}, mean of the lanes"),
        ("Time with no kernel (MuxWise)", f"{found.muxwise_ratio:.1%}, mean of the lanes"),
        ("Decisions", f"{len(trace.choices)}, of them {_switches(trace)} for another split"),
    ]
    if off := _off(trace.spans):
        rows.append(("Real over predicted time", off))
    if trace.dropped:
        rows.append(("Forgotten", f"{trace.dropped} earlier launches"))
    left = sum(not span.is_over for span in trace.spans)
    if left:
        rows.append(("Not over", f"{left} launches"))
    return rows


def _lane(lane: LaneBubbles) -> str:
    if not lane.launches:
        return "nothing ran"
    return (
        f"{lane.launches} launches, busy {_ms(lane.busy_us)}, bubbles {_ms(lane.bubble_us)} "
        f"({lane.ratio:.1%})"
    )


def _ms(us: float) -> str:
    return f"{us / 1e3:.3f} ms" if us < 1e4 else f"{us / 1e3:,.1f} ms"


def _switches(trace: Trace) -> int:
    rungs = [choice.rung for choice in trace.choices]
    return sum(before != after for before, after in pairwise(rungs))


def _off(spans: tuple[Span, ...]) -> str | None:
    """The median of real over predicted times, and how far nine of ten are from 1."""
    ratios = sorted(
        span.duration_us / span.predicted_us for span in spans if span.predicted_us and span.is_over
    )
    if not ratios:
        return None
    errors = sorted(abs(ratio - 1) for ratio in ratios)
    worst = errors[min(len(errors) - 1, int(0.9 * len(errors)))]
    return f"{median(ratios):.3f} (median), 90% of {len(ratios)} within {worst:.1%}"
