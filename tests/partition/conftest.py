"""A driver and torch streams that need no GPU, and a place where ladders can be made of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import pytest
import torch

from smkern.device import Budget, DeviceInfo
from smkern.errors import DeviceError
from smkern.partition.driver import IGNORE_COSCHEDULING, GreenContext
from smkern.partition.streams import StreamBudgets

INFO = DeviceInfo("fake", 132, (9, 0), 2, 2, 1, 1980, 1)
EIGHTS = 15
"""Groups of 8 that an H200's driver gives; 12 SMs are left over."""


class FakeDriver:
    """Groups are tuples of SM ids, in an order of the test's choice; every object is accounted.

    Args:
        pairs: which 2 SMs each group of the driver has, in its order.
        small_flag: what a split into groups below 8 must ask for; before sm_90 nothing.
    """

    def __init__(
        self,
        pairs: Sequence[int] = range(66),
        *,
        small_flag: int = IGNORE_COSCHEDULING,
    ) -> None:
        self.small_flag = small_flag
        self.sms = [sm for pair in pairs for sm in (2 * pair, 2 * pair + 1)]
        self.failing: int | None = None
        """Which call of `create` fails, counted from 1."""
        self.lost = 0
        """SMs that every granted context lacks."""
        self.created = 0
        self.plain_streams = 0
        self.contexts: dict[int, tuple[int, ...]] = {}
        self.streams: dict[int, int] = {}
        self.strays: tuple[int, ...] = ()
        """SMs that the probe reports on top of a stream's."""

    def split(self, min_sms: int, flags: int) -> tuple[list[Any], Any]:
        assert flags == (self.small_flag if min_sms < 8 else 0)
        count = EIGHTS if min_sms == 8 else len(self.sms) // min_sms
        whole = count * min_sms
        groups = [tuple(self.sms[i : i + min_sms]) for i in range(0, whole, min_sms)]
        return groups, tuple(self.sms[whole:]) or None

    def create(self, groups: Sequence[Any]) -> GreenContext:
        self.created += 1
        if self.created == self.failing:
            raise DeviceError("cuGreenCtxCreate failed with CUDA_ERROR_OUT_OF_MEMORY")
        handle, stream = self.created, 1000 + self.created
        self.contexts[handle] = tuple(sm for group in groups for sm in group)
        self.streams[stream] = handle
        return GreenContext(handle, stream, len(self.contexts[handle]) - self.lost)

    def create_stream(self) -> int:
        self.plain_streams += 1
        return 5000 + self.plain_streams

    def detach(self, context: GreenContext) -> None:
        del self.contexts[context.handle]

    def destroy_stream(self, context: GreenContext) -> None:
        assert context.handle in self.contexts, "a stream is destroyed before its context"
        del self.streams[context.stream]

    def smids(self, stream: int, num_ctas: int) -> list[int]:
        sms = (*self.contexts[self.streams[stream]], *self.strays)
        return [sms[i % len(sms)] for i in range(num_ctas)]

    def clusters(self, stream: int) -> bool | None:
        assert stream in self.streams
        return None


@dataclass
class FakeStream:
    """A torch stream: the handle, and how often it was waited for."""

    cuda_stream: int
    device: Any = None
    waits: int = 0
    behind: list[Any] = field(default_factory=list)
    """Streams whose work comes first."""

    def synchronize(self) -> None:
        self.waits += 1

    def wait_stream(self, other: Any) -> None:
        self.behind.append(other)


class FakeGraph:
    """A torch CUDA graph that notes the stream of each replay."""

    def __init__(self) -> None:
        self.replayed_on: list[Any] = []
        self.live = True

    def replay(self) -> None:
        assert self.live
        self.replayed_on.append(torch.cuda.current_stream())

    def reset(self) -> None:
        self.live = False


@dataclass
class Machine:
    """What the fakes stand on."""

    driver: FakeDriver
    budgets: StreamBudgets
    patch: pytest.MonkeyPatch
    current: Any = field(default_factory=lambda: FakeStream(0))
    segments: list[dict[str, int]] = field(default_factory=list)
    device: int = 0
    """Torch's current GPU."""

    def enter(self, stream: Any) -> None:
        """As `torch.cuda.set_stream`, which makes the stream's GPU the current one."""
        self.current = stream
        if stream.device is not None:
            self.device = stream.device.index

    def set_device(self, index: int) -> None:
        self.device = index


@contextmanager
def fake_machine(driver: FakeDriver | None = None, info: DeviceInfo = INFO) -> Iterator[Machine]:
    """Have ladders made of a fake driver, on a device that this machine need not have."""
    with pytest.MonkeyPatch.context() as patch:
        budgets = StreamBudgets(Budget(info.num_sms, "mask"), lambda stream: None)
        machine = Machine(driver or FakeDriver(), budgets, patch)
        rooms = {n: import_module(f"smkern.partition.{n}") for n in ("ladder", "green", "grid")}
        for name in ("streams", "driver"):
            rooms[name] = import_module(f"smkern.partition.{name}")
        for room in ("ladder", "driver"):
            patch.setattr(rooms[room], "cuda_driver", lambda device: machine.driver)
        for room in ("ladder", "streams"):
            patch.setattr(rooms[room], "device_info", lambda device=None: info)
        for room in ("green", "grid", "streams"):
            patch.setattr(rooms[room], "stream_budgets", lambda device: budgets)
        patch.setattr("smkern.device._has_driver", lambda: True)
        fakes = {
            "ExternalStream": FakeStream,
            "Stream": _pooled,
            "CUDAGraph": FakeGraph,
            "graph": _captured,
            "is_available": lambda: True,
            "current_device": lambda: machine.device,
            "set_device": machine.set_device,
            "current_stream": lambda device=None: machine.current,
            "set_stream": machine.enter,
            "synchronize": lambda device=None: None,
            "memory_snapshot": lambda: machine.segments,
        }
        for name, fake in fakes.items():
            patch.setattr(torch.cuda, name, fake)
        yield machine


def _pooled(*args: Any, **kwargs: Any) -> FakeStream:
    """torch hands the same few streams out again and again."""
    return FakeStream(32)


@contextmanager
def _captured(graph: Any, **options: Any) -> Iterator[None]:
    yield


@pytest.fixture
def machine() -> Iterator[Machine]:
    with fake_machine() as made:
        yield made
