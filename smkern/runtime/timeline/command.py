"""`smkern timeline`: a saved timeline in a few figures and as a picture."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import median

import click

from smkern.runtime.timeline.bubbles import LaneBubbles, bubbles
from smkern.runtime.timeline.timeline import Timeline
from smkern.runtime.timeline.trace import Span, Trace

SUFFIXES = (".json", ".gz", ".png")
"""Endings of the trace's name, or of --out's, that are replaced."""


@click.command("timeline")
@click.argument("trace", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    default=None,
    help="Name of the picture; by default the trace's, ending in .png, beside it.",
)
@click.option("--from-ms", type=float, default=None, help="Where the picture begins.")
@click.option("--to-ms", type=float, default=None, help="Where the picture ends.")
@click.option("--title", default="", help="Title of the picture.")
def command(
    trace: Path, out: Path | None, from_ms: float | None, to_ms: float | None, title: str
) -> None:
    """Draw a timeline that `Timeline.save` wrote, and print its figures.

    Perfetto (ui.perfetto.dev) opens the trace as it is, and zooms.
    """
    from smkern.runtime.timeline import plot as timeline_plot

    found = Timeline.load(trace)
    stem = _stem(trace if out is None else out)
    begin_us, end_us = (None if ms is None else 1e3 * ms for ms in (from_ms, to_ms))
    picture = timeline_plot.draw(
        found, stem.with_name(f"{stem.name}.png"), begin_us=begin_us, end_us=end_us, title=title
    )
    for name, value in summarize(found):
        click.echo(f"{name:32}{value}")
    click.echo(str(picture))


def _stem(path: Path) -> Path:
    while path.suffix in SUFFIXES:
        path = path.with_suffix("")
    return path


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
