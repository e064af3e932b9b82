"""A model on two lanes kept busy: the loop of a runtime whose policy never changes its mind."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from typing import Any

import torch

from smkern.bench.model.cases import ModelPlan
from smkern.bench.model.model import Model
from smkern.bench.runtime.cases import OURS, STOCK_RUNGS, Cell, RuntimePlan
from smkern.bench.runtime.figures import SETTLE, Spans, common, rate, settled, tbt
from smkern.bench.runtime.model_steps import ModelSteps
from smkern.bench.runtime.smkern_steps import SmkernSteps
from smkern.bench.runtime.stamps import Stamps, stamps_on
from smkern.device import Budget, device_info
from smkern.measure.compiling import compile_forwards
from smkern.measure.sm_clock import Clock, clock_on, ticking
from smkern.partition import Ladder, ladder
from smkern.runtime.cuda_device import CudaDevice
from smkern.runtime.device import Device, Work
from smkern.runtime.interleaver import Interleaver
from smkern.runtime.place import LANES, Lane, Place
from smkern.runtime.ticket import Ticket

LEAST = 16
"""Launches of a lane from which figures are made."""
WARM_STEPS = 2
ALONE_S = 0.3
"""How long decode steps are timed with nothing beside them."""


@dataclass(slots=True)
class Feed:
    """What a lane is kept busy with.

    Attributes:
        lane: The lane.
        depth: Launches that are kept queued.
        works: What to launch, in order; ends where nothing more is to be launched.
        launched: Launches so far.
    """

    lane: Lane
    depth: int
    works: Iterator[Work]
    launched: int = 0
    _next: Work | None = field(default=None)

    def top_up(self, lanes: Interleaver) -> None:
        """Launch until `depth` are queued, or the lane has no SMs now."""
        while lanes.queued(self.lane) < self.depth and self.launch(lanes):
            pass

    def launch(self, lanes: Interleaver) -> bool:
        """Launch the next work; False where there is none, or the lane has no SMs now."""
        if self._next is None:
            self._next = next(self.works, None)
        if self._next is None or not lanes.can_launch(self.lane, self._next):
            return False
        lanes.launch(self.lane, self._next)
        self._next = None
        self.launched += 1
        return True


def pump(
    lanes: Interleaver,
    feeds: Sequence[Feed],
    go_on: Callable[[], bool],
    *,
    steer: Callable[[list[Ticket]], float | None] | None = None,
) -> None:
    """Poll, top up, wait, over and over while `go_on()`; then wait until all is over.

    Args:
        lanes: What launches.
        feeds: What the lanes are kept busy with.
        go_on: Whether to go on.
        steer: Told what is over before the lanes are topped up; says until when to wait at most,
            by the device's clock.
    """
    while go_on():
        over = list(lanes.poll())
        until_us = None if steer is None else steer(over)
        for feed in feeds:
            feed.top_up(lanes)
        lanes.wait(until_us)
    lanes.drain()


def for_a_while(seconds: float, *feeds: Feed, launches: int = LEAST) -> Callable[[], bool]:
    """Whether to go on: so many seconds and so many launches of each feed are not all over."""
    end = time.monotonic() + seconds

    def go_on() -> bool:
        return time.monotonic() < end or any(feed.launched < launches for feed in feeds)

    return go_on


@dataclass(frozen=True, slots=True)
class Together:
    """Both lanes in the time in which both were busy.

    Attributes:
        steps: Decode steps.
        tokens_per_ms: Rate of the prompts.
        sm_mhz: Clock of the decode side's SMs, by their own count; None: not read.
    """

    steps: Spans
    tokens_per_ms: float
    sm_mhz: float | None = None

    def figures(self) -> dict[str, Any]:
        """What a steady cell says of both lanes."""
        return {
            **tbt(self.steps.periods_us),
            "tokens_per_ms": round(self.tokens_per_ms, 3),
            "sm_mhz": self.sm_mhz,
        }


@dataclass(slots=True)
class SteadyBench:
    """One model on one device.

    Attributes:
        plan: What is measured.
        steps: The model with a provider's kernels.
        device: Two lanes.
        decode_marks: Begin and end of each decode step.
        prefill_marks: End of each group of layers.
        seconds: How long a figure of the steady state is measured.
    """

    plan: RuntimePlan
    steps: ModelSteps
    device: Device
    decode_marks: Stamps
    prefill_marks: Stamps
    seconds: float = 1.0
    _clocks: dict[int, Clock] = field(default_factory=dict)

    def cell(self, name: str, value: Any, unit: str, **more: Any) -> Cell:
        """A cell of this model and provider; `more` is what else its case says."""
        return self.plan.cell(name, self.steps.provider, value, unit, **more)

    def place(self, lane: Lane, rung: int | None) -> Place:
        """The side of a rung, or the whole device."""
        return Place.of(lane, rung, self.device.num_sms)

    def prepare(self, *rungs: int | None) -> None:
        """Capture and plan what runs on both sides of rungs, and run it once."""
        for rung in rungs:
            for lane in LANES:
                self.steps.prepare(self.place(lane, rung))
            self._warm_up(rung)

    def _warm_up(self, rung: int | None) -> None:
        decode = Feed("decode", WARM_STEPS, islice(self.decode_steps(), WARM_STEPS))
        prompt = Feed("prefill", 1, iter(self.prompt(self.steps.num_layers)))
        pump(
            self.lanes(rung),
            [decode, prompt],
            lambda: decode.launched < WARM_STEPS or not prompt.launched,
        )

    def lanes(self, rung: int | None, **options: Any) -> Interleaver:
        """Lanes that are aimed at a rung, with nothing on them; the marks forgotten."""
        self.decode_marks.clear()
        self.prefill_marks.clear()
        lanes = Interleaver(self.device, **options)
        lanes.aim(rung)
        return lanes

    def decode_steps(self) -> Iterator[Work]:
        """Decode steps without end."""
        return cycle([Work("decode", self.steps.decode)])

    def prompt_groups(self) -> Iterator[Work]:
        """Prompts' layers, one by one, prompt after prompt without end; each one's end stamped."""
        return cycle(self.prompt(1, self.prefill_marks))

    def prompt(self, group: int, ends: Stamps | None = None) -> list[Work]:
        """One prompt by groups of layers, each group's end stamped."""
        works = []
        for first in range(0, self.steps.num_layers, group):
            count = min(group, self.steps.num_layers - first)

            def run(place: Place, first: int = first, count: int = count) -> None:
                self.steps.layers(first, count, place)
                if ends is not None:
                    ends.mark()

            works.append(Work("prefill", run, launches=16 * count, about={"first": first}))
        return works

    def together(self, rung: int, *, ahead: int = 2, seconds: float | None = None) -> Together:
        """A decode step after the other beside a prompt after the other, each on its side."""
        seconds = self.seconds if seconds is None else seconds
        decode = Feed("decode", ahead, self.decode_steps())
        prompt = Feed("prefill", 2, self.prompt_groups())
        lanes, clock = self.lanes(rung), self.clock(rung)
        go_on, tick = for_a_while(seconds, decode, prompt), ticking(clock, SETTLE * seconds)

        def ticked() -> bool:
            tick()
            return go_on()

        pump(lanes, [decode, prompt], ticked)
        return replace(self.read(), sm_mhz=clock.mhz())

    def clock(self, rung: int) -> Clock:
        """The clock of the SMs of a decode side."""
        if rung not in self._clocks:
            partition = self.device.partition(self.place("decode", rung))
            stream = None if partition is None else partition.stream
            kind = "cuda" if isinstance(self.device, CudaDevice) else "cpu"
            index = getattr(self.device, "index", 0)
            self._clocks[rung] = clock_on(torch.device(kind, index), stream)
        return self._clocks[rung]

    def read(self) -> Together:
        """What the marks say of both lanes."""
        spans = Spans.of(self.decode_marks.us())
        groups = self.prefill_marks.us()
        begin, end = common(spans.ends, groups)
        return Together(spans.within(begin, end), rate(groups, self._worth, begin, end))

    def prompts_alone(self, rung: int | None) -> float:
        """Tokens per ms of prompts with nothing beside them."""
        prompt = Feed("prefill", 2, self.prompt_groups())
        lanes = self.lanes(rung)
        pump(lanes, [prompt], for_a_while(self.seconds, prompt))
        groups = settled(self.prefill_marks.us())
        return rate(groups, self._worth, groups[0], groups[-1])

    def steps_alone(self, rung: int | None) -> Spans:
        """Decode steps with nothing beside them."""
        decode = Feed("decode", 2, self.decode_steps())
        lanes = self.lanes(rung)
        pump(lanes, [decode], for_a_while(ALONE_S, decode, launches=8))
        spans = Spans.of(self.decode_marks.us())
        return Spans(settled(spans.begins), settled(spans.ends))

    @property
    def _worth(self) -> float:
        """Tokens of a prompt that a layer counts for."""
        return self.plan.tokens / self.steps.num_layers


def made_model(plan: RuntimePlan) -> Model:
    """A model of random weights with its caches on the GPU; both providers' kernels read them."""
    return Model(ModelPlan(plan.model, (plan.batch,), plan.tokens))


@contextmanager
def open_bench(
    model: Model, plan: RuntimePlan, provider: str, seconds: float
) -> Iterator[SteadyBench]:
    """A model with a provider's kernels, on its ladder; closed with all that was captured."""
    with ladder_of(plan, provider) as made:
        device = CudaDevice(made)
        where = torch.device("cuda", device.index)
        decode_marks, prefill_marks = stamps_on(where), stamps_on(where)
        steps: ModelSteps
        if provider == OURS:
            compile_bench(model, plan, made)
            steps = SmkernSteps(plan, model, decode_marks, device.partition)
        else:
            from smkern.bench.runtime.stock_kernels import FlashInferKernels
            from smkern.bench.runtime.stock_steps import StockSteps

            steps = StockSteps(plan, model, decode_marks, device.partition, FlashInferKernels())
        try:
            yield SteadyBench(plan, steps, device, decode_marks, prefill_marks, seconds)
        finally:
            device.synchronize()
            steps.close()


def ladder_of(plan: RuntimePlan, provider: str) -> Ladder:
    """Our kernels want spread SMs; cuBLAS's need clusters, which the driver's own groups have."""
    if provider == OURS:
        return ladder(plan.rungs)
    return ladder(STOCK_RUNGS[plan.model], atom=8, placement="default")


def compile_bench(model: Model, plan: RuntimePlan, made: Iterable[Any]) -> int:
    """Compile side by side the GEMMs of every step, prompt and mixed forward; how many."""
    whole = Budget(device_info().num_sms, "mask", clusters=True)
    splits = list(made)
    decode = [whole, *(split.decode.budget for split in splits)]
    prefill = [whole, *(split.prefill.budget for split in splits)]
    mixed = [(chunk + plan.batch, plan.batch + 2) for chunk in plan.chunks]
    return compile_forwards(
        model.config,
        [([(plan.batch, plan.batch)], decode), ([(plan.tokens, 1)], prefill), (mixed, [whole])],
    )
