"""How a plan is launched: what its kernel does not wait for, it must not overlap."""

from __future__ import annotations

from typing import Any

import pytest

from smkern.device import Budget
from smkern.kernels.attention import cuda
from smkern.tuning.attention.shapes import AttentionShape


@pytest.mark.parametrize(
    ("capability", "confined", "overlaps"),
    [(90, "mask", True), (90, "grid", False), (80, "mask", False)],
)
def test_a_plan_overlaps_only_where_its_kernel_waits(
    capability: int, confined: Any, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(cuda, "compile_plan", lambda capability: b"")
    monkeypatch.setattr(cuda, "load_function", lambda *given: None)
    monkeypatch.setattr(cuda, "launcher", lambda *given, overlap: asked.append(overlap))
    kernels = cuda.CudaAttention(capability, lambda variant: None)
    kernels.plan(AttentionShape(1, 4, 2, 64, 16, 1, 64, 1, 64), Budget(16, confined, True))
    assert asked == [overlaps]
