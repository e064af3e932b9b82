"""The sums of a lane by one kernel: what goes to it, and what to the sums that it stands for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from smkern.device import Budget
from smkern.errors import ArgumentError, DeviceError
from smkern.models import TensorParallel, copied_sums, peer_sums
from smkern.models.copied_sums import CopiedSums
from smkern.models.fused_sums import fuse_sums
from smkern.models.peer_sums import PeerSums
from smkern.models.tensor_parallel import Collective

HIDDEN, VOCAB = 64, 96
GPU = torch.device("cuda", 0)


class Behind(Collective):
    """Sums that write down what they are asked."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def all_reduce(self, x: Tensor) -> None:
        self.asked.append(tuple(x.shape))


class Kernels:
    """Launches that are written down."""

    def __init__(self, *made: Any) -> None:
        self.made, self.asked = made, []  # type: ignore[var-annotated]

    def launch(self, *given: Any, **named: Any) -> None:
        self.asked.append((given, named))


class Memory:
    """Memory of ranks that are not there; how it ended."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes, self.handle, self.addresses = num_bytes, b"", [1 << 20, 2 << 20]
        self.log: list[str] = []

    def open(self, rank: int, handles: Any) -> None:
        pass

    def unmap(self) -> None:
        self.log.append("unmapped")

    def close(self) -> None:
        self.log.append("freed")


@pytest.fixture
def memories(monkeypatch: pytest.MonkeyPatch) -> list[Memory]:
    """A machine with GPUs that are not there; the memory that was taken of them."""
    found: list[Memory] = []

    def taken(num_bytes: int) -> Memory:
        found.append(Memory(num_bytes))
        return found[-1]

    monkeypatch.setattr(peer_sums, "PeerMemory", taken)
    monkeypatch.setattr(peer_sums, "OneShotKernels", Kernels)
    monkeypatch.setattr(peer_sums, "GatherKernel", Kernels)
    monkeypatch.setattr(peer_sums, "device_info", lambda index: SimpleNamespace(sm=90))
    monkeypatch.setattr(peer_sums, "budget_of_stream", lambda stream, index: Budget(24, "mask"))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None)
    )
    return found


def made(**options: Any) -> tuple[PeerSums, Behind]:
    behind = Behind()
    sums = PeerSums(
        TensorParallel(0, 2), behind, HIDDEN, VOCAB, torch.bfloat16, GPU, max_rows=8, **options
    )
    return sums, behind


def asked(kernels: Any) -> list[Any]:
    return kernels.asked  # type: ignore[no-any-return]


def rows(count: int, width: int = HIDDEN, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(count, width, dtype=dtype)


def test_each_sum_is_one_launch(memories: list[Memory]) -> None:
    sums, behind = made()
    x, residual, weight = rows(3), rows(3), torch.ones(HIDDEN, dtype=torch.bfloat16)
    sums.all_reduce(x)
    sums.add(x, residual)
    sums.add_rms_norm(x, residual, weight, eps=0.5, num_sms=16)
    none = {"residual": 0, "weight": 0, "out": 0, "eps": 0.0, "call": 0}
    at = {**none, "residual": residual.data_ptr()}
    normed = {**at, "weight": weight.data_ptr(), "out": x.data_ptr(), "eps": 0.5}
    assert asked(sums._sums) == [
        (("sum", 7, 3, 24, x.data_ptr()), {"overlap": True, **none}),
        (("add", 7, 3, 24, x.data_ptr()), {"overlap": True, **at}),
        # fewer than the partition has: the grid keeps them, so nothing may overlap
        (("norm", 7, 3, 16, x.data_ptr()), {"overlap": False, **normed}),
    ]
    assert behind.asked == []


@pytest.mark.parametrize(
    "x", [rows(9), rows(0), rows(3, 32), rows(3, dtype=torch.float16), rows(3, 128)[:, ::2]]
)
def test_what_it_does_not_serve_is_summed_instead(memories: list[Memory], x: Tensor) -> None:
    sums, behind = made()
    residual = torch.zeros_like(x)
    sums.all_reduce(x)
    sums.add(x, residual)
    assert behind.asked == [tuple(x.shape)] * 2
    assert asked(sums._sums) == []


def test_longer_ones_take_several_launches(memories: list[Memory]) -> None:
    sums, behind = made(longer=True)
    x, residual = rows(19), rows(19)
    sums.add(x, residual)
    found = [(given[2], given[4], named["residual"]) for given, named in asked(sums._sums)]
    apart = 8 * 2 * HIDDEN
    assert found == [
        (count, x.data_ptr() + i * apart, residual.data_ptr() + i * apart)
        for i, count in enumerate((8, 8, 3))
    ]
    assert behind.asked == []


def test_logits_are_gathered(memories: list[Memory]) -> None:
    sums, behind = made(logit_rows=2)
    x = torch.ones(5, VOCAB, dtype=torch.bfloat16)
    sums.gather(x, range(48))
    assert [(given[1], given[3] - x.data_ptr()) for given, _ in asked(sums._gather)] == [
        (2, 0), (2, 4 * VOCAB), (1, 8 * VOCAB)
    ]  # fmt: skip
    other = torch.ones(5, 32, dtype=torch.bfloat16)
    sums.gather(other, range(16))  # of another width: summed with zeros
    assert behind.asked == [(5, 32)]
    assert other.sum(0).tolist() == [5.0] * 16 + [0.0] * 16
    # of a rank's 30 bytes no whole vectors
    uneven = PeerSums(TensorParallel(0, 2), behind, HIDDEN, 30, torch.bfloat16, GPU)
    assert uneven._gather is None


def test_memory_goes_back_where_a_rank_fails(memories, monkeypatch) -> None:
    def none(*given: Any) -> None:
        raise DeviceError("planted: no peer access")

    made()[0].close()
    assert [memory.log for memory in memories] == [["unmapped", "freed"]] * 2
    memories.clear()
    monkeypatch.setattr(peer_sums, "GatherKernel", none)
    with pytest.raises(DeviceError, match="planted"):
        made()
    assert [memory.log for memory in memories] == [["unmapped", "freed"]] * 2


def test_both_lanes_or_none(memories: list[Memory], monkeypatch: pytest.MonkeyPatch) -> None:
    tp, behind = TensorParallel(0, 2), Behind()
    tp.decode = tp.prefill = behind
    config = SimpleNamespace(hidden_size=HIDDEN, vocab_size=VOCAB, dtype=torch.bfloat16)
    model: Any = SimpleNamespace(tp=tp, config=config, device=GPU, batch_invariant=False)
    count = 0

    def third(*given: Any) -> Kernels:
        nonlocal count
        count += 1
        if count == 3:
            raise DeviceError("planted")
        return Kernels(*given)

    monkeypatch.setattr(peer_sums, "OneShotKernels", third)
    monkeypatch.setattr(peer_sums, "GatherKernel", third)
    monkeypatch.setattr(copied_sums, "OneShotKernels", lambda *given, copied: Kernels(*given))
    for name in ("Stream", "Event"):
        monkeypatch.setattr(torch.cuda, name, lambda *device: None)
    assert not fuse_sums(model)
    assert tp.decode is tp.prefill is behind
    assert [memory.log[-1] for memory in memories] == ["freed"] * 3
    assert fuse_sums(model)
    assert type(tp.decode) is PeerSums
    assert isinstance(tp.prefill, CopiedSums)
    tp.prefill.all_reduce(rows(5000))  # between two GPUs all rows
    assert len(asked(tp.prefill._sums)) == 2
    model.tp = None
    with pytest.raises(ArgumentError, match="one GPU has whole"):
        fuse_sums(model)


def test_sizes_that_cannot_be(memories: list[Memory]) -> None:
    for size, hidden in ((9, 64), (2, 60), (2, 16_392)):
        with pytest.raises(ArgumentError, match=f"{size} ranks with rows of {hidden}"):
            PeerSums(TensorParallel(0, size), Behind(), hidden, VOCAB, torch.bfloat16, GPU)
