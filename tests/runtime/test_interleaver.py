"""Who may launch where: the side that shrinks moves first, nothing overlaps, nothing drains."""

from __future__ import annotations

import pytest

from smkern.errors import ArgumentError, DeviceError, StalledError
from smkern.latency import Chunk, Size
from smkern.runtime.device import Work
from smkern.runtime.interleaver import ROOM_US, Interleaver
from smkern.runtime.place import LANES, Place
from smkern.runtime.sim.device import SimDevice
from smkern.runtime.sim.rates import ConstantRates
from smkern.runtime.ticket import Ticket
from tests.runtime.doubles import ManualDevice, work

WHOLE = Place.whole(132)


def fail(place: Place) -> None:
    raise ZeroDivisionError("planted")


BAD = Work("bad", fail)


def side(lane: str, rung: int) -> Place:
    return Place.of(lane, rung, 132)  # type: ignore[arg-type]


@pytest.fixture
def device() -> ManualDevice:
    return ManualDevice()


@pytest.fixture
def lanes(device: ManualDevice) -> Interleaver:
    return Interleaver(device)


def test_sides_of_a_rung_are_complements() -> None:
    assert (side("decode", 48).num_sms, side("prefill", 48).num_sms) == (48, 84)
    assert Place.of("decode", None, 132) == WHOLE


@pytest.mark.parametrize(
    ("decode", "prefill", "overlap"), [(16, 16, False), (48, 16, True), (16, 48, False)]
)
def test_nested_rungs_overlap_where_decodes_is_larger(decode, prefill, overlap) -> None:
    one, other = side("decode", decode), side("prefill", prefill)
    assert one.overlaps(other) == other.overlaps(one) == overlap
    assert WHOLE.overlaps(one)
    assert one.overlaps(WHOLE)


def test_work_is_told_its_place(lanes: Interleaver, device: ManualDevice) -> None:
    seen = []
    lanes.aim(48)
    for lane in LANES:
        ticket = lanes.launch(lane, Work(lane, seen.append))
        assert ticket.place == side(lane, 48)
    assert seen == [side("decode", 48), side("prefill", 48)]
    assert [(lane, place) for lane, place, _, _ in device.launched] == list(
        zip(LANES, seen, strict=True)
    )


def test_the_whole_device_belongs_to_one_lane_at_a_time(lanes, device) -> None:
    lanes.launch("decode", work())
    assert lanes.place_for("prefill") is None
    assert not lanes.can_launch("prefill")
    with pytest.raises(StalledError, match="'late' cannot be launched on the prefill lane now: 0"):
        lanes.launch("prefill", work("late"))
    device.end("decode")
    assert not lanes.can_launch("prefill"), "only a poll tells what is over"
    lanes.poll()
    assert lanes.launch("prefill", work()).place == WHOLE


def test_from_the_whole_device_to_a_split(lanes: Interleaver, device: ManualDevice) -> None:
    """Decode shrinks with its next launch; prefill begins once the whole device's work is over."""
    lanes.launch("decode", work())
    lanes.aim(48)
    assert lanes.target("prefill") == side("prefill", 48)
    assert lanes.launch("decode", work()).place == side("decode", 48)
    assert lanes.place_for("prefill") is None
    device.end("decode")
    lanes.poll()
    assert lanes.launch("prefill", work()).place == side("prefill", 48)


@pytest.mark.parametrize(("first", "then"), [(16, 96), (96, 16), (48, 96), (96, 48)])
def test_a_switch_between_rungs(lanes, device, first, then) -> None:
    grows, shrinks = ("decode", "prefill") if then > first else ("prefill", "decode")
    lanes.aim(first)
    for lane in LANES:
        lanes.launch(lane, work())
    lanes.aim(then)
    assert lanes.place_for(shrinks) == side(shrinks, then)
    assert lanes.launch(grows, work()).place == side(grows, first), "no drain: it goes on"
    assert lanes.launch(shrinks, work()).place == side(shrinks, then)
    assert lanes.place_for(grows) == side(grows, first), "the shrinker's old work runs"
    device.end(shrinks)
    lanes.poll()
    assert lanes.launch(grows, work()).place == side(grows, then)


def test_the_side_that_grows_stays_until_the_shrinker_moves(lanes, device) -> None:
    """Its neighbour launches nothing new; only the end of what it has queued frees the SMs."""
    lanes.aim(16)
    lanes.launch("prefill", work())
    lanes.launch("decode", work())
    lanes.aim(96)
    device.end("decode")
    lanes.poll()
    assert lanes.launch("decode", work()).place == side("decode", 16)
    device.end("prefill")
    lanes.poll()
    assert lanes.launch("decode", work()).place == side("decode", 96)


def test_prefill_takes_the_whole_device_where_nothing_decodes(lanes, device) -> None:
    lanes.aim(48)
    for lane in LANES:
        lanes.launch(lane, work())
    lanes.aim(48, prefill=None)
    assert lanes.place_for("prefill") == side("prefill", 48)
    device.end("decode")
    lanes.poll()
    assert lanes.launch("prefill", work()).place == WHOLE
    lanes.aim(48)
    assert lanes.place_for("decode") is None, "prefill holds the device until its layers are over"
    assert lanes.launch("prefill", work()).place == side("prefill", 48)
    device.end("prefill", 2)
    lanes.poll()
    assert lanes.launch("decode", work()).place == side("decode", 48)


@pytest.mark.parametrize("asked", [{"rung": 17}, {"rung": 16, "prefill": 132}, {"rung": -1}])
def test_rungs_that_the_device_does_not_have(lanes: Interleaver, asked: dict[str, int]) -> None:
    bad = asked.get("prefill", asked["rung"])
    with pytest.raises(ArgumentError, match=rf"rung={bad}: this device has .* \[16, 48, 96\]"):
        lanes.aim(**asked)
    assert [lanes.target(lane) for lane in LANES] == [WHOLE, WHOLE], "nothing has changed"


def test_impatience_overlaps_what_is_queued_and_no_more(device: ManualDevice) -> None:
    lanes = Interleaver(device, impatient=True)
    lanes.aim(16)
    for lane in LANES:
        lanes.launch(lane, work())
    lanes.aim(96)
    grown = lanes.launch("decode", work())
    assert grown.place == side("decode", 96)
    assert grown.place.overlaps(device.launched[1][1])
    assert lanes.launch("prefill", work()).place == side("prefill", 96)


def test_impatience_does_not_share_the_whole_device(device: ManualDevice) -> None:
    lanes = Interleaver(device, impatient=True)
    lanes.launch("decode", work())
    lanes.aim(48)
    assert lanes.place_for("prefill") is None
    lanes.aim(None)
    assert lanes.place_for("prefill") is None


def test_what_is_no_lane_no_work_or_no_device_is_refused(lanes: Interleaver) -> None:
    with pytest.raises(ArgumentError, match="lane='decoding': give one of"):
        lanes.launch("decoding", work())  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="pass a Work"):
        lanes.launch("decode", print)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="lane='decoding': give one of"):
        lanes.can_launch("decoding")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="pass a Work"):
        lanes.can_launch("decode", print)  # type: ignore[arg-type]
    for ask in (lanes.queued, lanes.tickets, lanes.target, lanes.place_for, lanes.fence):
        with pytest.raises(ArgumentError, match="lane='decoding': give one of"):
            ask("decoding")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"device=\[32\]: pass a CudaDevice"):
        Interleaver([32])  # type: ignore[arg-type]
    assert not lanes.queued("decode")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"run": 3}, "run=3 of 'w': pass what takes a Place"),
        ({"launches": "a"}, "launches of 'w'='a' is no whole number"),
        ({"launches": 1.5}, r"launches of 'w'=1\.5 is no whole number"),
        ({"launches": -500}, "launches of 'w'=-500: give a whole number of at least 0"),
        ({"about": 3}, "about=3 of 'w': pass a dict"),
        ({"about": {"us": "1"}}, "'w' takes '1' us: give a size"),
        ({"about": None}, "'w' takes None us: give a size"),
    ],
)
def test_work_that_cannot_be_launched_is_refused(wrong: dict[str, object], words: str) -> None:
    given = {"run": lambda place: None, "about": {"us": 1.0}} | wrong
    with pytest.raises(ArgumentError, match=words):
        Interleaver(SimDevice(132, (32,))).launch("decode", Work("w", **given))  # type: ignore[arg-type]


def test_an_error_of_the_works_own_is_raised_as_it_is(device: ManualDevice) -> None:
    with pytest.raises(ZeroDivisionError, match="planted"):
        Interleaver(device).launch("decode", BAD)


def test_a_lanes_queue_is_bounded(device: ManualDevice) -> None:
    lanes = Interleaver(device, max_queued=5)
    lanes.launch("decode", work(launches=3))
    assert lanes.can_launch("decode", work(launches=2))
    assert not lanes.can_launch("decode", work(launches=3))
    with pytest.raises(StalledError, match="3 of 5 launches queued, SMs free; ask can_launch"):
        lanes.launch("decode", work(launches=3))
    lanes.launch("decode", work(launches=2))
    assert not lanes.can_launch("decode")
    device.end("decode")
    lanes.poll()
    assert lanes.can_launch("decode", work(launches=3))


def test_a_long_forward_makes_room_as_it_runs(device: ManualDevice) -> None:
    """Its kernels that are done do not count; who found no room is told once."""
    lanes, left = Interleaver(device, max_queued=10), [8]
    lanes.launch("decode", Work("mixed", lambda place: None, launches=8, left=lambda end: left[0]))
    second = work(launches=6)
    assert lanes.try_launch("decode", second) is None
    assert not lanes.has_room_again()
    lanes.wait()
    assert device.waits == [ROOM_US]  # it looks again soon, whatever ends
    left[0] = 4
    assert lanes.has_room_again()
    assert not lanes.has_room_again()
    assert lanes.try_launch("decode", second) is not None
    lanes.wait()
    assert device.waits[-1] is None
    left[0] = 0
    assert not lanes.can_launch("decode", work(launches=5))  # the second counts as a whole
    assert lanes.can_launch("decode", work(launches=4))


def test_room_comes_with_the_end_too(device: ManualDevice) -> None:
    lanes = Interleaver(device, max_queued=10)
    lanes.launch("decode", Work("mixed", lambda place: None, launches=8, left=lambda end: 8))
    assert lanes.try_launch("decode", work(launches=6)) is None
    device.end("decode")
    assert lanes.poll()
    lanes.wait()
    assert device.waits == [None]


def test_work_larger_than_the_bound_runs_in_an_empty_lane(device: ManualDevice) -> None:
    lanes = Interleaver(device, max_queued=5)
    lanes.launch("decode", work(launches=50))
    assert not lanes.can_launch("decode")
    device.end("decode")
    lanes.poll()
    assert lanes.can_launch("decode", work(launches=50))


def test_a_bound_of_none() -> None:
    with pytest.raises(ArgumentError, match="max_queued=0: give a whole number of at least 1"):
        Interleaver(ManualDevice(), max_queued=0)


def test_a_launch_says_how_long_the_host_took() -> None:
    device = SimDevice(132, (32,), ConstantRates(), prefill_launch_us=300.0)
    layers = Work("layers", lambda place: None, launches=3, size=Size((Chunk(64),), 3, 8))
    assert Interleaver(device).launch("prefill", layers).host_us == pytest.approx(900.0)


def test_a_launch_that_raises_keeps_its_sms_until_what_it_launched_is_over(device) -> None:
    """The layers before the one that raised still run, in memory that the lanes take turns with."""
    launched: list[Ticket] = []
    over: list[Ticket] = []
    lanes = Interleaver(device, on_launch=launched.append, on_over=over.append)
    lanes.aim(48)
    with pytest.raises(ZeroDivisionError):
        lanes.launch("prefill", BAD)
    assert lanes.queued("prefill") == 1
    lanes.aim(None)
    assert lanes.place_for("decode") != WHOLE
    assert lanes.launch("prefill", work()).place == WHOLE, "its own lane is in order"
    device.end("prefill", 2)
    assert lanes.poll() == launched == over, "nobody hears of the end of one that raised"
    assert lanes.queued("prefill") == 0
    assert lanes.launch("decode", work()).place == WHOLE


def test_a_launch_that_raises_on_a_lost_device_leaves_nothing_queued(device: ManualDevice) -> None:
    def lose(place: Place) -> None:
        device.launch = lose  # type: ignore[assignment]
        raise DeviceError("planted")

    lanes = Interleaver(device)
    with pytest.raises(DeviceError, match="planted"):
        lanes.launch("decode", Work("bad", lose))
    assert lanes.queued("decode") == 0


def test_what_a_raised_launch_left_is_abandoned_without_a_word(device: ManualDevice) -> None:
    lanes = Interleaver(device)
    with pytest.raises(ZeroDivisionError):
        lanes.launch("decode", BAD)
    device.launched[-1][3].error = DeviceError("lost")
    with pytest.raises(DeviceError, match="lost"):
        lanes.poll()
    assert lanes.abandon(lanes.failed) == []
    assert lanes.queued("decode") == 0
    assert lanes.poll() == []


def test_a_poll_gives_each_lanes_ends_in_order(device: ManualDevice) -> None:
    launched: list[Ticket] = []
    over: list[Ticket] = []
    lanes = Interleaver(device, on_launch=launched.append, on_over=over.append)
    lanes.aim(48)
    prefill = lanes.launch("prefill", work())
    decodes = [lanes.launch("decode", work()) for _ in range(3)]
    assert launched == [prefill, *decodes]
    assert [x.number for x in launched] == [0, 1, 2, 3]
    assert lanes.poll() == []
    device.launched[3][3].over = True
    assert lanes.poll() == [], "the lane's head still runs"
    device.clock_us = 7.0
    device.end("decode", 1)
    device.end("prefill")
    assert lanes.poll() == [decodes[0], prefill]
    assert over == [decodes[0], prefill]
    assert decodes[0].seen_us == 7.0
    assert decodes[0].is_over
    assert lanes.queued("decode") == 2
    assert lanes.tickets("decode")[-1] is decodes[2]
    assert not decodes[1].query()
    assert decodes[2].query(), "it is over on the device, though no poll saw it"


def test_draining_waits_for_everything(lanes: Interleaver, device: ManualDevice) -> None:
    lanes.aim(48)
    tickets = [lanes.launch(lane, work()) for lane in LANES for _ in range(3)]
    assert sorted(x.number for x in lanes.drain()) == [x.number for x in tickets]
    assert lanes.drain() == []
    assert len(device.waits) <= len(tickets)


def test_waiting_is_for_the_lanes_heads_or_a_moment(lanes, device) -> None:
    lanes.launch("decode", work())
    lanes.wait(until_us=12.5)
    assert device.waits == [12.5]


def test_an_error_leaves_what_is_queued_to_be_abandoned(lanes, device) -> None:
    lanes.aim(48)
    tickets = [lanes.launch("decode", work()), lanes.launch("prefill", work())]
    device.launched[0][3].error = DeviceError("planted")
    with pytest.raises(DeviceError, match="planted"):
        lanes.poll()
    assert lanes.abandon() == tickets
    assert [lanes.queued(lane) for lane in LANES] == [0, 0]
    lanes.aim(None)
    assert lanes.launch("prefill", work()).place == WHOLE


def test_what_is_abandoned_gives_its_room_back(device: ManualDevice) -> None:
    lanes = Interleaver(device, max_queued=2)
    for _ in range(2):
        lanes.launch("decode", work())
    assert not lanes.can_launch("decode", work())
    lanes.abandon()
    for _ in range(2):
        assert lanes.can_launch("decode", work())
        lanes.launch("decode", work())
    assert not lanes.can_launch("decode", work())


def test_an_error_of_one_lane_loses_nothing_of_the_other(lanes, device) -> None:
    """What was over is returned, so that its tokens can be read; the next poll raises."""
    lanes.aim(48)
    tickets = [lanes.launch("decode", work()), lanes.launch("prefill", work())]
    device.end("decode")
    device.launched[1][3].error = DeviceError("planted")
    assert lanes.poll() == tickets[:1]
    with pytest.raises(DeviceError, match="planted"):
        lanes.poll()
    assert lanes.abandon() == tickets[1:]


def test_impatience_does_not_go_on_where_the_other_has_grown(device: ManualDevice) -> None:
    """Prefill shall have the whole device and waits; it must not launch under decode's new SMs."""
    lanes = Interleaver(device, impatient=True)
    lanes.aim(16)
    lanes.launch("prefill", work())
    lanes.aim(48, prefill=None)
    lanes.launch("decode", work())
    assert lanes.place_for("prefill") is None
