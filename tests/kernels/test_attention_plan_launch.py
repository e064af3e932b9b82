"""How plans and prompts are launched: overlap, and what fits shared memory."""

from __future__ import annotations

import pytest

from smkern.device import Budget
from smkern.errors import ArgumentError
from smkern.kernels.attention import cuda
from smkern.tuning.attention.shapes import AttentionShape
from smkern.tuning.constraints import shared_limit


@pytest.mark.parametrize(
    ("capability", "confined", "overlaps"),
    [(90, "mask", True), (90, "grid", False), (80, "mask", False)],
)
def test_a_plan_overlaps_only_where_its_kernel_waits(
    capability, confined, overlaps, monkeypatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(cuda, "compile_plan", lambda capability: b"")
    monkeypatch.setattr(cuda, "load_function", lambda *given: None)
    monkeypatch.setattr(cuda, "launcher", lambda *given, overlap: asked.append(overlap))
    kernels = cuda.CudaAttention(capability, lambda variant: None)
    kernels.plan(AttentionShape(1, 4, 2, 64, 16, 1, 64, 1, 64), Budget(16, confined, True))
    assert asked == [overlaps]


@pytest.mark.parametrize(("capability", "most"), [(80, 16_384), (86, 14_728), (90, 16_384)])
def test_a_plan_has_the_requests_that_the_device_holds(capability, most, monkeypatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(cuda, "compile_plan", lambda capability: b"")
    monkeypatch.setattr(cuda, "load_function", lambda cubin, name, shared: asked.append(shared))
    monkeypatch.setattr(cuda, "launcher", lambda *given, overlap: None)
    kernels = cuda.CudaAttention(capability, lambda variant: None)
    kernels.plan(AttentionShape(most, 4, 2, 64, 16, 1, 64, most, 64 * most), Budget(16, "mask"))
    assert asked[0] + cuda.PLAN_STATIC_BYTES <= shared_limit(divmod(capability, 10))
    with pytest.raises(
        ArgumentError, match=f"{most + 1} requests: at most {most} .*sm_{capability}"
    ):
        kernels.plan(
            AttentionShape(most + 1, 4, 2, 64, 16, 1, 64, most + 1, 64), Budget(16, "mask")
        )


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_prefill_fits_with_two_tiles_of_e4m3_beside_its_stages(head_dim: int) -> None:
    stages = cuda.prefill_bytes(head_dim, False)
    keys = 64 if head_dim == 256 else 128
    assert cuda.prefill_bytes(head_dim, True) == stages + 2 * keys * head_dim <= 232_448
