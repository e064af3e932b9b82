"""The partitions suite from end to end on a made-up device of 20 SMs: two GPCs and a clock."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import smkern
from smkern.bench import partition_costs, partitions, reads
from smkern.bench.contexts import Green
from smkern.bench.reader import SHAPES
from smkern.bench.reads import best_reader, pick_shape, time_reads
from smkern.bench.results import load_results
from tests.bench.doubles import resumed, run_suite

TOTAL = 20
BY_GPC = [sm for gpc in (0, 1) for sm in range(TOTAL) if sm // 2 % 2 == gpc]
SIZE = 1 << 30


class Clock:
    def __init__(self) -> None:
        self.us = 0.0

    def event(self, enable_timing: bool) -> SimpleNamespace:
        mark = SimpleNamespace(at=0.0, synchronize=lambda: None)
        mark.record = lambda stream: setattr(mark, "at", self.us)
        mark.elapsed_time = lambda other: (other.at - mark.at) / 1e3
        return mark


def stream_of(sms: range | list[int]) -> SimpleNamespace:
    """A stream that knows its SMs; the handle stands for it in launches."""
    handle = SimpleNamespace(sms=list(sms))
    return SimpleNamespace(cuda_stream=handle)


class FakeReader:
    """A read takes less time with more SMs and half of it where both GPCs are used."""

    def __init__(self, clock: Clock, shape) -> None:
        self.clock, self.shape, self.device, self.num_bytes, self.data = clock, shape, 0, SIZE, None

    def launch(self, num_sms: int, raw_stream) -> None:
        sms = raw_stream.sms
        assert len(sms) == num_sms
        spread = len({sm // 2 % 2 for sm in sms})
        self.clock.us += 8000.0 / num_sms / spread * (1.0 if self.shape.loads == 8 else 1.1)

    def tbps(self, us: float) -> float:
        return SIZE / us / 1e6


class FakeDriver:
    """Pairs in id order; its own groups of 8 fill a GPC before the next. torch has none."""

    def pairs(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(sms=[sm, sm + 1]) for sm in range(0, TOTAL, 2)]

    def eights(self):
        cut = [SimpleNamespace(sms=BY_GPC[i : i + 8]) for i in (0, 8)]
        return cut, SimpleNamespace(sms=BY_GPC[16:])

    def create(self, groups) -> Green:
        sms = [sm for group in groups for sm in group.sms]
        return Green(len(sms), stream_of(sms))

    def one_group(self, num_sms: int) -> Green:
        return self.create([SimpleNamespace(sms=BY_GPC[:num_sms])])

    def sms_of(self, green: Green) -> tuple[int, ...]:
        return tuple(sorted(green.stream.cuda_stream.sms))

    def torch_green(self, num_sms: int) -> Green:
        raise RuntimeError("built without green contexts")


class FakePartition:
    def __init__(self, sms: list[int]) -> None:
        self.num_sms, self.stream = len(sms), stream_of(sms)
        self.raw_stream = self.stream.cuda_stream

    def __enter__(self) -> FakePartition:
        return self

    def __exit__(self, *error: object) -> None:
        return None


class FakeLadder:
    def __init__(self, decode_sms=None, *, atom: int = 2, placement: str = "spread") -> None:
        self.rungs = tuple(decode_sms or (8, 16))
        self.order = list(range(TOTAL)) if placement == "spread" else BY_GPC

    def split(self, *, decode: int) -> SimpleNamespace:
        assert decode in self.rungs
        sides = FakePartition(self.order[:decode]), FakePartition(self.order[decode:])
        return SimpleNamespace(decode=sides[0], prefill=sides[1])

    def close(self) -> None:
        return None

    def __enter__(self) -> FakeLadder:
        return self

    def __exit__(self, *error: object) -> None:
        return None


@pytest.fixture
def clock(monkeypatch) -> Clock:
    found = Clock()
    info = SimpleNamespace(num_sms=TOTAL, min_sms=2, sm_granularity=2)
    patches = {
        (torch.cuda, "synchronize"): lambda *device: None,
        (torch.cuda, "init"): lambda: None,
        (torch.cuda, "Event"): found.event,
        (torch.cuda, "Stream"): lambda: stream_of(range(TOTAL)),
        (torch.cuda, "default_stream"): lambda: stream_of(range(TOTAL)),
        (torch.cuda, "mem_get_info"): lambda device: (1 << 30, 2 << 30),
        (partitions, "Reader"): lambda device: FakeReader(found, SHAPES[0]),
        (reads, "Reader"): lambda shape, data: FakeReader(found, shape),
        (partitions, "Driver"): FakeDriver,
        (partitions, "device_info"): lambda: info,
        (partition_costs, "Driver"): FakeDriver,
        (torch.cuda, "stream"): lambda stream: nullcontext(),
        (smkern, "ladder"): FakeLadder,
        (smkern, "device_info"): lambda: info,
        (smkern, "current_num_sms"): lambda: TOTAL,
    }
    for (where, name), value in patches.items():
        monkeypatch.setattr(where, name, value, raising=False)
    monkeypatch.setattr(partition_costs, "SWITCH_RUNGS", (4, 8))
    monkeypatch.setattr(partition_costs, "FOREIGN_SMS", 8)
    monkeypatch.setattr(partitions, "PICK_AT", (4, 8))
    return found


def test_the_suite_measures_every_choice_and_cost(clock, tmp_path):
    out = tmp_path / "partitions.json"
    run_suite(partitions.command, out, "--budgets", "4,8")
    results = load_results(out)
    reads = {(c["num_sms"], c["provider"]): c["tbps"] for c in results.cells if c["op"] == "read"}
    assert reads[8, "smkern"] == pytest.approx(2 * reads[8, "driver"], rel=1e-3)
    assert reads[8, "flashinfer-way"] == reads[8, "driver"]
    assert (4, "smkern") in reads
    assert (4, "driver") not in reads
    assert len([1 for n, _ in reads if n == 4]) == 1 + 10
    summary = results.summary
    assert summary["of_best_choice"]["value"] == 1.0
    assert summary["failed"] == {"torch on 8 SMs": "RuntimeError: built without green contexts"}
    assert summary["ladder_memory_mib"] == {"value": 0.0, "target": 200.0, "met": True}
    assert summary["switch_us"]["met"]
    assert not summary["current_num_sms_own_us"]["met"]
    assert summary["current_num_sms_plain_us"]["met"]
    assert results.meta["reader"] == "2x1024x8"


def test_a_resumed_run_measures_the_rungs_that_the_file_lacks(clock, tmp_path):
    out, options = tmp_path / "partitions.json", ("--budgets", "4,8")
    run_suite(partitions.command, out, *options)
    asked = [cell["case"].get("asked_sms") for cell in load_results(out).cells]
    costs, first = asked.index(4), asked.index(8)
    assert resumed(partitions.command, out, costs - 1, *options) == 0
    assert resumed(partitions.command, out, costs, *options) == costs
    assert resumed(partitions.command, out, first, *options) == first
    assert resumed(partitions.command, out, len(asked), *options) == len(asked)


def test_a_place_that_fails_is_named_and_the_others_go_on(clock):
    reader = FakeReader(clock, SHAPES[0])
    places = {"good": Green(8, stream_of(range(8))), "bad": Green(8, stream_of(range(4)))}
    errors: dict[str, str] = {}
    found = time_reads(reader, places, rounds=3, errors=errors)
    assert len(found["good"].us_all) == 3
    assert set(errors) == {"bad"}
    with pytest.raises(AssertionError):
        time_reads(reader, places)


def test_the_fastest_reader_is_picked(clock):
    readers = {shape.name: FakeReader(clock, shape) for shape in SHAPES[::-1]}
    places = {"8": Green(8, stream_of(range(8)))}
    assert readers[pick_shape(readers, places)].shape.loads == 8
    assert best_reader(places.values()).shape.loads == 8
    assert best_reader(places.values(), among={"smkern", "1x1024x12"}).shape.loads == 12
