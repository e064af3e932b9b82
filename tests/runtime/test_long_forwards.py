"""Two forwards of many layers: more kernels than a stream's queue holds."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from smkern.latency import Size
from smkern.policies import Chunked
from smkern.runtime.interleaver import MAX_QUEUED_LAUNCHES, ROOM_US
from smkern.runtime.model import marks
from smkern.runtime.model.marks import MARKS, RING, mark_ring
from smkern.runtime.sim.device import SimDevice
from smkern.runtime.sim.executor import LAYER_LAUNCHES, SimExecutor
from smkern.runtime.timeline.trace import Span
from tests.runtime.world import RUNGS, Linear, World, small_config


class Slow(Linear):
    """Forwards of 16 ms and more."""

    def alone_us(self, size: Size, num_sms: int) -> float:
        return 20 * super().alone_us(size, num_sms)


def forwards(num_layers: int, ahead: bool = True) -> list[Span]:
    """Prompts in chunks beside a request that decodes; what ran, in order."""
    config = small_config(num_layers=num_layers, max_position=4096)
    device = SimDevice(132, RUNGS, Slow())
    executor = SimExecutor(
        config, device, num_pages=2000, page_size=4, max_tokens=512, max_running=6, max_prefill=4,
        graph_rows=0,
    )  # fmt: skip
    world = World(Chunked(chunk_tokens=400, ahead=ahead), executor=executor)
    world.submit([1] * 8, 40)
    for index in range(4):
        world.submit([index] * 1500, 2)
    world.run()
    assert not world.mux.errors
    spans = [span for span in world.mux.timeline.trace().spans if span.name == "mixed"]
    assert len(spans) > 10
    return spans


@pytest.mark.parametrize("num_layers", [36, 64, 70])
def test_the_next_is_launched_while_one_runs(num_layers: int) -> None:
    """Also where both are more than the queue holds: then once enough of the first is done."""
    is_long = 2 * num_layers * LAYER_LAUNCHES > MAX_QUEUED_LAUNCHES
    for first, second in pairwise(forwards(num_layers)):
        assert second.launched_us < first.end_us
        assert second.begin_us == pytest.approx(first.end_us)
        done = (second.launched_us - first.begin_us) / first.duration_us
        if is_long:
            room = MAX_QUEUED_LAUNCHES - num_layers * LAYER_LAUNCHES
            most = 1 - room / (num_layers * LAYER_LAUNCHES)
            # A part is seen when it is over, and a millisecond later at the latest.
            assert most <= done <= most + 1 / MARKS + ROOM_US / first.duration_us
        else:
            assert done == 0


def test_none_is_launched_ahead_that_was_not_asked_for() -> None:
    assert all(b.launched_us >= a.end_us for a, b in pairwise(forwards(64, ahead=False)))


GPU = torch.device("cuda", 1)


class FakeEvent:
    """An event that is over when a test says so."""

    def __init__(self) -> None:
        self.records = 0
        self.over = True  # as one that was never recorded

    def record(self, stream: object = None) -> None:
        self.records += 1
        self.over = False

    def query(self) -> bool:
        return self.over


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[FakeEvent]:
    """The events that marks make."""
    events: list[FakeEvent] = []

    class Torch:
        class cuda:  # noqa: N801
            @staticmethod
            def Event() -> FakeEvent:  # noqa: N802
                events.append(FakeEvent())
                return events[-1]

            @staticmethod
            def current_stream(device: object) -> str:
                return f"the stream of {device}"

    monkeypatch.setattr(marks, "torch", Torch)
    return events


def test_marks_count_what_is_left(made: list[FakeEvent]) -> None:
    ring = mark_ring(64, 64 * 9 + 14, GPU)
    assert len(made) == RING * (MARKS - 1)
    assert all(event.records == 1 for event in made)  # before serving
    mark = next(ring)
    for layer in range(64):
        mark.layer_done(layer)
    mine = [event for event in made if event.records == 2]
    assert len(mine) == MARKS - 1
    assert mark.left() == 590
    mine[0].over = mine[1].over = True
    assert mark.left() == 590 - 16 * 9
    mine[3].over = True  # the third is not: a stream runs in order
    assert mark.left() == 590 - 16 * 9
    for event in mine:
        event.over = True
    assert mark.left() == 590 - 56 * 9
    others: list[Any] = [next(ring) for _ in range(RING)]
    assert others[-1] is mark
    assert len({id(other) for other in others}) == RING


def test_marks_of_few_layers(made: list[FakeEvent]) -> None:
    mark = next(mark_ring(3, 30, GPU))
    for layer in range(3):
        mark.layer_done(layer)
    for event in made:
        event.over = True
    assert mark.left() == 10


def test_an_error_of_the_device_leaves_all(made: list[FakeEvent]) -> None:
    mark = next(mark_ring(16, 160, GPU))

    def fail() -> bool:
        raise RuntimeError("an illegal memory access was encountered")

    for event in made:
        event.query = fail  # type: ignore[method-assign]
    assert mark.left() == 160
