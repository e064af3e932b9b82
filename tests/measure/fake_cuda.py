"""A stand-in for the parts of torch.cuda that `smkern.measure.timing` uses, on a virtual clock.

`FakeCuda.work_us(us)` is what a case's call does: it costs time when it runs eagerly, and is
recorded when a graph is being captured.
"""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch


class FakeStream:
    def wait_event(self, event) -> None:
        assert event.at_us is not None, "waits on an event that was never recorded"

    def synchronize(self) -> None:
        pass


class FakeCuda:
    def __init__(self) -> None:
        self.now_us = 0.0
        self.current = None
        self.capturing = None
        self.log: list[str] = []

    def work_us(self, us: float) -> None:
        if self.capturing is not None:
            self.capturing.us += us
        else:
            self.now_us += us

    def new_stream(self) -> FakeStream:
        return FakeStream()

    def install(self, monkeypatch) -> FakeCuda:
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: _Event(self))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: _Graph(self))
        for name in ("stream", "synchronize", "_sleep"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name), raising=False)
        monkeypatch.setattr("smkern.measure.timing._clear_last_error", lambda: None)
        return self

    def synchronize(self) -> None:
        assert self.capturing is None, "synchronised inside a capture"

    def _sleep(self, cycles: int) -> None:
        self.now_us += cycles / 1980

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class _Event:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.at_us = cuda, None

    def record(self, stream) -> None:
        self.at_us = self.cuda.now_us

    def synchronize(self) -> None:
        assert self.at_us is not None, "an event that was never recorded is not waited for"

    def elapsed_time(self, other) -> float:
        return max(other.at_us - self.at_us, 0.5) / 1e3


class _Graph:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda, self.us, self.alive = cuda, 0.0, False

    def capture_begin(self, capture_error_mode: str) -> None:
        assert self.cuda.capturing is None
        assert self.cuda.current is not None
        self.cuda.capturing = self

    def capture_end(self) -> None:
        self.cuda.capturing, self.alive = None, True

    def replay(self) -> None:
        assert self.alive
        self.cuda.now_us += self.us
        self.cuda.log.append("replay")

    def reset(self) -> None:
        self.alive = False
        self.cuda.log.append("reset")


@pytest.fixture
def cuda(monkeypatch) -> FakeCuda:
    return FakeCuda().install(monkeypatch)
