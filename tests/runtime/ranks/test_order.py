"""What rank 0 and the others wait for, one by one: launches, events, answers."""

from __future__ import annotations

import math
import threading
from array import array
from multiprocessing import Pipe
from types import SimpleNamespace
from typing import Any

import pytest

from smkern.errors import ArgumentError, RankError
from smkern.kv import PagePool
from smkern.models import SamplingParams
from smkern.runtime import HostDevice, Interleaver, Place, Work
from smkern.runtime.model import sizes
from smkern.runtime.place import Lane
from smkern.runtime.ranks.channel import Link, Links
from smkern.runtime.ranks.follower import _Replay
from smkern.runtime.ranks.leader import RankDevice
from smkern.runtime.ranks.records import Mirror, Told
from smkern.runtime.request import Request
from tests.models.generation import tiny

WHOLE = Place.whole(132)


class Logged:
    """Links that write down what they are told."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    def check(self) -> None:
        pass

    def accepted(self, number: int) -> None:
        self.log.append(("accepted", number))

    def tell(self, kind: str, *payload: Any) -> int:
        self.log.append((kind, *payload))
        return len(self.log)

    def over(self, number: int) -> None:
        self.log.append(("over", number))

    def failed_here(self, number: int, error: Exception) -> None:
        self.log.append(("failed", number, str(error)))


def test_nothing_is_launched_before_all_have_prepared_it() -> None:
    links = Logged()
    device, ran = RankDevice(HostDevice(), links), []  # type: ignore[arg-type]
    work = Work("decode", lambda place: ran.append([*links.log]))
    device.prepared([Work("other", ran.append), work], call=7)
    event = device.launch("decode", WHOLE, work)
    told = [("accepted", 7), ("launch", "decode", WHOLE, (7, 1))]
    assert ran == [told]
    assert links.log == told
    assert event.query()
    assert event.query()
    assert links.log == [*told, ("over", 2)]  # once


def test_work_that_others_do_not_have_is_refused() -> None:
    links = Logged()
    device = RankDevice(HostDevice(), links)  # type: ignore[arg-type]
    work = Work("decode", lambda place: None)
    with pytest.raises(ArgumentError, match="'decode' was not prepared"):
        device.launch("decode", WHOLE, work)
    device.prepared([work], call=1)
    device.prepared([], call=2)
    with pytest.raises(ArgumentError, match="was not prepared"):
        device.launch("decode", WHOLE, work)
    device.launch("decode", WHOLE, Work("fence", lambda place: None, launches=0))
    assert links.log == [("launch", "decode", WHOLE, None)]


def test_what_raises_here_is_told() -> None:
    links = Logged()
    device = RankDevice(HostDevice(), links)  # type: ignore[arg-type]
    work = Work("decode", lambda place: 1 // 0)
    device.prepared([work], call=3)
    with pytest.raises(ZeroDivisionError):
        device.launch("decode", WHOLE, work)
    assert links.log[-1][:2] == ("failed", 2)


def test_lanes_never_run_at_once_on_the_same_sms() -> None:
    device = RankDevice(Queues(rungs=[8]), Logged())  # type: ignore[arg-type]
    lanes = Interleaver(device)
    lanes.aim(None, shared=True)
    prompts, step = (Work(name, lambda place: None, launches=1) for name in ("prefill", "decode"))
    device.prepared([prompts, step], call=1)
    lanes.launch("prefill", prompts)
    assert lanes.place_for("decode") is None
    lanes.aim(8, shared=True)
    assert lanes.place_for("decode") is None  # prompts still run on its SMs


class Queues(HostDevice):
    """Nothing that is launched is ever over."""

    def launch(self, lane: Lane, place: Place, work: Work) -> Any:
        return SlowEvent(math.inf)


class SlowEvent:
    """Over at its third look."""

    def __init__(self, looks: float) -> None:
        self.left = looks

    def query(self) -> bool:
        self.left -= 1
        return self.left <= 0


def replay_with(event: SlowEvent, read: list[str]) -> _Replay:
    device = SimpleNamespace(launch=lambda *given: event, wait=lambda events, until: None)
    work = Work("decode", lambda place: None), SimpleNamespace(read=lambda: read.append("read"))
    graphs = SimpleNamespace(by_graph={"a": 1, "b": 2}, refused={})
    executor = SimpleNamespace(device=device, decode=lambda requests, steps: [work], graphs=graphs)
    return _Replay(executor, None, 0.05)  # type: ignore[arg-type]


def test_a_launch_that_is_over_on_rank_0_is_waited_for() -> None:
    event, read = SlowEvent(3), list[str]()
    replay = replay_with(event, read)
    replay.decode(1, Told(PagePool(4, 4)).records([]), 1)
    replay.launch(2, "decode", WHOLE, (1, 0))
    assert (event.left, read) == (3, [])
    replay.over(2)
    assert (event.left, read) == (0, ["read"])
    replay.over(2)
    assert read == ["read"]


def test_a_launch_that_never_ends_is_an_error() -> None:
    replay = replay_with(SlowEvent(float("inf")), [])
    replay.decode(1, Told(PagePool(4, 4)).records([]), 1)
    replay.launch(2, "decode", WHOLE, (1, 0))
    with pytest.raises(RankError, match=r"not ended here for 0\.05 s"):
        replay.over(2)


def ids(*tokens: int) -> array[int]:
    return array("q", tokens)


def a_request(pool: PagePool) -> Request:
    request = Request(3, SamplingParams(9), 1, frozenset({2}), 9, ids(5, 6, 7, 8, 9), 5)
    pool.allocate(request, request.ids)
    request.room = 8
    return request


def test_what_follows_draws_with_the_last_layers_and_forgets_who_left() -> None:
    seen, event, here = list[Any](), SlowEvent(0), PagePool(16, 4)
    run = SimpleNamespace(draw=SimpleNamespace(read=lambda: seen.append("read")))
    executor = SimpleNamespace(
        device=SimpleNamespace(launch=lambda *given: event), config=SimpleNamespace(num_layers=4),
        begin=lambda chunks, slot: run, prefill=lambda *given: seen.append(given[1:]),
        forget=lambda request: seen.append(request.index), idle=lambda: seen.append("idle"),
    )  # fmt: skip
    replica = SimpleNamespace(
        tell=lambda *given: None, forget=lambda request: seen.append(("pages", request.index))
    )
    replay = _Replay(executor, replica, 0.05)  # type: ignore[arg-type]
    replay.begin(1, Told(here).records([a_request(here)]), [(3, 5, 0, True)], 0)
    for number, first, count in ((2, 0, 3), (4, 3, 1)):
        replay.prefill(number, 0, first, count)
        replay.launch(number + 1, "prefill", WHOLE, (number, 0))
        replay.over(number + 1)
    replay.idle(6)
    replay.forget(7, 3)
    assert seen == [(0, 3), (3, 1), "read", "idle", 3, ("pages", 3)]
    with pytest.raises(KeyError):
        replay.forget(8, 3)


def test_graphs_that_differ_are_named() -> None:
    replay = replay_with(SlowEvent(1), [])
    replay.same_graphs(1, ["a", "b"])
    with pytest.raises(RankError, match=r"graphs \['b'\] are on one"):
        replay.same_graphs(1, ["a"])


def test_records_say_only_what_is_new() -> None:
    pool = PagePool(16, 4)
    request = a_request(pool)
    told, other = Told(pool), {}
    mirror = Mirror(SimpleNamespace(  # type: ignore[arg-type]
        tell=lambda x, first, pages: other.setdefault(x.index, []).extend([first, *pages]),
        forget=lambda x: other.pop(x.index),
    ))  # fmt: skip
    (copy,) = mirror.update(told.records([request]))
    assert (copy.ids, copy.prompt_len, copy.stop_token_ids) == (ids(5, 6, 7, 8, 9), 5, {2})
    assert other == {3: [0, *pool.pages(request)]}
    request.ids.append(1)
    request.num_pending = 2
    news = told.records([request])
    assert (news.ids, news.pages, news.fixed) == ([ids(1)], {}, {})
    assert mirror.update(news) == [copy]
    assert (copy.ids, copy.num_tokens) == (request.ids, request.num_tokens)
    pool.extend(request, 9)
    request.room = 12
    news = told.records([request])
    assert news.pages == {3: (2, pool.pages(request, 2))}
    told.forget(request)
    assert told.records([request]).had == [0]


def test_a_rank_that_never_answers_is_named() -> None:
    here, there = Pipe()
    ended = threading.Event()
    links = Links({1: here}, 0.2, on_end=ended.set)
    number = links.tell("begin")
    with pytest.raises(RankError, match=r"rank 1 has not answered for 0\.2 s"):
        links.accepted(number)
    with pytest.raises(RankError, match="rank 1"):  # and ever after
        links.check()
    link = Link(there, 5.0)
    assert link.receive()[1] == "begin"
    with pytest.raises(RankError, match="rank 1 has not answered"):
        link.receive()
    assert ended.wait(5)
    links.close()


def test_messages_come_in_order_with_what_is_over() -> None:
    here, there = Pipe()
    links, link, seen = Links({1: here}, 5.0), Link(there, 5.0), []

    def other() -> None:
        while not seen or seen[-1][1] != "close":
            seen.append(link.receive())
            link.answer(seen[-1][0])

    thread = threading.Thread(target=other)
    thread.start()
    links.tell("a", 1)
    links.over(1)
    links.over(5)
    links.accepted(links.tell("b"))
    links.close()
    thread.join()
    assert seen == [(1, "a", [], (1,)), (2, "b", [1, 5], ()), (3, "close", [], ())]


def test_a_part_counts_its_sums_among_its_launches() -> None:
    config = tiny()
    part = SimpleNamespace(tp=object())
    assert (sizes.is_summed(part), sizes.is_summed(SimpleNamespace(tp=None))) == (True, False)
    alone, summed = (sizes.layer_launches(config, summed=x) for x in (False, True))
    assert summed == alone + 3  # two sums, and what adds the second to the residual
