"""A timeline keeps what it was told, in order, within its capacity, through a file and back."""

from __future__ import annotations

import gzip
import json

import pytest

from smkern.errors import ArgumentError, BudgetError
from smkern.latency import Chunk, Size
from smkern.models import SamplingParams
from smkern.policies import Chunked, Decision, StaticSplit
from smkern.runtime.device import Work
from smkern.runtime.interleaver import Interleaver
from smkern.runtime.multiplexer import Multiplexer
from smkern.runtime.place import Place
from smkern.runtime.sim.device import SimDevice
from smkern.runtime.sim.executor import SimExecutor
from smkern.runtime.timeline.perfetto import to_json
from smkern.runtime.timeline.timeline import BACKLOG, Timeline
from tests.runtime.doubles import ManualDevice
from tests.runtime.timeline.timelines import NUM_SMS, Script, batch_of, snapshot_at, waiting
from tests.runtime.world import small_config

DECODE, PREFILL = Place.of("decode", 32, NUM_SMS), Place.of("prefill", 32, NUM_SMS)
STEP = Size(batch=3, total_kv=900)
LAYERS = Size((Chunk(10), Chunk(5, 16)), layers=2, num_layers=4)


class Priced:
    """Ten microseconds a launch, half as much again beside another; refuses the odd batch."""

    def alone_us(self, size: Size, num_sms: int) -> float:
        if size.batch == 13:
            raise BudgetError("batch 13: not measured; take 12")
        return 10.0

    def slowdown(self, size: Size, num_sms: int, beside: Size, beside_sms: int) -> float:
        return 1.5


def busy_script(predictor=None) -> Script:
    script = Script(predictor=predictor)
    script.decided(
        1.0, Decision(rung=32, prefill=(7,), layers=2, steps=2),
        running_kv=(300, 600), waiting=waiting(2), prefill=batch_of(7),
    )  # fmt: skip
    script.ran("decode", 2, 12, place=DECODE, size=STEP, name="decode", seen_us=13)
    script.ran("prefill", 3, 30, place=PREFILL, size=LAYERS, about={"first": 0})
    script.timeline.note("failed", error="layer 3", requests=[7])
    script.timeline.state(31, decoding=0)
    return script


def test_an_interleaver_s_launches_are_spans():
    device = ManualDevice()
    timeline = Timeline(device.num_sms, clock=device.now_us)
    lanes = Interleaver(device, on_launch=timeline.launched, on_over=timeline.over)
    lanes.launch("decode", Work("decode", lambda place: None))
    lanes.drain()
    (span,) = timeline.trace().spans
    assert (span.name, span.lane, span.place) == ("decode", "decode", Place.whole(132))
    assert span.is_over
    assert not span.is_exact  # this device tells no times
    assert (span.begin_us, span.end_us) == (span.launched_us, span.seen_us) == (0.0, 1.0)


def test_launches_without_times_queue_up_behind_each_other():
    script = Script()
    script.ran("decode", 0, 10, knows=False)
    script.ran("decode", 0, 25, launched_us=1, knows=False)
    assert [(s.begin_us, s.end_us) for s in script.timeline.trace().spans] == [(0, 10), (10, 25)]


def test_what_is_on_its_way_is_shown_until_now():
    script = Script()
    ticket = script.start("prefill", 5.0)
    script.now_us = 40.0
    (span,) = script.timeline.trace().spans
    assert (span.begin_us, span.end_us, span.is_over) == (5, 40, False)
    script.timeline.abandoned([ticket])
    script.now_us = 90.0
    (span,) = script.timeline.trace().spans
    assert (span.end_us, span.is_over) == (40, False)


def test_the_oldest_are_forgotten_and_counted():
    script = Script(capacity=3)
    for i in range(5):
        script.ran("decode", i, i + 1)
    trace = script.timeline.trace()
    assert [span.number for span in trace.spans] == [2, 3, 4]
    assert trace.dropped == 2


def test_what_is_older_than_the_oldest_launch_is_forgotten_with_it():
    """Else a trace has decisions of minutes in front of its first launch, and memory that grows."""
    script = Script(capacity=3)
    for i in range(8):
        script.decided(10.0 * i, Decision(), running_kv=(5,) * (i + 1))
        script.timeline.note(f"step {i}")
        script.ran("decode", 10 * i + 1, 10 * i + 9)
    trace = script.timeline.trace()
    assert [span.launched_us for span in trace.spans] == [51, 61, 71]
    assert [choice.at_us for choice in trace.choices] == [60, 70]
    assert [note.name for note in trace.notes] == ["step 6", "step 7"]
    assert [state.decoding for state in trace.states] == [6, 7, 8]  # six rows when it began
    assert trace.extent_us == (50, 79)


def test_a_loop_that_never_idles_settles_two_at_a_time():
    script = Script(capacity=8)
    for i in range(2 * BACKLOG):
        script.ran("decode", i, i + 1)
    assert script.timeline.settle(0) <= BACKLOG + 1
    assert script.timeline.trace().dropped == 2 * BACKLOG - 8


def test_a_timeline_holds_no_work():
    """What a launch runs holds tensors: it must not live on with the record."""
    script = Script()
    ticket = script.ran("decode", 0, 1)
    record = script.timeline._log[-1]
    assert ticket not in record[1]
    assert ticket.work not in record[1]
    assert ticket.work.run not in record[1]


def test_decisions_are_kept_as_what_explains_them():
    (choice,) = busy_script().timeline.trace().choices
    assert (choice.rung, choice.prefill, choice.layers, choice.steps) == (32, (7,), 2, 2)
    assert (choice.decoding, choice.waiting, choice.trigger) == (2, 2, "decode")


def test_equal_states_are_one():
    script = Script()
    for at_us in (1.0, 2.0):
        script.timeline.decided(snapshot_at(at_us, running_kv=(5,)), Decision())
    script.timeline.state(3.0, decoding=1)
    assert [state.at_us for state in script.timeline.trace().states] == [1.0]


def test_sms_over_time():
    script = Script()
    script.ran("decode", 0, 5)
    script.ran("decode", 5, 9, place=DECODE)
    script.ran("prefill", 6, 9, place=PREFILL)
    script.ran("prefill", 9, 12)
    script.ran("decode", 12, 15, place=DECODE)
    assert script.timeline.trace().split() == (
        (0, 132, 0), (5, 32, 100), (9, 0, 132), (12, 32, 100)
    )  # fmt: skip


def test_predicted_times_count_what_runs_beside():
    script = Script(predictor=Priced())
    script.ran("decode", 0, 10, place=DECODE, size=STEP)
    script.ran("prefill", 5, 40, place=PREFILL, size=LAYERS)
    script.ran("decode", 10, 20, place=DECODE, size=STEP)
    script.ran("decode", 50, 60, place=DECODE, size=STEP)
    script.ran("decode", 60, 70, place=DECODE)
    script.ran("decode", 70, 80, place=DECODE, size=Size(batch=13, total_kv=13))
    spans = script.timeline.trace().spans
    assert [span.predicted_us for span in spans] == [10, 15, 15, 10, None, None]


@pytest.mark.parametrize("policy", [StaticSplit(32, predictor=Priced()), Chunked(512)])
def test_a_runtimes_timeline_asks_the_policys_predictor(policy):
    device = SimDevice(132, (32,), Priced())
    mux = Multiplexer(SimExecutor(small_config(), device, num_pages=64), policy=policy)
    mux.submit([1] * 40, SamplingParams(max_new_tokens=4))
    assert sum(output.token is not None for output in mux.run()) == 4
    said = {span.predicted_us for span in mux.timeline.trace().spans}
    assert said == ({10.0} if isinstance(policy, StaticSplit) else {None})


@pytest.mark.parametrize("name", ["trace.json", "deep/trace.json", "trace.json.gz"])
def test_a_file_gives_the_trace_back(tmp_path, name):
    script = busy_script(Priced())
    script.start("decode", 14.0, DECODE, size=STEP)
    path = script.timeline.save(tmp_path / name)
    assert Timeline.load(path) == script.timeline.trace()
    assert [file.name for file in path.parent.iterdir() if file.is_file()] == [path.name]


def test_a_chrome_trace_has_lanes_as_threads_and_counters():
    events = to_json(busy_script().timeline.trace())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {"decode lane", "prefill lane", "policy", "notes"}
    step = next(e for e in events if e["ph"] == "X" and e["name"] == "decode")
    assert (step["ts"], step["dur"]) == (1.0, 10.0)  # from the decision on
    assert (step["args"]["num_sms"], step["args"]["rung"]) == (32, 32)
    counters = {e["name"] for e in events if e["ph"] == "C"}
    assert counters == {"SMs", "requests"}
    assert all(e["ts"] >= 0 for e in events if "ts" in e)
    json.dumps(events)


def test_unknown_objects_in_about_are_written_as_text(tmp_path):
    script = Script()
    script.ran("decode", 0, 1, about={"requests": (script,)})
    assert Timeline.load(script.timeline.save(tmp_path / "t.json")).spans


def test_numbers_and_names_that_json_lacks_are_written_as_text(tmp_path):
    script = Script()
    about = {"loss": float("nan"), "sizes": [float("inf"), 10**30, 7], (1, 2): True}
    script.ran("decode", 0, 1, about=about)
    script.timeline.note("warm", loss=-float("inf"))
    found = Timeline.load(script.timeline.save(tmp_path / "t.json"))
    wanted = {"loss": "nan", "sizes": ["inf", str(10**30), 7], "(1, 2)": True}
    assert (found.spans[0].about, found.notes[0].about) == (wanted, {"loss": "-inf"})


@pytest.mark.parametrize(
    ("name", "contents"),
    [
        ("t.json", b""), ("t.json", b"{"), ("t.json", b"[]"), ("t.json", b"{}"),
        ("t.json", b'{"otherData": {"format": "other"}, "traceEvents": []}'),
        ("t.json.gz", gzip.compress(b"{}" * 100, mtime=0)[:20]),
        ("t.json.gz", gzip.compress(b"{}", mtime=0)[:10] + b"\xff" * 20),
    ],
)  # fmt: skip
def test_other_files_are_refused(tmp_path, name, contents):
    path = tmp_path / name
    path.write_bytes(contents)
    with pytest.raises(ArgumentError, match=f"{name} is not a timeline"):
        Timeline.load(path)


@pytest.mark.parametrize(
    ("number", "why"), [(0, "two launches of one number"), (None, "NoneType")], ids=str
)
def test_launches_without_a_number_of_their_own_are_refused(tmp_path, number, why):
    script = Script()
    script.ran("prefill", 0, 1)
    script.ran("decode", 0, 1)
    path = script.timeline.save(tmp_path / "t.json")
    data = json.loads(path.read_text())
    for event in data["traceEvents"]:
        if event.get("cat") == "launch":
            event["args"]["number"] = number
    path.write_text(json.dumps(data))
    with pytest.raises(ArgumentError, match=why):
        Timeline.load(path)


def test_no_file_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="give a file that"):
        Timeline.load(tmp_path / "none.json")


@pytest.mark.parametrize(("num_sms", "capacity"), [(0, 1), (132, -1)])
def test_sizes_that_cannot_be_are_refused(num_sms, capacity):
    with pytest.raises(ArgumentError, match="="):
        Timeline(num_sms, capacity=capacity)
