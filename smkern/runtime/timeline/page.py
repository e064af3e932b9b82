"""A timeline as one HTML page that needs nothing else: no network, no library."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from typing import Any

from smkern.latency import Size
from smkern.runtime.place import LANES
from smkern.runtime.timeline.bubbles import gaps
from smkern.runtime.timeline.plot import BUBBLE, color_of
from smkern.runtime.timeline.summary import summarize
from smkern.runtime.timeline.trace import Choice, Span, Trace

TEMPLATE = Path(__file__).with_name("page.html")
SHOWN_IDS = 6
"""Requests that a description names; the others are counted."""


def write(trace: Trace, path: Path, *, title: str = "Timeline") -> Path:
    """Write a trace as a page.

    Streams are lanes, bubbles are marked, and below are the SM split, requests that decode and
    requests that wait over time; the wheel zooms, dragging moves, pointing at a launch tells its
    partition, budget, predicted and real time.

    Args:
        trace: What is shown.
        path: Where it is written.
        title: Of the page.
    """
    page = TEMPLATE.read_text(encoding="utf-8")
    rows = "\n".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>"
        for name, value in summarize(trace)
    )
    data = json.dumps(payload(trace), separators=(",", ":"), default=str)
    # What was recorded may hold anything, so nothing in it may end the script element.
    data = data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    page = page.replace("{{title}}", escape(title)).replace("{{rows}}", rows)
    page = page.replace("{{data}}", data)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


def payload(trace: Trace) -> dict[str, Any]:
    """What the page's script draws: times in us from the first thing that happened."""
    origin_us, end_us = trace.extent_us
    names = list(dict.fromkeys(span.name for span in trace.spans))

    def at(us: float) -> float:
        return round(us - origin_us, 3)

    def span_of(span: Span) -> list[Any]:
        return [
            LANES.index(span.lane),
            at(span.begin_us),
            at(span.end_us),
            names.index(span.name),
            _place(span),
            at(span.launched_us),
            at(span.seen_us),
            None if span.predicted_us is None else round(span.predicted_us, 3),
            int(span.is_over),
            _details(span),
        ]

    return {
        "num_sms": trace.num_sms,
        "end": at(end_us),
        "names": names,
        "colors": [color_of(name) for name in names],
        "bubble": BUBBLE,
        "spans": [span_of(span) for span in sorted(trace.spans)],
        "gaps": [
            [
                LANES.index(g.lane),
                at(g.begin_us),
                at(g.end_us),
                [[at(begin_us), at(end_us)] for begin_us, end_us in g.bubbles],
            ]
            for g in gaps(trace)
        ],
        "split": [[at(at_us), decode, prefill] for at_us, decode, prefill in trace.split()],
        "states": [[at(s.at_us), s.decoding, s.prefilling, s.waiting] for s in trace.states],
        "choices": [[at(c.at_us), _where(c), _decision(c)] for c in trace.choices],
        "notes": [
            [at(note.at_us), note.name, json.dumps(note.about, default=str)] for note in trace.notes
        ],
    }


def _place(span: Span) -> str:
    place = span.place
    if place.side == "whole":
        return f"whole device, {place.num_sms} SMs"
    return f"{place.side} side of rung {place.rung}, {place.num_sms} SMs"


def _details(span: Span) -> str:
    parts = [] if span.size is None else [_size(span.size)]
    if span.launches > 1:
        parts.append(f"{span.launches} kernels")
    parts += [f"{name}: {_value(value)}" for name, value in (span.about or {}).items()]
    if not span.is_exact:
        parts.append("times as the host saw them")
    return "\n".join(parts)


def _size(size: Size) -> str:
    parts = []
    if size.chunks:
        cached = sum(chunk.cached for chunk in size.chunks)
        parts.append(
            f"{size.new_tokens} tokens of {len(size.chunks)} prompts behind {cached} cached"
        )
    if size.layers and size.layers < size.num_layers:
        parts.append(f"{size.layers} of {size.num_layers} layers")
    if size.batch:
        parts.append(f"{size.batch} decode rows, {size.total_kv} keys")
    return ", ".join(parts)


def _value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        shown = ", ".join(str(item) for item in value[:SHOWN_IDS])
        rest = len(value) - SHOWN_IDS
        return f"{shown} and {rest} more" if rest > 0 else shown
    return str(value)


def _where(choice: Choice) -> str:
    return "whole device" if choice.rung is None else f"decode on {choice.rung} SMs"


def _decision(choice: Choice) -> str:
    """What was decided and why it was asked, in words."""
    parts = [f"asked by: {choice.trigger}"]
    if choice.prefill:
        verb = "preempts with" if choice.preempt else "begins"
        parts.append(f"{verb} prompts of requests {_value(choice.prefill)}")
    if choice.chunk_tokens is not None:
        parts.append(f"at most {choice.chunk_tokens} tokens")
    if choice.layers:
        parts.append(f"{choice.layers} layers")
    parts.append("decode pauses" if choice.pause_decode else f"{choice.steps} decode steps")
    parts.append(f"joined: {choice.join}")
    parts.append(
        f"{choice.decoding} decode, {choice.waiting} wait, {choice.free_pages} pages free, queued "
        f"{choice.decode_queued} + {choice.prefill_queued}"
    )
    return "\n".join(parts)
