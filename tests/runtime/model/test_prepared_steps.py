"""Decode steps that are prepared behind the last: taken if they are asked for, dropped cleanly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

import pytest

from smkern.models import Decoder, SamplingParams, Weights
from smkern.policies import StaticSplit
from smkern.runtime import ModelExecutor, Multiplexer
from smkern.runtime.device import Device
from smkern.runtime.executor import Draw, PrefillChunk
from smkern.runtime.host_device import HostDevice
from smkern.runtime.model.reads import ROOMS
from smkern.runtime.model.row_updates import Records
from smkern.runtime.place import Lane, Place
from smkern.runtime.request import Request
from tests.models.generation import one_at_a_time, random_prompts, tiny
from tests.runtime.alone import pool_of

pytestmark = pytest.mark.slow

PAGE, NEW = 1, 9  # so that rows get pages in each step
LENGTHS = [5, 3, 9, 4]
PROMPTS = random_prompts(LENGTHS, seed=11)
CONFIG = tiny(num_layers=1)


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    params = [SamplingParams(NEW)] * len(PROMPTS)
    return [list(tokens) for tokens in one_at_a_time(CONFIG, PROMPTS, params)]


class Watched(HostDevice):
    """Notes what is run behind launches."""

    def __init__(self, notes: list[str]) -> None:
        super().__init__(rungs=[32])
        self._notes = notes

    def behind(self, lane: Lane, run: Callable[[], Any]) -> None:
        assert lane == "decode"
        self._notes.append("behind")
        run()


class Sender:
    """Makes changes by another, and notes them; some raise, with nothing changed."""

    nbytes = 0

    def __init__(self, sender: Any, notes: list[str], fails: Callable[[], bool]) -> None:
        self._sender = sender
        self._notes = notes
        self._fails = fails

    def send(self, records: Records) -> None:
        if self._fails():
            raise RuntimeError("planted")
        self._notes.append("rows")
        self._sender.send(records)


class Rig:
    """An executor on CPU tensors that decodes some requests, one or more steps at a time."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.pool = pool_of(CONFIG, 512, PAGE, reuse=False)
        self.fails: Callable[[], bool] = lambda: False
        self.executor = ModelExecutor(
            Decoder(CONFIG, Weights.random(CONFIG, 3)), self.pool, device=Watched(self.notes),
            max_running=4, max_prefill=2, max_tokens=64,
        )  # fmt: skip
        table, graphs = self.executor._table, self.executor.graphs
        table._sender = Sender(table._sender, self.notes, lambda: self.fails())
        table.take()  # an update with the old sender
        launch = graphs.launch

        def noted(place: Place, batch: int, longest: int) -> None:
            self.notes.append("step")
            launch(place, batch, longest)

        graphs.launch = noted  # type: ignore[method-assign]
        self.requests = []
        for i, prompt in enumerate(PROMPTS):
            request = Request(
                i, SamplingParams(NEW), 0, frozenset(), NEW, list(prompt), len(prompt)
            )
            self.pool.allocate(request, request.ids)
            self.requests.append(request)

    def prefill(self, *requests: Request) -> None:
        chunks = [PrefillChunk(request, 0, len(request.ids), True) for request in requests]
        run = self.executor.begin(chunks, 0)
        self.launch([(self.executor.prefill(run, 0, CONFIG.num_layers), None)])
        self.take(run.draw)

    def launch(self, works: list[Any]) -> None:
        for work, draw in works:
            self.executor.device.launch("decode", Place.whole(132), work)
            self.take(draw)

    def take(self, draw: Draw | None) -> None:
        for request, token in () if draw is None else zip(draw.requests, draw.read(), strict=True):
            request.ids.append(token)

    def decode(self, *requests: Request, steps: int = 1, ahead: int | None = 1) -> list[str]:
        """Launch steps, then prepare as many as `ahead` says; what was noted of the launch."""
        self.extend(requests, steps)
        self.notes.clear()
        self.launch(self.executor.decode(requests, steps))
        notes = list(self.notes)
        if ahead is not None:
            self.extend(requests, ahead)
            self.notes.clear()
            self.executor.prepare_next(requests, ahead)
        return notes

    def extend(self, requests: Sequence[Request], steps: int) -> None:
        for request in requests:
            self.pool.extend(request, min(len(request.ids) + steps, request.max_tokens_held))

    def finish(self, alone: list[list[int]], requests: list[Request]) -> None:
        """All have the tokens of a run alone, and no memory for them is left out."""
        reads = self.executor._reads
        while left := [x for x in requests if len(x.ids) < x.prompt_len + NEW]:
            self.decode(*left)
        for request in requests:
            assert request.ids[request.prompt_len :] == alone[request.index]
        assert len(reads._free) % ROOMS == 0


def decoding(count: int) -> tuple[Rig, list[Request]]:
    """A rig of which so many requests have their first token."""
    rig = Rig()
    some = rig.requests[:count]
    rig.prefill(*some[:2])
    if some[2:]:
        rig.prefill(*some[2:])
    return rig, some


def test_rows_hear_of_pages_behind_the_step_before(alone: list[list[int]]):
    """Once, and nothing is sent between a step and the next."""
    rig, some = decoding(3)
    assert rig.decode(*some) == ["rows", "step"]
    early = 0
    while len(some[0].ids) < some[0].prompt_len + NEW:
        assert rig.notes in ([], ["behind", "rows"])
        early += bool(rig.notes)
        works = rig.executor._prepared.works  # type: ignore[union-attr]
        assert rig.decode(*some) == ["step"]
        assert works[0][1].requests == tuple(some)
    assert early > NEW // 2
    assert [x.ids[x.prompt_len :] for x in some] == alone[:3]


def test_a_device_that_runs_nothing_behind_launches(alone: list[list[int]]):
    """Then the next step sends."""
    rig, some = decoding(2)
    patch = partial(Device.behind, rig.executor.device)  # what a device has by default
    rig.executor.device.behind = patch  # type: ignore[method-assign]
    notes = [rig.decode(*some) for _ in range(6)]
    assert notes == 6 * [["rows", "step"]]
    rig.finish(alone, some)


def test_the_next_step_sends_what_could_not_be_sent_early(alone: list[list[int]]):
    """Also where another update has come in between."""
    draw = Random(3)
    rig, some = decoding(3)
    late = 0
    for index in range(7):
        rig.fails = lambda: False
        who = some if index % 5 else some[:2]
        notes = rig.decode(*who, ahead=None)
        late += "rows" in notes
        rig.extend(who, 1)
        fails = draw.random() < 0.6
        rig.fails = lambda fails=fails: fails  # type: ignore[misc]
        rig.executor.prepare_next(who, 1)
        if not fails:
            assert not rig.executor._table._unsent
    rig.fails = lambda: False
    assert late > 2
    rig.finish(alone, some)


def leaves(rig: Rig, some: list[Request]) -> list[Request]:
    rig.executor.forget(some[0])
    rig.pool.release(some[0])
    return some[1:]


def comes(rig: Rig, some: list[Request]) -> list[Request]:
    rig.prefill(rig.requests[3])
    return [*some, rig.requests[3]]


def pauses(rig: Rig, some: list[Request]) -> list[Request]:
    rig.decode(*some[1:], ahead=None)
    return some


def comes_again(rig: Rig, some: list[Request]) -> list[Request]:
    """With other pages."""
    request = some[1]
    rig.executor.forget(request)
    rig.pool.release(request)
    rig.pool.allocate("elsewhere", [1] * 40)
    rig.pool.allocate(request, request.ids)
    rig.prefill(request)
    return some


def other_order(rig: Rig, some: list[Request]) -> list[Request]:
    return some[::-1]


def mixed(rig: Rig, some: list[Request]) -> list[Request]:
    chunk = PrefillChunk(rig.requests[3], 0, rig.requests[3].prompt_len, True)
    rig.extend(some, 1)
    rig.launch([rig.executor.mixed([chunk], some)])
    return [*some, rig.requests[3]]


def mixed_with_a_chunk(rig: Rig, some: list[Request]) -> list[Request]:
    """A step of the same requests that was not prepared."""
    rig.extend(some, 1)
    rig.launch([rig.executor.mixed([PrefillChunk(rig.requests[3], 0, 2, False)], some)])
    return some


def mixed_without_one(rig: Rig, some: list[Request]) -> list[Request]:
    rig.extend(some, 1)
    rig.launch([rig.executor.mixed([PrefillChunk(rig.requests[3], 0, 2, False)], some[1:])])
    return some


def mixed_that_is_dropped(rig: Rig, some: list[Request]) -> list[Request]:
    rig.executor.mixed([PrefillChunk(rig.requests[3], 0, 2, False)], some)
    return some


def launches_are_dropped(rig: Rig, some: list[Request]) -> list[Request]:
    """As where the lane's queue is full."""
    rig.executor.decode(some, 1)
    return some


def nothing(rig: Rig, some: list[Request]) -> list[Request]:
    return some


CHANGES = [
    leaves, comes, pauses, comes_again, other_order, mixed, mixed_with_a_chunk,
    mixed_without_one, mixed_that_is_dropped, launches_are_dropped, nothing,
]  # fmt: skip


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_what_comes_between(change: Any, fails: bool, steps: int, alone: list[list[int]]):
    """Whatever was prepared and sent early: the tokens are those of each alone."""
    for before in (0, 2):
        rig, some = decoding(3)
        for _ in range(before):
            rig.decode(*some)
        rig.decode(*some, ahead=None)
        rig.extend(some, steps)
        rig.fails = lambda: fails
        rig.executor.prepare_next(some, steps)
        rig.fails = lambda: False
        some = change(rig, some)
        rig.decode(*some)
        rig.finish(alone, some)


def test_other_steps_are_prepared_anew(alone: list[list[int]]):
    rig, some = decoding(2)
    rig.decode(*some, ahead=3)
    prepared = rig.executor._prepared
    assert prepared is not None
    rig.extend(some, 3)
    asked = rig.executor.decode(some, 2)
    assert asked is not prepared.works
    assert [work.size for work, _ in asked] == [work.size for work, _ in prepared.works][:2]
    rig.launch(asked)
    rig.finish(alone, some)


@pytest.mark.parametrize("kind", [tuple, list])
def test_any_sequence_of_requests_gets_them(kind: Any):
    rig, some = decoding(2)
    rig.decode(*some, ahead=2)
    prepared = rig.executor._prepared
    assert prepared is not None
    assert rig.executor.decode(kind(some), 2) is prepared.works


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("seed", range(2))
def test_in_the_loop(seed: int, steps: int, alone: list[list[int]]):
    """Requests come and are cancelled at any time; some of what is sent early raises."""
    draw = Random(seed)
    rig = Rig()
    is_early = [False]
    device: Any = rig.executor.device

    def behind(lane: Lane, run: Callable[[], Any]) -> None:
        is_early[0] = draw.random() < 0.5
        try:
            run()
        finally:
            is_early[0] = False

    device.behind = behind
    rig.fails = lambda: is_early[0]
    for request in rig.requests:
        rig.pool.release(request)
    mux = Multiplexer(rig.executor, policy=StaticSplit(32, steps=steps))
    handles = []
    for turn in range(120):
        if draw.random() < 0.1 and len(handles) < 12:
            handles.append((mux.submit(PROMPTS[turn % 4], SamplingParams(NEW)), turn % 4))
        if handles and draw.random() < 0.03:
            draw.choice(handles)[0].cancel()
        mux.step()
    for _ in mux.run():
        pass
    assert handles
    for handle, index in handles:
        assert handle.error is None
        assert list(handle.tokens) == alone[index][: len(handle.tokens)]
        assert handle.cancelled or len(handle.tokens) == NEW
    mux.close()
    rig.pool.check()
    assert rig.pool.usage.held == 0
