"""Sums that copy engines bring: which rows are cut, and in which order what is launched."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from smkern.device import Budget
from smkern.models import TensorParallel, copied_sums, peer_sums
from smkern.models.copied_sums import LEAST_ROWS, CopiedSums, cut_of
from smkern.models.tensor_parallel import Collective
from smkern.runtime.model.sizes import MAX_MIXED_ROWS

HIDDEN, ROWS = 64, 4096
log: list[Any]


class Stream:
    """Writes down what it waits for."""

    cuda_stream = 9

    def __init__(self, *device: Any) -> None:
        self.name = "engine" if device else "main"

    def synchronize(self) -> None:
        pass

    def wait_event(self, event: Event) -> None:
        log.append((self.name, "waits", event.recorded))


class Event:
    recorded: Any = None

    def record(self, stream: Stream) -> None:
        self.recorded = stream.name, len([x for x in log if x[1] == "copies"])


class Behind(Collective):
    def all_reduce(self, x: Tensor) -> None:
        raise AssertionError("not asked")


class Copies:
    def __init__(self, *made: Any) -> None:
        self.calls = 0

    def begin(self) -> int:
        self.calls += 1
        return self.calls

    def send(self, call: int, stream: int, x: int, num_bytes: int) -> None:
        log.append(("engine", "copies", call, num_bytes // (2 * HIDDEN)))


class Kernels:
    def __init__(self, *made: Any, copied: bool = False) -> None:
        self.copied = copied

    def launch(self, mode: str, stream: int, rows: int, *given: Any, **named: Any) -> None:
        log.append(("main", mode, rows, named["call"] if self.copied else None, named["overlap"]))


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> CopiedSums:
    """Between GPUs that are not there, on 132 SMs."""
    global log
    log = []
    memory = SimpleNamespace(
        handle=b"", addresses=[1, 2], open=lambda *_: None, unmap=lambda: None, close=lambda: None
    )
    monkeypatch.setattr(peer_sums, "PeerMemory", lambda num_bytes: memory)
    monkeypatch.setattr(copied_sums, "Copies", Copies)
    for room in (peer_sums, copied_sums):
        monkeypatch.setattr(room, "OneShotKernels", Kernels)
    monkeypatch.setattr(peer_sums, "device_info", lambda index: SimpleNamespace(sm=90))
    monkeypatch.setattr(peer_sums, "budget_of_stream", lambda stream, index: Budget(132, "mask"))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    gpu, tp = torch.device("cuda", 0), TensorParallel(0, 2)
    return CopiedSums(
        tp, Behind(), HIDDEN, 96, torch.bfloat16, gpu, max_rows=4096, longer=True, logit_rows=0
    )


def rows(count: int) -> Tensor:
    return torch.zeros(count, HIDDEN, dtype=torch.bfloat16)


def test_a_piece_is_added_when_both_have_come_and_gone(sums: CopiedSums) -> None:
    x, residual, weight = rows(ROWS), rows(ROWS), torch.ones(HIDDEN, dtype=torch.bfloat16)
    first, second = sums.pieces(ROWS)
    sums.send(x[first])
    sums.send(x[second])
    sums.add_rms_norm(x[first], residual[first], weight, eps=1e-6)
    sums.add(x[second], residual[second])
    count = first.stop
    assert log == [
        ("engine", "waits", ("main", 0)),  # for what computed it
        ("engine", "copies", 1, count),
        ("engine", "waits", ("main", 1)),
        ("engine", "copies", 2, ROWS - count),
        ("main", "waits", ("engine", 1)),  # the sum writes where the copy reads
        ("main", "norm", count, 1, False),
        ("main", "waits", ("engine", 2)),
        ("main", "add", ROWS - count, 2, False),
    ]
    del log[:]
    sums.add(x, residual)  # nothing was sent: by the kernel that sends
    assert log == [("main", "add", ROWS, None, True)]


@pytest.mark.parametrize(
    ("count", "is_cut"), [(2048, False), (2049, True), (8192, True), (12_000, False)]
)
def test_which_rows_are_cut(sums: CopiedSums, count: int, is_cut: bool) -> None:
    pieces = sums.pieces(count)
    assert bool(pieces) is is_cut
    sums.send(rows(count))
    assert bool(log) is is_cut
    if is_cut:
        assert [piece.start for piece in pieces] == [0, pieces[0].stop]
        assert pieces[1].stop == count


def test_no_graph_of_the_runtime_is_cut() -> None:
    """Runs in front of a capture load its kernels: they must be those of the graph."""
    assert LEAST_ROWS > MAX_MIXED_ROWS


def test_captured_forwards_are_not_cut(sums: CopiedSums, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not sums.pieces(ROWS)
    sums.send(rows(ROWS))
    assert log == []


def test_what_a_layer_that_raised_has_sent_is_never_added(sums: CopiedSums) -> None:
    x, residual = rows(ROWS), rows(ROWS)
    first, _ = sums.pieces(ROWS)
    sums.send(x[first])
    sums.all_reduce(x[:8])  # of the next forward's embedding
    assert log[-1] == ("main", "sum", 8, None, True)
    sums.send(x[first])
    first, _ = sums.pieces(ROWS)
    sums.send(x[first])
    sums.add(x[first], residual[first])
    assert log[-1] == ("main", "add", first.stop, 3, False)


def waves(count: int, width: int, num_sms: int) -> int:
    return -(-(-(-count // 128) * -(-width // 256)) // num_sms)


@pytest.mark.parametrize(
    ("num_sms", "cut"), [(132, 2432), (116, 2048), (100, 2176), (84, 2048), (60, 2176)]
)
def test_pieces_take_no_wave_more(num_sms: int, cut: int) -> None:
    assert cut_of(4096, 5120, num_sms) == cut
    of_both = waves(cut, 5120, num_sms) + waves(4096 - cut, 5120, num_sms)
    assert of_both == waves(4096, 5120, num_sms)


@pytest.mark.parametrize("num_sms", range(16, 133, 4))
def test_no_cut_takes_fewer_waves(num_sms: int) -> None:
    for count in (300, 640, 2049, 2200, 8192):
        cut = cut_of(count, 4096, num_sms)
        every = [
            waves(rows, 4096, num_sms) + waves(count - rows, 4096, num_sms)
            for rows in range(128, count, 128)
            if 3 * count <= 8 * rows <= 5 * count
        ]
        assert cut % 128 == 0
        assert max(cut, count - cut) <= 5 * -(-count // 128) * 16
        assert waves(cut, 4096, num_sms) + waves(count - cut, 4096, num_sms) <= min(every)
