"""How plans and prompts are launched: overlap, and what fits shared memory."""

from __future__ import annotations

import pytest

from smkern.device import Budget
from smkern.errors import ArgumentError
from smkern.kernels import aot
from smkern.kernels.attention import cuda, maps
from smkern.kernels.attention.args import NUM_ADDRESSES, AttentionArguments
from smkern.kernels.attention.launch import AttentionKernels
from smkern.tuning.attention.shapes import AttentionProblem, AttentionShape
from smkern.tuning.constraints import shared_limit


@pytest.mark.parametrize(
    ("capability", "confined", "overlaps"),
    [(90, "mask", True), (90, "grid", False), (80, "mask", False)],
)
def test_a_plan_overlaps_only_where_its_kernel_waits(
    capability, confined, overlaps, monkeypatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(cuda, "compile_cuda", lambda *given: b"")
    monkeypatch.setattr(aot, "load_function", lambda *given: None)
    monkeypatch.setattr(cuda, "launcher", lambda *given, overlap: asked.append(overlap))
    kernels = AttentionKernels(capability)
    kernels.plan(AttentionShape(1, 4, 2, 64, 16, 1, 64, 1, 64), Budget(16, confined, True))
    assert asked == [overlaps]


@pytest.mark.parametrize(("capability", "most"), [(80, 16_384), (86, 14_728), (90, 16_384)])
def test_a_plan_has_the_requests_that_the_device_holds(capability, most, monkeypatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(cuda, "compile_cuda", lambda *given: b"")
    monkeypatch.setattr(aot, "load_function", lambda cubin, name, shared: asked.append(shared))
    monkeypatch.setattr(cuda, "launcher", lambda *given, overlap: None)
    kernels = AttentionKernels(capability)
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


@pytest.mark.parametrize(
    ("head_dim", "page_size", "cache", "box", "swizzle"),
    [
        (128, 16, "bf16", (64, 16, 1, 1), 3),
        (128, 256, "bf16", (64, 128, 1, 1), 3),
        (96, 64, "bf16", (32, 64, 1, 1), 2),
        (128, 16, "fp8", (128, 16, 1, 1), 3),
        (128, 256, "fp8", (128, 32, 1, 1), 3),
        (256, 64, "fp8", (128, 16, 1, 1), 3),
        (96, 64, "fp8", (96, 32, 1, 1), 0),
        (64, 32, "fp8", (64, 32, 1, 1), 0),
    ],
)
def test_boxes_of_a_prompts_pages(head_dim, page_size, cache, box, swizzle, monkeypatch) -> None:
    """One box a warp holds rows of its own in e4m3, up to 128 bytes wide, else 64 dims."""
    made: list[tuple[object, ...]] = []
    monkeypatch.setattr(maps, "encode_tensor_map", lambda *given: made.append(given[1:]))
    monkeypatch.setattr(maps, "replace_address", lambda: lambda map_, address: 0)
    shape = AttentionShape(1, 8, 2, head_dim, page_size, 300, 300, 300, 300)
    problem = AttentionProblem(shape, cache_dtype=cache)
    token, page = 2 * head_dim, 2 * head_dim * page_size
    strides = (page, token, head_dim)
    sizes = ((8 * head_dim, head_dim), (8 * head_dim, head_dim), strides, strides, 19, 19, 40, 300)
    args = AttentionArguments.of([0] * NUM_ADDRESSES, (*sizes, 1.0, 0.0, 1.0, 1.0, (0, 0)))
    maps.OperandMaps(problem).point(args, 16, 32, 48)
    size, dtype = (1, "e4m3") if cache == "fp8" else (2, "bf16")
    bytes_ = (token * size, head_dim * size, page * size)
    assert made[1] == made[2] == (dtype, (head_dim, page_size, 2, 40), bytes_, box, swizzle)
