"""A model's launches on CPU tensors whose parts on the device run late, as a GPU's do.

The simulated device and the host's run work while it is launched, so that the host is never ahead
of what its launches read and write. Here the host's part of a launch runs at once, and what a GPU
would do waits in the queue of its lane; the two lanes go on at random.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from smkern.models.graph import DecodeInputs
from smkern.models.layered import LayeredModel, forward
from smkern.models.step import Step
from smkern.runtime import ModelExecutor
from smkern.runtime.device import Device, Event, Work
from smkern.runtime.host_device import host_us
from smkern.runtime.model.reads import Read, Source, TokenBuffer
from smkern.runtime.model.row_updates import Records
from smkern.runtime.place import LANES, Lane, Place
from smkern.runtime.request import Request


class LateDevice(Device):
    """Two queues of what a GPU would do; whoever asks about an event lets some of it happen.

    Args:
        draw: How far each lane gets.
        fails: How often a launch raises, at a place where nothing of its kind was launched.
        fails_behind: How often what is sent behind a launch raises.
    """

    num_sms = 132
    rungs: tuple[int, ...] = (32, 64)

    def __init__(self, draw: Random, *, fails: float = 0.0, fails_behind: float = 0.0) -> None:
        self._draw = draw
        self._fails = {"launch": fails, "behind": fails_behind}
        self._queues: dict[Lane, deque[Callable[[], Any]]] = {lane: deque() for lane in LANES}
        self._now: tuple[Lane, str] | None = None
        self._decodes = 0.5
        self.put = dict.fromkeys(LANES, 0)
        self.done = dict.fromkeys(LANES, 0)

    def now_us(self) -> float:
        return host_us()

    def launch(self, lane: Lane, place: Place, work: Work) -> LateEvent:
        self._run(lane, "launch", lambda: work.run(place))
        return LateEvent(self, lane, self.put[lane], host_us())

    def behind(self, lane: Lane, run: Callable[[], Any]) -> None:
        self._run(lane, "behind", run)

    def late(self, run: Callable[[], Any]) -> None:
        """Something that a GPU does, behind what the lane of this launch has."""
        assert self._now is not None, "outside a launch"
        self._queues[self._now[0]].append(run)
        self.put[self._now[0]] += 1

    def may_fail(self) -> None:
        """The host's part of a launch raises here, sometimes."""
        assert self._now is not None, "outside a launch"
        if self._draw.random() < self._fails[self._now[1]]:
            raise RuntimeError("planted")

    def some(self) -> None:
        """Let some of what waits happen; one lane may be far behind the other for a while."""
        if self._draw.random() < 0.02:
            self._decodes = self._draw.choice([0.05, 0.5, 0.95])
        for _ in range(self._draw.choice([0, 0, 1, 1, 3])):
            self._one()

    def wait(self, events: Sequence[Event], until_us: float | None = None) -> None:
        while events and not any(event.query() for event in events):
            self._one()

    def synchronize(self) -> None:
        while any(self._queues.values()):
            self._one()

    def _run(self, lane: Lane, kind: str, run: Callable[[], Any]) -> None:
        self._now = lane, kind
        try:
            run()
        finally:
            self._now = None

    def _one(self) -> None:
        lane: Lane = "decode" if self._draw.random() < self._decodes else "prefill"
        if not self._queues[lane]:
            lane = "prefill" if lane == "decode" else "decode"
        if self._queues[lane]:
            self._queues[lane].popleft()()
            self.done[lane] += 1


@dataclass(slots=True, eq=False)
class LateEvent:
    """Over when its lane has done what was put there until then."""

    device: LateDevice
    lane: Lane
    at: int
    launched_us: float
    is_over: bool = False

    def query(self) -> bool:
        if not self.is_over:
            self.device.some()
            self.is_over = self.device.done[self.lane] >= self.at
        return self.is_over

    def times_us(self) -> tuple[float, float] | None:
        return (self.launched_us, self.launched_us + 1) if self.is_over else None


class LateSender:
    """Changes rows, late."""

    nbytes = 0

    def __init__(self, device: LateDevice, sender: Any) -> None:
        self._device = device
        self._sender = sender

    def send(self, records: Records) -> None:
        self._device.may_fail()
        self._device.late(lambda: self._sender.send(records))


class _Staging:
    """Writes numbers, late."""

    def __init__(self, device: LateDevice, staging: Any) -> None:
        self._device = device
        self._staging = staging

    def send(self, writes: Sequence[tuple[Any, Sequence[int]]]) -> None:
        kept = [(there, list(numbers)) for there, numbers in writes]
        self._device.late(lambda: self._staging.send(kept))


@dataclass(frozen=True, slots=True, eq=False)
class _Logits:
    """Those that a step will have."""

    model: LayeredModel
    step: Step


class _Model:
    """Runs layers, late."""

    def __init__(self, device: LateDevice, model: LayeredModel) -> None:
        self._device = device
        self._model = model

    def embed(self, step: Step) -> None:
        self._device.may_fail()
        self._device.late(lambda: self._model.embed(step))

    def layer(self, index: int, step: Step) -> None:
        self._device.late(lambda: self._model.layer(index, step))

    def head(self, step: Step) -> _Logits:
        return _Logits(self._model, step)


def make_late(executor: ModelExecutor, device: LateDevice, patch: pytest.MonkeyPatch) -> None:
    """Let all that an executor launches run late, and decode steps look at what they write."""
    for table in (executor._table, executor._prefill_table):
        table._sender = LateSender(device, table._sender)
        table.take()  # an update with the old sender
    prefill, graphs = executor._prefill, executor.graphs
    prefill._model = _Model(device, prefill._model)  # type: ignore[assignment]
    prefill._staging = _Staging(device, prefill._staging)  # type: ignore[assignment]
    draw_now, launch_now, mixed = DecodeInputs.draw, graphs.launch, executor._mixed

    def draw(inputs: DecodeInputs, logits: Any, steps: Any, **options: Any) -> None:
        if not isinstance(logits, _Logits):
            draw_now(inputs, logits, steps, **options)
            return
        device.late(lambda: draw_now(inputs, logits.model.head(logits.step), steps, **options))

    def copy(read: Read, source: Source) -> None:
        read._count, read._room = source.batch, executor._reads.room()
        room: TokenBuffer = read._room
        device.late(lambda: room.memory[: source.batch].copy_(source.tokens))

    def launch(place: Place, batch: int, longest: int) -> None:
        seated = executor._decode_slots._now.rows  # type: ignore[union-attr]
        assert len(seated) == batch

        def run() -> None:
            check_rows(executor, seated, longest)
            launch_now(place, batch, longest)

        device.may_fail()
        device.late(run)
        device.may_fail()

    def run_mixed(
        place: Place, chunks: Any, lengths: Any, update: Any, read: Read, behind: Any = None
    ) -> None:
        seated = executor._decode_slots._now.rows  # type: ignore[union-attr]
        assert len(seated) == len(lengths)
        state = executor._state
        rows = state.inputs(state.first_slot - len(chunks), len(chunks) + len(seated))

        def run() -> None:
            check_rows(executor, seated, max(lengths, default=0))
            step = mixed._inputs.write(chunks, lengths).planned_in(mixed._prompts.plans)
            rows.draw(forward(mixed._model, step), step.kv_lens)

        update.send()
        device.may_fail()
        device.late(run)
        copy(read, Source.of(rows.token_ids))

    patch.setattr(DecodeInputs, "draw", draw)
    patch.setattr(Read, "copy", copy)
    patch.setattr(graphs, "launch", launch)
    patch.setattr(mixed, "run", run_mixed)


def check_rows(executor: ModelExecutor, seated: Sequence[Request], longest: int) -> None:
    """What a decode step is about to write is its requests' own, or was theirs and is kept."""
    pool, state = executor.pool, executor._state
    kept = {page for _, pages in pool.releases for page in pages}
    owners: dict[int, list[Any]] = {}
    for request in pool.requests:
        for page in pool.pages(request):
            owners.setdefault(page, []).append(request)
    rows = state.inputs(state.first_slot, state.max_running)
    for row, length in enumerate(rows.kv_lens.tolist()):
        if rows.finished[row]:
            continue
        assert row < len(seated), f"row {row} goes on, and is nobody's"
        assert length <= longest, (length, longest)
        page = int(rows.page_table[row, (length - 1) // pool.page_size])
        assert page in kept or owners.get(page) == [seated[row]], (seated[row], length, page)
