"""What a subject measures with: a model's side, the lanes of a device, and moments of both."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

from smkern.bench.runtime.cases import RuntimePlan
from smkern.bench.runtime.figures import Spans, common, rate, settled, tbt
from smkern.bench.runtime.pump import (
    Feed,
    decode_steps,
    for_a_while,
    groups_of_one,
    prompt_groups,
    pump,
)
from smkern.bench.runtime.side import Side
from smkern.bench.runtime.stamps import Stamps
from smkern.runtime.device import Device
from smkern.runtime.interleaver import Interleaver
from smkern.runtime.place import LANES, Lane, Place

WARM_STEPS = 2


@dataclass(frozen=True, slots=True)
class Together:
    """Both lanes in the time in which both were busy.

    Attributes:
        steps: Decode steps.
        tokens_per_ms: Of prompts.
    """

    steps: Spans
    tokens_per_ms: float


@dataclass(slots=True)
class Rig:
    """One model on one device.

    Attributes:
        plan: What is measured.
        side: Whose kernels.
        device: Two lanes.
        decode_marks: Begin and end of each decode step.
        prefill_marks: End of each group of layers.
        seconds: How long a figure of the steady state is measured.
    """

    plan: RuntimePlan
    side: Side
    device: Device
    decode_marks: Stamps
    prefill_marks: Stamps
    seconds: float = 1.0

    def place(self, lane: Lane, rung: int | None) -> Place:
        """The side of a rung, or the whole device."""
        return Place.of(lane, rung, self.device.num_sms)

    def prepare(self, *rungs: int | None) -> None:
        """Capture and plan what runs on both sides of rungs, and run it once."""
        for rung in rungs:
            for lane in LANES:
                self.side.prepare(self.place(lane, rung))
            lanes = self.lanes(rung)
            warm = Feed("decode", WARM_STEPS, islice(decode_steps(self.side), WARM_STEPS))
            prompt = Feed("prefill", 1, iter(groups_of_one(self.side, self.side.num_layers, None)))
            while not (warm.launched == WARM_STEPS and prompt.launched):
                lanes.poll()
                warm.top_up(lanes)
                prompt.top_up(lanes)
            lanes.drain()

    def lanes(self, rung: int | None) -> Interleaver:
        """Lanes that are aimed at a rung, with nothing on them; the marks forgotten."""
        self.decode_marks.clear()
        self.prefill_marks.clear()
        lanes = Interleaver(self.device)
        lanes.aim(rung)
        return lanes

    def together(
        self, rung: int, *, ahead: int = 2, group: int | None = None, seconds: float | None = None
    ) -> Together:
        """A decode step after the other beside a prompt after the other, each on its side."""
        lanes = self.lanes(rung)
        group = self.plan.group if group is None else group
        decode = Feed("decode", ahead, decode_steps(self.side))
        prompt = Feed("prefill", 2, prompt_groups(self.side, group, self.prefill_marks))
        go_on = for_a_while(self.seconds if seconds is None else seconds, decode, prompt)
        pump(lanes, [decode, prompt], go_on)
        return self.read(group)

    def read(self, group: int) -> Together:
        """What the marks say of both lanes."""
        spans = Spans.of(self.decode_marks.us())
        groups = self.prefill_marks.us()
        begin, end = common(spans.ends, groups)
        worth = self.plan.tokens * group / self.side.num_layers
        return Together(spans.within(begin, end), rate(groups, worth, begin, end))

    def prompts_alone(self, rung: int | None, *, seconds: float | None = None) -> float:
        """Tokens per ms of prompts with nothing beside them."""
        lanes = self.lanes(rung)
        layers = self.side.num_layers
        prompt = Feed("prefill", 2, prompt_groups(self.side, self.plan.group, self.prefill_marks))
        go_on = for_a_while(self.seconds if seconds is None else seconds, prompt)
        pump(lanes, [prompt], go_on)
        groups = settled(self.prefill_marks.us())
        return rate(groups, self.plan.tokens * self.plan.group / layers, groups[0], groups[-1])

    def steps_alone(self, rung: int | None, *, seconds: float = 0.3) -> Spans:
        """Decode steps with nothing beside them."""
        lanes = self.lanes(rung)
        decode = Feed("decode", 2, decode_steps(self.side))
        pump(lanes, [decode], for_a_while(seconds, decode, launches=8))
        spans = Spans.of(self.decode_marks.us())
        return Spans(settled(spans.begins), settled(spans.ends))


def figures_of(found: Together) -> dict[str, Any]:
    """What a steady cell says of both lanes."""
    return {**tbt(found.steps.periods_us), "tokens_per_ms": round(found.tokens_per_ms, 3)}
