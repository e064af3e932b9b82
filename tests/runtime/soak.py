"""A soak: saturated for minutes, in segments of a process each; what was counted is carried over.

A segment on a GPU, which adds to the file of the segments before it and writes its rows
(`soak_minutes`, `soak_leaks`) into a results file; a run of `smkern bench runtime --resume` may
measure the others into it:

    SMKERN_SOAK_S=480 SMKERN_SOAK_FILE=bench/results/h200/runtime.soak \\
    SMKERN_RESULTS=bench/results/h200/runtime.json python -m pytest tests/gpu/runtime/test_soak.py
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from smkern.bench.runtime.workload import Sizes, open_executor
from smkern.models import Weights
from smkern.runtime.handle import Handle
from smkern.runtime.multiplexer import Multiplexer
from tests.runtime.alone import RequestSpec, workload
from tests.runtime.equality import GAP_S
from tests.runtime.policies import RandomPolicy

SIZES = Sizes(
    (16, 48, 96), max_running=64, max_prefill=8, max_tokens=2048, max_context=1024,
    num_pages=160, reuse=True,
)  # fmt: skip
SAMPLE_S = 5.0
WARM_S = 90.0
"""The warm part of a segment, at least: what is loaded, pooled and kept up to a bound in it is no
leak. It goes on until the timeline has all the launches that it keeps: on a GPU that six segments
and tests share the host's memory is near its level after 200 s only."""
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
        at_s: Seconds since the segment began.
        host_bytes: Resident memory of the process.
        device_bytes: Memory that torch has allocated on the GPU.
        graphs: Decode graphs.
        held_pages: Pages held by requests.
        live: Requests that are not over.
        dropped: Launches that the timeline no longer has: it is full. None: of an earlier file.
    """

    at_s: float
    host_bytes: int
    device_bytes: int
    graphs: int
    held_pages: int
    live: int
    dropped: int | None = None


@dataclass(slots=True)
class Segment:
    """What came of one process's part of a soak.

    Attributes:
        longest_quiet_s: The longest time without a token while requests were there.
        left: The footprint when all had ended.
        leaks: What leaked, failed, raised or stood still.
    """

    seconds: float = 0.0
    requests: int = 0
    tokens: int = 0
    cancelled: int = 0
    failed: list[str] = field(default_factory=list)
    preemptions: int = 0
    switches: int = 0
    longest_quiet_s: float = 0.0
    footprints: list[Footprint] = field(default_factory=list)
    left: Footprint | None = None
    leaks: list[str] = field(default_factory=list)

    @property
    def warm(self) -> list[Footprint]:
        """Footprints behind the warm part: those that memory is judged by."""
        return [x for x in self.footprints if x.at_s >= WARM_S and x.dropped != 0]

    @property
    def is_judged(self) -> bool:
        """Whether it was long enough to tell a leak of memory."""
        warm = self.warm
        return bool(warm) and warm[-1].at_s - warm[0].at_s >= JUDGED_S

    def find_leaks(self) -> list[str]:
        """What it lost: pages, memory, graphs, requests, or time."""
        leaks = [f"failed: {reason}" for reason in self.failed[:4]]
        assert self.left is not None
        if self.left.held_pages:
            leaks.append(f"{self.left.held_pages} pages are held by nobody")
        if len(self.warm) >= 2:
            first, last = self.warm[0], self.warm[-1]
            for name in ("host_bytes", "device_bytes", "graphs"):
                before, after = getattr(first, name), getattr(last, name)
                if after > before * (1 + GROWTH):
                    leaks.append(f"{name} grew from {before} to {after} in {last.at_s:.0f} s")
        if self.longest_quiet_s > SAMPLE_S:
            leaks.append(f"no token for {self.longest_quiet_s:.1f} s")
        return leaks


@dataclass(slots=True)
class Soak:
    """A soak so far.

    Attributes:
        model: A preset's name, and its layers.
        next_seed: Seed of the requests to come, so that no segment repeats another's.
        segments: Segments so far.
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
        part.write_text(json.dumps(asdict(self)) + "\n")
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


def run_segment(
    made: Weights, sizes: Sizes, path: Path, model: str, seconds: float, **options: Any
) -> Soak:
    """One more segment of the soak that a file holds; the file is written back in any case.

    Args:
        made: Weights of the model.
        sizes: Sizes of the executor.
        path: The file.
        model: The model's name in it.
        seconds: How long the segment saturates the runtime.
        options: Options of `soak`.
    """
    state = Soak.load(path, model)
    seed = len(state.segments)
    with open_executor(made, sizes) as executor:
        executor.warm()
        executor.capture(contexts=[sizes.max_context])
        mux = Multiplexer(
            executor,
            policy=RandomPolicy(seed, idle=0.05),
            preemption="recompute" if seed % 2 else "keep",
            stall_timeout_s=20.0,
        )
        try:
            soak(mux, executor, state, seconds, **options)
            mux.close()
        finally:
            state.save(path)
    return state


def soak(
    mux: Multiplexer,
    executor: Any,
    state: Soak,
    seconds: float,
    *,
    clock: Callable[[], float] = time.perf_counter,
    rest: Callable[[float], object] = time.sleep,
    say: Callable[[str], object] = print,
    **options: Any,
) -> Segment:
    """Serve at saturation for so long, then to the end; the segment is added to the soak.

    What it raises counts as a leak of the soak for good.

    Args:
        mux: The runtime; its policy and pages make the pressure.
        executor: The runtime's executor.
        state: The soak so far.
        seconds: Length of this segment.
        clock: Seconds.
        rest: Lets time go by after a step without output.
        say: Told a line a sample.
        options: `longest` and `answer` of `workload`.
    """
    segment = Segment()
    state.segments.append(segment)
    load = _Load(mux, executor.config.vocab_size, state, segment, options)
    try:
        _saturate(load, executor, seconds, clock, rest, say)
        segment.leaks = segment.find_leaks()
    except Exception as error:
        segment.leaks.append(f"{type(error).__name__}: {error}")
        raise
    return segment


def _saturate(
    load: _Load,
    executor: Any,
    seconds: float,
    clock: Callable[[], float],
    rest: Callable[[float], object],
    say: Callable[[str], object],
) -> None:
    mux, segment = load.mux, load.segment
    began = last_token = sampled = checked = clock()
    while (now := clock()) - began < seconds:
        load.top_up(2 * executor.max_running)
        if load.step():
            last_token = clock()
        else:
            rest(GAP_S)
        segment.longest_quiet_s = max(segment.longest_quiet_s, clock() - last_token)
        if now - sampled >= SAMPLE_S:
            sampled = now
            segment.footprints.append(footprint(mux, executor, now - began, load.live))
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
    segment.left = footprint(mux, executor, segment.seconds, load.live)
    stats = mux.stats()
    segment.preemptions, segment.switches = stats.preemptions, stats.switches.count


class _Load:
    """Requests without end."""

    def __init__(
        self, mux: Multiplexer, vocab: int, state: Soak, segment: Segment, options: dict[str, Any]
    ) -> None:
        self.mux = mux
        self.segment = segment
        self._vocab = vocab
        self._state = state
        self._options = options
        self._asked: list[RequestSpec] = []
        self._handles: dict[int, tuple[Handle, RequestSpec]] = {}

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
            handle = self.mux.submit(list(one.prompt), one.params, priority=one.priority)
            self._handles[handle.id] = handle, one
            self.segment.requests += 1
            if one.cancel_after == 0:
                self._cancel(handle)

    def step(self) -> int:
        """One step of the runtime; how many tokens came."""
        tokens = 0
        for output in self.mux.step():
            known = self._handles.get(output.id)
            if known is None:
                continue  # it was cancelled
            handle, one = known
            tokens += output.token is not None
            if output.error is not None:
                self.segment.failed.append(str(output.error))
            if handle.done:
                del self._handles[output.id]
            elif len(handle.tokens) == one.cancel_after:
                self._cancel(handle)
        self.segment.tokens += tokens
        return tokens

    def _cancel(self, handle: Handle) -> None:
        handle.cancel()
        if self._handles.pop(handle.id, None) is not None:
            self.segment.cancelled += 1


def footprint(mux: Multiplexer, executor: Any, at_s: float, live: int) -> Footprint:
    """What the runtime holds now."""
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    return Footprint(
        at_s,
        resident_bytes(),
        torch.cuda.memory_allocated() if on_gpu else 0,
        mux.memory_report().graphs,
        executor.pool.usage.held,
        live,
        mux.timeline.trace().dropped,
    )


def resident_bytes() -> int:
    """Resident memory of this process."""
    statm = Path("/proc/self/statm")
    if statm.is_file():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
