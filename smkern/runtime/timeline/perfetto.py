"""A timeline as a Chrome trace: a JSON file that Perfetto and chrome://tracing open.

Lanes are threads, launches are slices on them, decisions and notes are instants on threads of their
own, and counters show the SMs of each side, requests that decode and requests that wait. What
the viewers do not need lies in the events' `args`, so that `load` gives the trace back.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import asdict, replace
from math import isfinite
from operator import index
from pathlib import Path
from typing import Any

from smkern.atomic import read_whole, write_whole
from smkern.errors import ArgumentError
from smkern.latency import Chunk, Size
from smkern.runtime.place import LANES, Place
from smkern.runtime.timeline.trace import Choice, Note, Span, State, Trace
from smkern.strict_json import MAX_DIGITS, parse
from smkern.tuning.cells import checked

FORMAT = "smkern-timeline-1"
PID = 1
THREADS = {"decode": 1, "prefill": 2, "policy": 3, "notes": 4}
"""Track to thread number; the first two are the lanes."""
Event = dict[str, Any]


def save(trace: Trace, path: Path) -> Path:
    """Write a trace, whole or not at all; a name that ends in .gz is compressed.

    Perfetto opens both.
    """
    text = json.dumps(to_json(trace), separators=(",", ":"), default=str)
    data = text.encode()
    write_whole(path, gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def load(path: Path) -> Trace:
    """Read what `save` wrote.

    Raises:
        ArgumentError: no such file, or one that is not a timeline of ours.
    """
    try:
        data = read_whole(path)
        return from_json(parse(gzip.decompress(data) if path.suffix == ".gz" else data))
    except (
        OSError,
        EOFError,
        zlib.error,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
    ) as error:
        raise ArgumentError(
            f"{path} is not a timeline ({type(error).__name__}: {error}); give a file that "
            "Timeline.save wrote"
        ) from error


def to_json(trace: Trace) -> dict[str, Any]:
    """The trace as the contents of a Chrome trace; times start at 0."""
    origin_us = trace.extent_us[0]
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "format": FORMAT,
            "num_sms": trace.num_sms,
            "origin_us": origin_us,
            "dropped": trace.dropped,
        },
        "traceEvents": [
            *_names(trace),
            *(_slice(span, origin_us) for span in trace.spans),
            *(_choice(choice, origin_us) for choice in trace.choices),
            *(_note(note, origin_us) for note in trace.notes),
            *(_state(state, origin_us) for state in trace.states),
            *_split(trace, origin_us),
        ],
    }


def from_json(data: dict[str, Any]) -> Trace:
    """The trace of `to_json`.

    Raises:
        ValueError: another format, or two launches of one number.
    """
    head = data["otherData"]
    if head["format"] != FORMAT:
        raise ValueError(f"format {head['format']!r}, not {FORMAT!r}")
    origin_us = head["origin_us"]
    by_cat: dict[str, list[Event]] = {}
    for event in data["traceEvents"]:
        by_cat.setdefault(event.get("cat", ""), []).append(event)
    spans = tuple(_to_span(event, origin_us) for event in by_cat.get("launch", ()))
    if len({span.number for span in spans}) < len(spans):
        raise ValueError("two launches of one number")
    return Trace(
        head["num_sms"],
        spans,
        tuple(_to_choice(event, origin_us) for event in by_cat.get("decision", ())),
        tuple(_to_state(event, origin_us) for event in by_cat.get("state", ())),
        tuple(
            Note(event["ts"] + origin_us, event["name"], event["args"])
            for event in by_cat.get("note", ())
        ),
        head["dropped"],
    )


def _names(trace: Trace) -> Iterator[Event]:
    yield _named("process_name", 0, name=f"smkern, {trace.num_sms} SMs")
    for name, tid in THREADS.items():
        yield _named("thread_name", tid, name=f"{name} lane" if name in LANES else name)
        yield _named("thread_sort_index", tid, sort_index=tid)


def _named(what: str, tid: int, **args: Any) -> Event:
    return {"ph": "M", "name": what, "pid": PID, "tid": tid, "args": args}


def _slice(span: Span, origin_us: float) -> Event:
    args: dict[str, Any] = {
        "number": span.number,
        "side": span.place.side,
        "rung": span.place.rung,
        "num_sms": span.place.num_sms,
        "launched_us": span.launched_us - origin_us,
        "seen_us": span.seen_us - origin_us,
        "launches": span.launches,
        "is_exact": span.is_exact,
        "is_over": span.is_over,
        "real_us": span.duration_us,
    }
    if span.predicted_us is not None:
        args["predicted_us"] = span.predicted_us
    if span.size is not None:
        args["size"] = asdict(span.size)
    if span.about is not None:
        args["about"] = _plain(span.about)
    return {
        "ph": "X",
        "cat": "launch",
        "name": span.name,
        "pid": PID,
        "tid": THREADS[span.lane],
        "ts": span.begin_us - origin_us,
        "dur": span.duration_us,
        "args": args,
    }


def _choice(choice: Choice, origin_us: float) -> Event:
    where = "whole" if choice.rung is None else f"{choice.rung} SMs"
    if choice.reason:
        where = f"{where}: {choice.reason}"
    args = choice._asdict()
    return _instant("decision", where, "policy", args.pop("at_us") - origin_us, args)


def _note(note: Note, origin_us: float) -> Event:
    return _instant("note", note.name, "notes", note.at_us - origin_us, _plain(note.about))


def _plain(value: Any) -> Any:
    """What an engine said of a launch, with what JSON does not hold or we do not read as text."""
    if isinstance(value, dict):
        return {key if isinstance(key, str) else str(key): _plain(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(x) for x in value]
    if isinstance(value, float):
        return value if isfinite(value) else str(value)
    if isinstance(value, int):
        return value if abs(value) < 10**MAX_DIGITS else str(value)
    return value


def _instant(cat: str, name: str, thread: str, ts: float, args: dict[str, Any]) -> Event:
    where = {"pid": PID, "tid": THREADS[thread], "ts": ts}
    return {"ph": "i", "s": "t", "cat": cat, "name": name, **where, "args": args}


def _state(state: State, origin_us: float) -> Event:
    args = state._asdict()
    ts = args.pop("at_us") - origin_us
    return _counter("requests", ts, {name: int(value) for name, value in args.items()}, "state")


def _split(trace: Trace, origin_us: float) -> Iterator[Event]:
    for at_us, decode, prefill in trace.split():
        yield _counter("SMs", at_us - origin_us, {"decode": decode, "prefill": prefill}, "split")


def _counter(name: str, ts: float, args: dict[str, Any], cat: str) -> Event:
    return {"ph": "C", "cat": cat, "name": name, "pid": PID, "ts": ts, "args": args}


def _to_span(event: Event, origin_us: float) -> Span:
    args, size = event["args"], event["args"].get("size")
    if size is not None:
        chunks = tuple(Chunk(*chunk) for chunk in size.pop("chunks"))
        size = replace(checked(Size, size), chunks=chunks)
    predicted_us = args.get("predicted_us")
    lane = {THREADS[lane]: lane for lane in LANES}[event["tid"]]
    begin_us = event["ts"] + origin_us
    return Span(
        index(args["number"]),
        lane,
        checked(Place, {name: args[name] for name in ("side", "rung", "num_sms")}),
        event["name"],
        args["launched_us"] + origin_us,
        begin_us,
        begin_us + event["dur"],
        args["seen_us"] + origin_us,
        args["is_exact"],
        args["is_over"],
        args["launches"],
        size,
        args.get("about"),
        None if predicted_us is None else float(predicted_us),
    )


def _to_choice(event: Event, origin_us: float) -> Choice:
    args = dict(event["args"])
    args["prefill"] = tuple(args["prefill"])
    return Choice(at_us=event["ts"] + origin_us, **args)


def _to_state(event: Event, origin_us: float) -> State:
    args = dict(event["args"])
    for name in ("is_blocked", "is_split"):
        args[name] = bool(args[name])
    return checked(State, args)._replace(at_us=event["ts"] + origin_us)
