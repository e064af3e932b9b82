"""A timeline as a picture: lanes, bubbles, the split, requests that decode and wait."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from smkern.errors import ArgumentError
from smkern.runtime.place import LANES, Lane
from smkern.runtime.timeline.bubbles import bubbles, gaps
from smkern.runtime.timeline.trace import Span, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLORS = {"decode": "#1b6ca8", "prefill": "#e0a030", "mixed": "#6a994e"}
"""By the work's name; an engine's own names share `OTHER`."""
OTHER = "#8d6a9f"
BUBBLE = "#c8553d"
IDLE = "#e4e4e4"
LEVELS = {LANES[0]: 1.0, LANES[1]: 0.0}
HEIGHT = 0.72
EDGED = 0.002
"""Share of the width from which on launches are told apart by a line."""
LABELLED = 0.06
"""Share of the width that a launch must take to bear its place."""


def draw(
    trace: Trace,
    path: Path,
    *,
    begin_us: float | None = None,
    end_us: float | None = None,
    title: str = "",
) -> Path:
    """Draw a trace as a picture, PNG or whatever the name ends in.

    Args:
        trace: What is drawn.
        path: Where it is written.
        begin_us, end_us: The stretch, counted from the first launch's begin; None: all.
        title: Above it; "": its figures.

    Raises:
        ArgumentError: nothing was launched within the stretch.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    origin_us = trace.window_us[0]
    first_us = origin_us + (begin_us or 0.0)
    last_us = trace.window_us[1] if end_us is None else origin_us + end_us
    shown = [s for s in trace.spans if s.begin_us < last_us and s.end_us > first_us]
    if not shown or not 0 < last_us - first_us < inf:
        raise ArgumentError(
            f"no launch from {first_us - origin_us:.0f} to {last_us - origin_us:.0f} us: this "
            f"timeline has {len(trace.spans)} launches in "
            f"{trace.window_us[1] - origin_us:.0f} us; choose a stretch within"
        )
    figure = Figure(figsize=(13, 6.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(4, 1, sharex=True, height_ratios=(2.2, 1.2, 1, 1))
    figure.suptitle(title or _title(trace), fontsize=11)
    _lanes(axes[0], trace, shown, origin_us, (first_us, last_us))
    _split(axes[1], trace, origin_us, last_us)
    _counts(axes[2], axes[3], trace, origin_us, last_us)
    axes[3].set_xlabel("ms", fontsize=9)
    axes[3].set_xlim((first_us - origin_us) / 1e3, (last_us - origin_us) / 1e3)
    for axis in axes:
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.align_ylabels(axes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": None} if path.suffix == ".png" else None)
    return path


def _title(trace: Trace) -> str:
    found = bubbles(trace)
    return (
        f"{trace.num_sms} SMs, bubbles while work existed {found.ratio:.1%}, time with no kernel "
        f"{found.muxwise_ratio:.1%} (means of the lanes)"
    )


def _lanes(
    axis: Axes, trace: Trace, shown: Sequence[Span], origin_us: float, window: tuple[float, float]
) -> None:
    for gap in gaps(trace):
        if gap.end_us <= window[0] or gap.begin_us >= window[1]:
            continue
        _bars(axis, gap.lane, [(gap.begin_us, gap.end_us)], origin_us, IDLE, hatch="////")
        _bars(axis, gap.lane, gap.bubbles, origin_us, BUBBLE, hatch="////")
    order = list(COLORS)
    names = sorted(
        {span.name for span in shown},
        key=lambda name: (order.index(name) if name in order else len(order), name),
    )
    width_us = window[1] - window[0]
    for kind in product(names, LANES, (True, False), (True, False)):
        name, lane, is_over, is_thin = kind
        stretches = [
            (s.begin_us, s.end_us)
            for s in shown
            if (s.name, s.lane, s.is_over, s.duration_us < EDGED * width_us) == kind
        ]
        edge, alpha = 0.0 if is_thin else 0.3, 1.0 if is_over else 0.35
        _bars(axis, lane, stretches, origin_us, COLORS.get(name, OTHER), edge=edge, alpha=alpha)
    for span in shown:
        begin_us, end_us = max(span.begin_us, window[0]), min(span.end_us, window[1])
        if end_us - begin_us >= LABELLED * width_us:
            axis.text(
                ((begin_us + end_us) / 2 - origin_us) / 1e3, LEVELS[span.lane],
                f"{span.place.num_sms}", ha="center", va="center", fontsize=8, color="white",
            )  # fmt: skip
    axis.set_yticks([LEVELS[lane] for lane in LANES], LANES)
    axis.set_ylim(-0.6, 1.6)
    _legend(axis, names)


def _legend(axis: Axes, names: Iterable[str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=COLORS.get(name, OTHER), label=name) for name in names]
    handles.append(Patch(facecolor=BUBBLE, edgecolor="white", hatch="////", label="bubble"))
    handles.append(Patch(facecolor=IDLE, edgecolor="white", hatch="////", label="nothing to do"))
    axis.legend(
        handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=6, fontsize=8,
        frameon=False,
    )  # fmt: skip


def _bars(
    axis: Axes, lane: Lane, stretches: Sequence[tuple[float, float]], origin_us: float, color: str,
    *, hatch: str | None = None, edge: float = 0.0, alpha: float = 1.0,
) -> None:  # fmt: skip
    if not stretches:
        return
    bars = [((begin - origin_us) / 1e3, (end - begin) / 1e3) for begin, end in stretches]
    axis.broken_barh(
        bars, (LEVELS[lane] - HEIGHT / 2, HEIGHT), facecolor=color, edgecolor="white",
        linewidth=edge, hatch=hatch, alpha=alpha,
    )  # fmt: skip


def _split(axis: Axes, trace: Trace, origin_us: float, last_us: float) -> None:
    changes = trace.split()
    if not changes:
        return
    times = [(at_us - origin_us) / 1e3 for at_us, _, _ in changes]
    times.append((last_us - origin_us) / 1e3)
    sides = [[c[side] for c in changes] + [changes[-1][side]] for side in (1, 2)]
    axis.stackplot(
        times, *sides, step="post", colors=[COLORS["decode"], COLORS["prefill"]], alpha=0.6
    )
    axis.set_ylim(0, trace.num_sms)
    axis.set_ylabel("SMs", fontsize=9)


def _counts(decoding: Axes, waiting: Axes, trace: Trace, origin_us: float, last_us: float) -> None:
    states = trace.states
    times = [(state.at_us - origin_us) / 1e3 for state in states]
    times.append((last_us - origin_us) / 1e3)
    for axis, label, values in (
        (decoding, "decoding", [state.decoding for state in states]),
        (waiting, "waiting", [state.waiting for state in states]),
    ):
        values.append(values[-1] if values else 0)
        axis.fill_between(times, values, step="post", color="#444444", alpha=0.35, linewidth=0)
        axis.step(times, values, where="post", color="#444444", linewidth=1)
        axis.set_ylim(0, max(1, *values) * 1.1)
        axis.set_ylabel(label, fontsize=9)
