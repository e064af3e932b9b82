"""The sums of decode steps by one kernel: what goes to it, and what to the sums behind it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from smkern.device import Budget
from smkern.errors import ArgumentError
from smkern.models import TensorParallel, one_shot
from smkern.models.one_shot import OneShot
from smkern.models.tensor_parallel import Collective

HIDDEN = 64


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


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> tuple[OneShot, Behind, Kernels]:
    memory = SimpleNamespace(handle=b"", addresses=[1 << 20, 2 << 20], open=lambda *given: None)
    monkeypatch.setattr(one_shot, "PeerMemory", lambda num_bytes: memory)
    monkeypatch.setattr(one_shot, "OneShotKernels", Kernels)
    monkeypatch.setattr(one_shot, "device_info", lambda index: SimpleNamespace(capability=(9, 0)))
    monkeypatch.setattr(one_shot, "budget_of_stream", lambda stream, index: Budget(24, "mask"))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None)
    )
    tp, behind = TensorParallel(0, 2), Behind()
    tp.decode = behind
    found = OneShot(tp, HIDDEN, torch.bfloat16, torch.device("cuda", 0), max_rows=8)
    return found, behind, found._kernels  # type: ignore[return-value]


def rows(count: int, width: int = HIDDEN, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(count, width, dtype=dtype)


def test_each_sum_is_one_launch(made: tuple[OneShot, Behind, Kernels]) -> None:
    sums, behind, kernels = made
    x, residual, weight = rows(3), rows(3), torch.ones(HIDDEN, dtype=torch.bfloat16)
    sums.all_reduce(x)
    sums.add(x, residual)
    sums.add_rms_norm(x, residual, weight, eps=0.5, num_sms=16)
    at = {"residual": residual.data_ptr()}
    normed = {**at, "weight": weight.data_ptr(), "out": x.data_ptr(), "eps": 0.5}
    assert kernels.asked == [
        (("sum", 7, 3, 24, x.data_ptr()), {"overlap": True}),
        (("add", 7, 3, 24, x.data_ptr()), {"overlap": True, **at}),
        # fewer than the partition has: the grid keeps them, so nothing may overlap
        (("norm", 7, 3, 16, x.data_ptr()), {"overlap": False, **normed}),
    ]
    assert behind.asked == []


@pytest.mark.parametrize(
    "x", [rows(9), rows(0), rows(3, 32), rows(3, dtype=torch.float16), rows(3, 128)[:, ::2]]
)
def test_what_it_does_not_serve_is_summed_behind_it(
    made: tuple[OneShot, Behind, Kernels], x: Tensor
) -> None:
    sums, behind, kernels = made
    residual = torch.zeros_like(x)
    sums.all_reduce(x)
    sums.add(x, residual)
    assert behind.asked == [tuple(x.shape)] * 2
    assert kernels.asked == []


def test_sizes_that_cannot_be(made: tuple[OneShot, Behind, Kernels]) -> None:
    device = torch.device("cuda", 0)
    for size, hidden in ((9, 64), (2, 60), (2, 16_392)):
        with pytest.raises(ArgumentError, match=f"{size} ranks with rows of {hidden}"):
            OneShot(TensorParallel(0, size), hidden, torch.bfloat16, device)
