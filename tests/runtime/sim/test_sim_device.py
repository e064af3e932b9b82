"""The simulated device: order, contention, slow launches and faults on the virtual clock."""

from __future__ import annotations

import pytest

from smkern.errors import ArgumentError, DeviceError, StalledError
from smkern.latency import Chunk, Size
from smkern.runtime.device import Work
from smkern.runtime.interleaver import Interleaver
from smkern.runtime.place import Place
from smkern.runtime.sim.device import HANGING_WAIT_US, SimDevice
from smkern.runtime.sim.event import SimEvent

WHOLE = Place.whole(100)
DECODE, PREFILL = Place.of("decode", 40, 100), Place.of("prefill", 40, 100)


class Fixed:
    """Prefill takes 10 us a layer, decode 30; beside each other 2 and 1.5 times longer."""

    def alone_us(self, size: Size, num_sms: int) -> float:
        return 10.0 * size.layers if size.chunks else 30.0

    def slowdown(self, size: Size, num_sms: int, beside: Size, beside_sms: int) -> float:
        return 2.0 if size.chunks else 1.5


def device(**options) -> SimDevice:
    return SimDevice(100, (40, 60), Fixed(), **options)


def step() -> Work:
    return Work("decode", lambda place: None, Size(batch=1, num_layers=4))


def layers(count: int, *, launches: int = 12) -> Work:
    return Work("prefill", lambda place: None, Size((Chunk(8),), count, 4), launches)


def takes(us: float) -> Work:
    return Work("other", lambda place: None, about={"us": us})


def times(*events: SimEvent) -> list[tuple[float, float] | None]:
    return [event.times_us() for event in events]


def test_a_lane_runs_in_order_and_lanes_side_by_side() -> None:
    sim = device()
    events = [
        sim.launch("decode", DECODE, takes(10)),
        sim.launch("prefill", PREFILL, takes(4)),
        sim.launch("prefill", PREFILL, takes(3)),
    ]
    sim.spend(20)
    assert times(*events) == [(0, 10), (0, 4), (4, 7)]
    assert sim.now_us() == 20
    assert sim.is_idle()


def test_launches_beside_each_other_slow_down_while_both_run() -> None:
    sim = device()
    prompt = sim.launch("prefill", PREFILL, layers(3))  # 30 us of its own
    sim.spend(10)
    token = sim.launch("decode", DECODE, step())
    sim.spend(100)
    # From 10 on both run: the prompt's 20 us take 40. The step has done 40/1.5 of its 30 by then.
    assert times(prompt) == [(0, 50)]
    assert token.times_us() == pytest.approx((10, 50 + 30 - 40 / 1.5))


def test_lanes_on_the_same_sms_share_them_and_it_is_counted() -> None:
    sim = device()
    wide, narrow = Place.of("decode", 60, 100), PREFILL
    one = sim.launch("decode", wide, takes(60))
    other = sim.launch("prefill", narrow, takes(10))
    sim.spend(100)
    # 20 SMs are in both: 60 SMs count for 50, and 60 for 50.
    assert times(other) == [(0, pytest.approx(12))]
    assert times(one) == [(0, pytest.approx(12 + 60 - 10))]
    assert sim.overlap_us == pytest.approx(12)


def test_waiting_ends_with_a_launch_or_a_moment_whichever_comes_first() -> None:
    sim = device()
    event = sim.launch("decode", WHOLE, takes(10))
    sim.wait([event], until_us=4)
    assert (sim.now_us(), event.query()) == (4, False)
    sim.wait([event], until_us=100)
    assert (sim.now_us(), event.query()) == (10, True)
    sim.wait([event], until_us=100)  # over already
    assert sim.now_us() == 10
    sim.wait([], until_us=100)
    assert sim.now_us() == 100


def test_waiting_for_a_moment_that_has_passed_moves_no_clock_back() -> None:
    sim = device(decode_launch_us=5.0)
    event = sim.launch("decode", DECODE, takes(20))
    sim.wait([event], 3.0)
    assert sim.now_us() == 5.0
    sim.wait([event])
    assert times(event) == [(5, 25)]


def test_waiting_for_what_never_comes_is_refused() -> None:
    sim = device()
    with pytest.raises(StalledError, match="nothing is launched"):
        sim.wait([])


def test_a_graph_starts_once_the_host_has_launched_it() -> None:
    sim = device(decode_launch_us=5)
    event = sim.launch("decode", WHOLE, step())
    assert sim.now_us() == 5
    sim.wait([event])
    assert times(event) == [(5, 35)]


def test_a_decode_step_ends_later_by_the_gap() -> None:
    sim = device(decode_gap_us=2.0)
    events = [sim.launch("decode", DECODE, step()) for _ in range(2)]
    other = sim.launch("prefill", PREFILL, takes(4))
    sim.spend(80)
    assert times(*events, other) == [(0, 32), (32, 64), (0, 4)]


def test_layers_run_as_they_are_launched() -> None:
    quick, slow = device(prefill_launch_us=4), device(prefill_launch_us=25)
    events = [sim.launch("prefill", WHOLE, layers(3)) for sim in (quick, slow)]
    assert [quick.now_us(), slow.now_us()] == [12, 75]
    for sim, event in zip((quick, slow), events, strict=True):
        sim.wait([event])
    # Slow launches: a layer begins every 25 us and takes 10.
    assert times(*events) == [(4, 34), (25, 85)]


def test_layers_in_a_graph_are_one_launch() -> None:
    sim = device(prefill_launch_us=25, decode_launch_us=5)
    event = sim.launch("decode", WHOLE, layers(3, launches=1))
    assert sim.now_us() == 5
    sim.wait([event])
    assert times(event) == [(5, 35)]


@pytest.mark.parametrize("cost_us", [4.0, 15.0])
def test_layers_alone_end_as_they_do_behind_another_launch(cost_us) -> None:
    alone, behind = device(prefill_launch_us=cost_us), device(prefill_launch_us=cost_us)
    behind.launch("prefill", PREFILL, takes(1e-9))
    found = [sim.launch("prefill", PREFILL, layers(4)) for sim in (alone, behind)]
    assert alone.now_us() == 4 * cost_us
    for sim in (alone, behind):
        sim.spend(200)
    first, second = times(*found)
    assert first == pytest.approx((cost_us, max(cost_us + 40, 4 * cost_us + 10)))
    assert second == pytest.approx(first)


def test_the_other_lane_does_not_slow_down_while_a_slow_launch_starves_its_neighbour() -> None:
    sim = device(prefill_launch_us=100)
    token = sim.launch("decode", DECODE, step())
    sim.launch("prefill", PREFILL, layers(2))
    assert times(token) == [(0, 30)]


def test_work_that_takes_no_time_is_over_where_it_is_first() -> None:
    sim = device()
    first, second = (sim.launch("decode", WHOLE, takes(us)) for us in (3, 0))
    sim.wait([second])
    assert times(first, second) == [(0, 3), (3, 3)]


def test_a_launch_that_raises_leaves_nothing() -> None:
    def fail(place: Place) -> None:
        raise KeyError("layer")

    sim = device(faults={1: "raise"})
    with pytest.raises(KeyError):
        sim.launch("decode", WHOLE, Work("decode", fail, about={"us": 1}))
    with pytest.raises(RuntimeError, match="launch 1"):
        sim.launch("decode", WHOLE, takes(1))
    assert sim.is_idle()
    assert sim.launching is None
    assert sim.launches == 2


def test_a_launch_that_hangs_never_ends_and_holds_its_lane() -> None:
    sim = device()
    sim.fail_at(1, "hang")
    events = [sim.launch("decode", DECODE, takes(1)) for _ in range(3)]
    other = sim.launch("prefill", PREFILL, takes(7))
    sim.spend(1000)
    assert [event.query() for event in events] == [True, False, False]
    assert times(other) == [(0, 7)]
    assert sim.has_failed
    sim.wait(events[1:], until_us=3000)
    assert sim.now_us() == 3000
    sim.wait(events[1:])
    assert sim.now_us() == 3000 + HANGING_WAIT_US


def test_an_error_is_told_once_and_of_one_launch() -> None:
    sim = device(faults={1: "error"})
    good, bad, behind = (sim.launch("decode", DECODE, takes(1)) for _ in range(3))
    beside = sim.launch("prefill", PREFILL, takes(100))
    assert not bad.query()
    sim.spend(1.5)
    assert good.query()
    sim.spend(1)
    with pytest.raises(DeviceError, match="launch 1 on the decode lane"):
        bad.query()
    assert bad.query()
    assert bad.is_gone
    assert not sim.is_idle()
    sim.wait([behind])
    assert times(good, bad, behind) == [(0, 1), None, (2, 3)]
    assert not beside.query()


def test_a_lost_device_tells_whenever_it_is_asked() -> None:
    sim = device(faults={1: "lost"})
    good, last = (sim.launch("decode", WHOLE, takes(1)) for _ in range(2))
    sim.spend(5)
    for event in (good, last, good):
        with pytest.raises(DeviceError, match="lost since launch 1"):
            event.query()
    with pytest.raises(DeviceError, match="lost since launch 1"):
        sim.launch("decode", WHOLE, takes(1))
    sim.wait([good])
    sim.wait([], until_us=10)
    assert sim.now_us() == 10


@pytest.mark.parametrize(
    ("lane", "place"),
    [
        ("decode", PREFILL),
        ("prefill", Place.of("prefill", 50, 100)),
        ("decode", Place.whole(132)),
        ("decode", Place("decode", 40, 41)),
    ],
)
def test_a_place_that_is_not_the_lanes_is_refused(lane, place) -> None:
    with pytest.raises(ArgumentError, match="100 SMs and the rungs"):
        device().launch(lane, place, takes(1))


@pytest.mark.parametrize("work", [Work("x", print), takes(-1), takes(float("nan"))])
def test_work_of_unknown_length_is_refused(work) -> None:
    with pytest.raises(ArgumentError, match="give a size"):
        device().launch("decode", WHOLE, work)


@pytest.mark.parametrize("rungs", [(40, 20), (100,), (0, 20), (20, 20)])
def test_rungs_that_cannot_be_are_refused(rungs) -> None:
    with pytest.raises(ArgumentError, match="rungs"):
        SimDevice(100, rungs)


def test_a_switch_that_waits_overlaps_nothing_and_an_impatient_one_is_bounded() -> None:
    for impatient in (False, True):
        sim = device()
        lanes = Interleaver(sim, impatient=impatient)
        lanes.aim(40)
        lanes.launch("decode", takes(10))
        lanes.launch("prefill", takes(30))
        lanes.aim(60)
        lanes.wait()
        lanes.poll()
        lanes.launch("decode", takes(10))
        lanes.drain()
        assert (sim.overlap_us > 0) == impatient
        assert sim.overlap_us <= 12


def test_launches_on_the_same_sms_are_priced_as_the_split_that_they_share() -> None:
    """Else a predictor that knows of shared SMs would count them twice."""

    class Sharing:
        def alone_us(self, size: Size, num_sms: int) -> float:
            return 100.0

        def slowdown(self, size: Size, num_sms: int, beside: Size, beside_sms: int) -> float:
            assert (num_sms, beside_sms) in ((50, 50), (65, 35), (35, 65))
            return 1.5 * max(1.0, (num_sms + beside_sms) / 100)

    prompts, step = Size((Chunk(10),), 1, 1), Size(batch=1, total_kv=1)
    # Half of all SMs each: 100 * 1.5 * 2. Decode on 65 of 100 is over first, after 231 us, in which
    # prompts on 35 of 70 do 231 / 300 of their work.
    for place, end_us in ((WHOLE, 300.0), (Place.of("prefill", 30, 100), 253.85)):
        sim = SimDevice(100, (30,), Sharing())
        sim.launch("decode", WHOLE, Work("step", lambda place: None, size=step))
        sim.wait([sim.launch("prefill", place, Work("layer", lambda place: None, size=prompts))])
        assert sim.now_us() == pytest.approx(end_us, abs=0.01)
