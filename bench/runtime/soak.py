"""A soak: saturated for minutes, in segments, with what was counted carried over."""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch

from smkern.bench.runtime.equality import GAP_S, Asked, workload
from smkern.runtime.live import Handle
from smkern.runtime.multiplexer import Multiplexer

SAMPLE_S = 5.0
WARM_S = 90.0
"""Of a segment: what is loaded, pooled and kept up to a bound in it belongs to no leak. The last to
be full are the timeline's 20,000 launches and decisions."""
GROWTH = 0.01
"""More than this share of the memory at the end of the warm part is a leak."""
JUDGED_S = 60.0
"""A segment whose memory was watched for less, behind its warm part, says nothing of leaks."""
CHECK_S = 10.0
PART = 500
"""Requests that are drawn at a time."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What the runtime holds at a moment.

    Attributes:
        at_s: Of the segment.
        host_bytes: Resident memory of the process.
        device_bytes: That torch has allocated on the GPU.
        graphs: Decode graphs.
        held_pages: Pages of requests.
        live: Requests that were not over.
    """

    at_s: float
    host_bytes: int
    device_bytes: int
    graphs: int
    held_pages: int
    live: int


@dataclass(slots=True)
class Segment:
    """What came of one process's part of a soak."""

    seconds: float = 0.0
    requests: int = 0
    tokens: int = 0
    cancelled: int = 0
    failed: list[str] = field(default_factory=list)
    preemptions: int = 0
    switches: int = 0
    longest_quiet_s: float = 0.0
    """The longest time without a token while requests were there."""
    footprints: list[Footprint] = field(default_factory=list)
    left: Footprint | None = None
    """When all had ended."""
    leaks: list[str] = field(default_factory=list)

    @property
    def warm(self) -> list[Footprint]:
        """Footprints behind the warm part: those that memory is judged by."""
        return [x for x in self.footprints if x.at_s >= WARM_S]

    @property
    def is_judged(self) -> bool:
        """Whether it was long enough to tell a leak of memory."""
        warm = self.warm
        return bool(warm) and warm[-1].at_s - warm[0].at_s >= JUDGED_S


@dataclass(slots=True)
class Soak:
    """A soak so far.

    Attributes:
        model: A preset's name, and its layers.
        next_seed: Of the requests to come, so that no segment repeats another's.
        segments: Done so far.
    """

    model: str
    next_seed: int = 0
    segments: list[Segment] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path, model: str) -> Soak:
        """What a file has of a model's soak; an empty one where there is none.

        Raises:
            ValueError: the file is another model's.
        """
        if not path.is_file():
            return cls(model)
        data = json.loads(path.read_text())
        if data["model"] != model:
            raise ValueError(f"{path} is a soak of {data['model']}, not of {model}: take another")
        segments = []
        for given in data["segments"]:
            given["footprints"] = [Footprint(**x) for x in given["footprints"]]
            given["left"] = given["left"] and Footprint(**given["left"])
            segments.append(Segment(**given))
        return cls(model, data["next_seed"], segments)

    def save(self, path: Path) -> None:
        """Write the file whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(asdict(self), indent=1))
        part.replace(path)

    @property
    def minutes(self) -> float:
        """Of the segments whose memory was judged; many short ones would hide a leak."""
        return sum(segment.seconds for segment in self.segments if segment.is_judged) / 60

    @property
    def unjudged_minutes(self) -> float:
        """Of the other segments."""
        return sum(segment.seconds for segment in self.segments if not segment.is_judged) / 60

    @property
    def leaks(self) -> list[str]:
        """What leaked, failed or stood still, in any segment."""
        return [
            f"segment {at}: {leak}"
            for at, segment in enumerate(self.segments)
            for leak in segment.leaks
        ]


def soak(
    mux: Multiplexer,
    state: Soak,
    seconds: float,
    *,
    clock: Callable[[], float] = time.perf_counter,
    rest: Callable[[float], object] = time.sleep,
    say: Callable[[str], object] = print,
    **options: Any,
) -> Segment:
    """Serve at saturation for so long, then to the end; the segment is added to the soak.

    Args:
        mux: The runtime; its policy and pages make the pressure.
        state: The soak so far.
        seconds: Of this segment.
        clock: Seconds.
        rest: Lets time go by where a step gave nothing.
        say: Told a line a sample.
        options: Of `workload`: `longest` and `answer`.
    """
    segment = Segment()
    state.segments.append(segment)
    load = _Load(mux, state, segment, options)
    executor = mux._executor
    began = last_token = clock()
    sampled, checked = began, began
    while (now := clock()) - began < seconds:
        load.top_up(2 * executor.max_running)
        if load.step():
            last_token = clock()
        else:
            rest(GAP_S)
        segment.longest_quiet_s = max(segment.longest_quiet_s, clock() - last_token)
        if now - sampled >= SAMPLE_S:
            sampled = now
            segment.footprints.append(footprint(mux, now - began, load.live))
            say(f"{segment.footprints[-1]} {segment.tokens} tokens")
        if now - checked >= CHECK_S:
            checked = now
            executor.pool.check()
    while load.live:
        if not load.step():
            rest(GAP_S)
    for _ in mux.run():
        pass
    while executor.pool.poll():
        rest(GAP_S)
    segment.seconds = clock() - began
    executor.pool.check()
    segment.left = footprint(mux, segment.seconds, load.live)
    stats = mux.stats()
    segment.preemptions, segment.switches = stats.preemptions, stats.switches.count
    segment.leaks = leaks_of(segment)
    return segment


class _Load:
    """Requests without end."""

    def __init__(
        self, mux: Multiplexer, state: Soak, segment: Segment, options: dict[str, Any]
    ) -> None:
        self._mux = mux
        self._state = state
        self._segment = segment
        self._options = options
        self._vocab = mux._executor.config.vocab_size
        self._draw = Random(state.next_seed)
        self._asked: list[Asked] = []
        self._handles: dict[int, tuple[Handle, Asked]] = {}

    @property
    def live(self) -> int:
        """Requests that are not over."""
        return len(self._handles)

    def top_up(self, count: int) -> None:
        """Submit until so many are there."""
        while len(self._handles) < count:
            if not self._asked:
                self._asked = workload(self._state.next_seed, PART, self._vocab, **self._options)
                self._state.next_seed += 1
            one = self._asked.pop()
            handle = self._mux.submit(list(one.prompt), one.params, priority=one.priority)
            self._handles[handle.id] = handle, one
            self._segment.requests += 1
            if one.cancel_after == 0:
                self._cancel(handle)

    def step(self) -> int:
        """One step of the runtime; how many tokens came."""
        tokens = 0
        for output in self._mux.step():
            known = self._handles.get(output.id)
            if known is None:
                continue  # it was cancelled
            handle, one = known
            tokens += output.token is not None
            if output.error is not None:
                self._segment.failed.append(str(output.error))
            if handle.done:
                del self._handles[output.id]
            elif len(handle.tokens) == one.cancel_after:
                self._cancel(handle)
        self._segment.tokens += tokens
        return tokens

    def _cancel(self, handle: Handle) -> None:
        handle.cancel()
        if self._handles.pop(handle.id, None) is not None:
            self._segment.cancelled += 1


def footprint(mux: Multiplexer, at_s: float, live: int) -> Footprint:
    """What the runtime holds now."""
    executor = mux._executor
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    return Footprint(
        at_s,
        resident_bytes(),
        torch.cuda.memory_allocated() if on_gpu else 0,
        mux.memory_report().graphs,
        executor.pool.usage.held,
        live,
    )


def resident_bytes() -> int:
    """Resident memory of this process."""
    statm = Path("/proc/self/statm")
    if statm.is_file():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def leaks_of(segment: Segment) -> list[str]:
    """What a segment lost: pages, memory, graphs, requests, or time."""
    leaks = [f"failed: {reason}" for reason in segment.failed[:4]]
    left = segment.left
    assert left is not None
    if left.held_pages:
        leaks.append(f"{left.held_pages} pages are held by nobody")
    warm = segment.warm
    if len(warm) >= 2:
        first, last = warm[0], warm[-1]
        for name in ("host_bytes", "device_bytes", "graphs"):
            before, after = getattr(first, name), getattr(last, name)
            if after > before * (1 + GROWTH):
                leaks.append(f"{name} grew from {before} to {after} in {last.at_s:.0f} s")
    if segment.longest_quiet_s > SAMPLE_S:
        leaks.append(f"no token for {segment.longest_quiet_s:.1f} s")
    return leaks
