"""The append's eager path on a device that is not there: what reaches the kernels, and when."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from smkern.errors import ArgumentError, DeviceError, WarmupError
from smkern.kernels.append_launch import NUMBERS, POINTERS, SCALARS, STRIDES, variants_of
from smkern.ops.append.call import Call
from smkern.ops.append.dispatch import of_step
from smkern.ops.append.operators import APPEND, APPEND_KV
from smkern.ops.operator_eager import EagerOperator
from smkern.ops.reference import append as reference
from smkern.rope import Rope
from smkern.tuning.append import APPEND_FAMILY, VECTOR, AppendProblem, Budget
from tests.ops.append_cases import ALL, DECODE, FP8, check_caches, make, plain_options
from tests.ops.conftest import FakeProfile, memory, streams_of
from tests.ops.operator_cases import FakeKernels, FakeOperator

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": FP8}


def vector(pointer: int, count: int, dtype: torch.dtype = torch.int32) -> Any:
    return memory(pointer, (count,), (1,), dtype) if pointer else None


NAMES = (*POINTERS, *STRIDES, *NUMBERS, *SCALARS)


def append(p: AppendProblem, a: dict[str, Any]) -> None:
    """What the kernel does with its arguments."""
    dtype, cache, unit = DTYPES[p.dtype], DTYPES[p.cache_dtype], VECTOR if p.aligned else 1

    def at(name: str, shape: Any, kind: torch.dtype, *strides: str) -> torch.Tensor:
        steps = (*(unit * a[stride] for stride in strides), 1)
        return memory(a[f"{name}_ptr"], shape, steps, kind)

    kv = (p.tokens, p.num_kv_heads, p.head_dim)
    pages = (a["num_pages"], p.page_size, p.num_kv_heads, p.head_dim)
    table, steps = (p.batch, a["table_len"]), (a["table_stride"], 1)
    if p.flat:
        table, steps = (a["table_len"],), (1,)
    rows = [
        at("k", kv, dtype, "k_token", "k_head"),
        at("v", kv, dtype, "v_token", "v_head"),
        at("k_cache", pages, cache, "k_page", "k_slot", "k_cache_head"),
        at("v_cache", pages, cache, "v_page", "v_slot", "v_cache_head"),
        memory(a["table_ptr"], table, steps, torch.int32),
        vector(a["lens_ptr"], p.batch),
    ]
    where = {
        "page_indptr": vector(a["indptr_ptr"], p.batch + 1) if p.flat else None,
        "cu_q_lens": vector(a["cu_ptr"], p.batch + 1) if p.ragged else None,
    }
    for name in ("k_scale", "v_scale"):
        where[name] = a[name]
        if a[f"with_{name}"]:
            where[name] = vector(a[f"{name}_ptr"], 1, torch.float32)
    if not p.num_q_heads:
        reference.append_kv(*rows, **where)
        return
    heads = (p.tokens, p.num_q_heads, p.head_dim)
    table = positions = None
    if p.rotary_dim:
        kind = DTYPES[p.table_dtype]
        step = a["cos_sin_stride"] * (16 // kind.itemsize if p.aligned else 1)
        table = memory(a["cos_sin_ptr"], (a["max_position"], p.rotary_dim), (step, 1), kind)
    if a["positions_step"]:
        positions = memory(a["positions_ptr"], (p.tokens,), (a["positions_step"],), torch.int32)
    norms = [
        vector(a[name], p.head_dim, DTYPES[p.weight_dtype]) for name in ("q_norm_ptr", "k_norm_ptr")
    ]
    reference.qk_norm_rope_append(
        at("q", heads, dtype, "q_token", "q_head"), *rows, cos_sin=table,
        interleaved=p.interleaved, q_norm=norms[0], k_norm=norms[1], eps=a["eps"],
        positions=positions, out=at("out", heads, dtype, "out_token", "out_head"), **where,
    )  # fmt: skip


class AppendFakes(FakeKernels):
    """The append's kernels, on raw addresses."""

    def variants(self, problem: AppendProblem) -> Any:
        return variants_of(problem, 90)

    def launch(self, problem: AppendProblem, stream: int, *values: Any) -> None:
        self.launches.append((stream, *values))
        append(problem, dict(zip(NAMES, values, strict=True)))


class FakeDevice(FakeOperator):
    """One device with both operators."""

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        profile: Any = FakeProfile(capability)

        def select(problem: AppendProblem, budget: Budget) -> Any:
            return APPEND_FAMILY.select(of_step(problem), budget, profile).config

        super().__init__(APPEND, capability, AppendFakes(), select)
        self.eager_kv = EagerOperator(APPEND_KV, -1, self.dispatcher, streams_of(self))

    def __call__(self, *args: Any, **options: Any) -> Any:
        call = Call(*args, **options)
        return (self.eager_kv if call.plain else self.eager)(call)


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


CASES = {
    "decode": DECODE,
    "all": ALL,
    "flat": replace(ALL, flat=True, heads_first=True, options={"eps": 1e-2}),
    "interleaved": replace(ALL, rope=Rope(32, interleaved=True), dtype=torch.bfloat16),
    "positions": replace(ALL, options={"positions": torch.arange(13)}),
    "fp8": replace(ALL, cache_dtype=FP8, options={"k_scale": 0.5, "v_scale": torch.tensor([3.0])}),
    "fp8-2": replace(ALL, cache_dtype=FP8, options={"k_scale": torch.tensor([3.0])}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("place", ["new", "out", "in-place", "plain"])
def test_values_and_pointers(device, case, place):
    torch.manual_seed(1)
    args, options = make(case)
    torch.manual_seed(1)
    same, _ = make(case)
    if place == "plain":
        options = plain_options(options)
        assert device(None, *args[1:], **options, check=True) is None
        reference.append_kv(*same[1:], **options)
    else:
        want = reference.qk_norm_rope_append(*same, **options)
        out = {"new": None, "out": torch.empty_like(args[0]), "in-place": args[0]}[place]
        assert torch.equal(device(*args, **options, out=out, check=True), want)
    check_caches(args, same)
    assert [stream for stream, *_ in device.kernels.launches] == [7]


def test_rows_that_are_not_whole_16_bytes(device):
    """One element more between tokens: other code, the same values."""
    args, options = make(ALL)
    apart = torch.zeros(13, 4 * 64 + 1).half()[:, :-1].unflatten(1, (4, 64))
    apart.copy_(args[0])
    want = device(*args, **options)
    assert torch.equal(device(apart, *args[1:], **options), want)
    assert [x[0].aligned for x in device.kernels.prepared] == [True, False]


def test_a_capture_loads_nothing(device):
    args, options = make(ALL)
    device.is_capturing = True
    with pytest.raises(WarmupError, match="once before with the same"):
        device(*args, **options)
    device.is_capturing = False
    device(*args, **options)
    device.is_capturing = True
    with pytest.raises(ArgumentError, match="check=True reads device memory"):
        device(*args, **options, check=True)
    more, others = make(replace(ALL, requests=((5, 5), (7, 9))))
    device(*more, **others)  # another size takes the kernels that are loaded


def test_nothing_to_do_launches_nothing(device):
    args, options = make(replace(ALL, requests=()))
    assert device(*args, **options).shape == (0, 4, 64)
    assert not device.kernels.launches


def test_overlap_is_looked_at_in_every_call(device):
    args, options = make(ALL)
    out = torch.empty_like(args[0])
    device(*args, **options, out=out)
    fused = torch.zeros(13, 8, 64).half()
    q, k, v = fused.split([4, 2, 2], 1)
    device(q, k, v, *args[3:], **options, out=q)
    with pytest.raises(ArgumentError, match=r"k_cache at .* overlaps k at"):
        device(q, args[3].flatten(0, 1)[:13], v, *args[3:], **options)


def test_what_only_the_reference_takes(device):
    args, options = make(replace(ALL, dtype=torch.float32))
    with pytest.raises(ArgumentError, match=r"torch\.float32 on a GPU"):
        device(*args, **options)
    with pytest.raises(DeviceError, match=r"7\.5"):
        FakeDevice((7, 5))(*args, **options)
