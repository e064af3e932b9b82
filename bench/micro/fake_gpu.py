"""A runtime on a device that does nothing: what is left is the host's own work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from smkern.kv import KvSizes, PagePool
from smkern.models import SamplingParams, preset
from smkern.policies import StaticSplit
from smkern.runtime.device import Device, Event, Work
from smkern.runtime.executor import Draw, PrefillChunk, PrefillRun
from smkern.runtime.host_device import host_us
from smkern.runtime.model.executor import ModelExecutor
from smkern.runtime.model.row_updates import Records
from smkern.runtime.multiplexer import Multiplexer
from smkern.runtime.place import LANES, Lane, Place

RUNNING, WAITING = 128, 20
CONTEXT, PROMPT, MAX_CONTEXT, PAGE = 256, 2048, 4096, 16
RUNG = 40
NOTHING = "launches do nothing here"


class FakeEvent:
    """An event that is over once the device says so."""

    __slots__ = ("is_over", "launched_us")

    def __init__(self) -> None:
        self.is_over = False
        self.launched_us = host_us()

    def query(self) -> bool:
        return self.is_over

    def times_us(self) -> tuple[float, float] | None:
        return (self.launched_us, self.launched_us + 1) if self.is_over else None


class FakeDevice(Device):
    """Launches run on the host at once, and are over when `end` says so."""

    num_sms = 132
    rungs: tuple[int, ...] = (16, RUNG, 64)

    def __init__(self) -> None:
        self._under_way: dict[Lane, list[FakeEvent]] = {lane: [] for lane in LANES}

    def now_us(self) -> float:
        return host_us()

    def launch(self, lane: Lane, place: Place, work: Work) -> FakeEvent:
        work.run(place)
        event = FakeEvent()
        self._under_way[lane].append(event)
        return event

    def behind(self, lane: Lane, run: Callable[[], Any]) -> None:
        run()

    def end(self, lane: Lane) -> None:
        """End the lane's oldest launch."""
        if self._under_way[lane]:
            self._under_way[lane].pop(0).is_over = True

    def end_all(self) -> None:
        """End all launches."""
        for lane in LANES:
            while self._under_way[lane]:
                self.end(lane)

    def wait(self, events: Sequence[Event], until_us: float | None = None) -> None:
        """Nothing ends by itself."""


class _NoGraphs:
    """Launches nothing."""

    def ready(self, batch: int, longest: int) -> None:
        """None are needed."""

    def launch(self, place: Place, batch: int, longest: int) -> None:
        pass

    def close(self) -> None:
        pass


class _NoSender:
    """Takes changes of rows and makes none."""

    nbytes = 0

    def send(self, records: Records) -> None:
        pass


class _NoMemory(PagePool):
    """Pages with no memory behind them."""

    device = torch.device("cpu")

    def __init__(self, num_layers: int) -> None:
        super().__init__((RUNNING * MAX_CONTEXT + 4 * PROMPT) // PAGE, PAGE)
        self.sizes = KvSizes(num_layers, 1, 128, PAGE)

    def layer(self, index: int) -> None:
        """No memory."""


class _NoModel:
    """Parts that compute nothing."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.device = torch.device("cpu")
        self.max_position = config.max_position
        self.batch_invariant = False

    def embed(self, step: Any) -> Tensor:
        raise AssertionError(NOTHING)

    def layer(self, index: int, step: Any) -> Tensor:
        raise AssertionError(NOTHING)

    def head(self, step: Any) -> Tensor:
        raise AssertionError(NOTHING)


class FakeExecutor(ModelExecutor):
    """All of a `ModelExecutor` but its launches: its seats, rows, pages and draws."""

    def __init__(self) -> None:
        config = preset("qwen3-8b").replace(
            hidden_size=64, num_q_heads=1, num_kv_heads=1, intermediate_size=32, vocab_size=128
        )
        self.fake = FakeDevice()
        pool: Any = _NoMemory(config.num_layers)
        super().__init__(
            _NoModel(config),
            pool,
            device=self.fake,
            max_running=RUNNING + 16,
            max_tokens=PROMPT,
            max_context=MAX_CONTEXT,
        )
        self.graphs: Any = _NoGraphs()
        self._table._sender = _NoSender()

    def begin(self, chunks: Sequence[PrefillChunk], slot: int) -> PrefillRun:
        return PrefillRun(tuple(chunks), slot)

    def prefill(self, run: PrefillRun, first: int, count: int) -> Work:
        if first + count == self.config.num_layers:
            drawing = tuple(chunk.request for chunk in run.chunks if chunk.draws)
            run.draw = Draw(drawing, lambda: [7] * len(drawing))
        return Work("prefill", lambda place: None)


class BusyRuntime:
    """128 requests that decode in a `Multiplexer` on a split, beside prompts that wait.

    Args:
        waiting: Prompts in the queue.
        steps: Decode steps at a time.
    """

    def __init__(self, waiting: int = WAITING, steps: int = 1) -> None:
        self.executor = FakeExecutor()
        self.device = self.executor.fake
        policy = StaticSplit(RUNG, layers=1, steps=steps)
        self.mux = Multiplexer(self.executor, policy=policy)
        self.endless = SamplingParams(max_new_tokens=MAX_CONTEXT - CONTEXT - 1, ignore_eos=True)
        for index in range(RUNNING):
            # lengths differ, so that in each step 8 requests get a page
            self.mux.submit([1 + index % 100] * (CONTEXT - index % PAGE), self.endless)
        while len(self.mux._queues.running) < RUNNING:
            self.device.end_all()
            self.mux.step()
        once = SamplingParams(max_new_tokens=1, ignore_eos=True)
        for index in range(waiting):
            self.mux.submit([1 + index % 100] * PROMPT, once)
        for _ in range(20):
            self.end_a_step()
            self.mux.step()

    def end_a_step(self) -> None:
        """A decode step ends; what was recorded until then is in order."""
        self.mux.timeline.settle()
        self.device.end("decode")
