"""The append's eager path on a device that is not there: what reaches the kernels, and when."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import pytest
import torch

from smkern.errors import ArgumentError, BudgetError, DeviceError, WarmupError
from smkern.kernels.append_launch import AppendArguments
from smkern.ops.append.call import Call
from smkern.ops.append.dispatch import AppendDispatcher
from smkern.ops.append.eager import EagerAppend
from smkern.ops.reference import append as reference
from smkern.ops.rope import Rope
from smkern.ops.streams import Streams
from smkern.tuning.append import AppendProblem, Budget
from tests.ops.append_cases import ALL, DECODE, FP8, make
from tests.ops.conftest import FakeProfile

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": FP8}


def memory(pointer: int, shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
    """The tensor at an address, as a kernel sees it."""
    count = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    raw = (ctypes.c_char * (dtype.itemsize * count)).from_address(pointer)
    whole = torch.frombuffer(raw, dtype=torch.uint8).view(dtype)
    return whole.as_strided(tuple(shape), tuple(strides))


def vector(pointer: int, count: int, dtype: torch.dtype = torch.int32) -> Any:
    return memory(pointer, (count,), (1,), dtype) if pointer else None


def append(p: AppendProblem, a: AppendArguments) -> None:
    """What the kernel does with its arguments."""
    dtype, cache = DTYPES[p.dtype], DTYPES[p.cache_dtype]
    kv = (p.tokens, p.num_kv_heads, p.head_dim)
    pages = (a.num_pages, p.page_size, p.num_kv_heads, p.head_dim)
    shape, strides = (p.batch, a.table_len), (a.table_stride, 1)
    if p.flat:
        shape, strides = (a.table_len,), (1,)
    rows = [
        memory(a.k, kv, (*a.k_strides, 1), dtype), memory(a.v, kv, (*a.v_strides, 1), dtype),
        memory(a.k_cache, pages, (*a.k_cache_strides, 1), cache),
        memory(a.v_cache, pages, (*a.v_cache_strides, 1), cache),
        memory(a.page_table, shape, strides, torch.int32), vector(a.kv_lens, p.batch),
    ]  # fmt: skip
    where = {
        "page_indptr": vector(a.page_indptr, p.batch + 1) if p.flat else None,
        "cu_q_lens": vector(a.cu_q_lens, p.batch + 1) if p.ragged else None,
        "k_scale": vector(a.k_scale_ptr, 1, torch.float32) if a.k_scale_ptr else a.k_scale,
        "v_scale": vector(a.v_scale_ptr, 1, torch.float32) if a.v_scale_ptr else a.v_scale,
    }
    if not p.num_q_heads:
        reference.append_kv(*rows, **where)
        return
    heads = (p.tokens, p.num_q_heads, p.head_dim)
    table = positions = None
    if p.rotary_dim:
        size, steps = (a.max_position, p.rotary_dim), (a.cos_sin_stride, 1)
        table = memory(a.cos_sin, size, steps, DTYPES[p.table_dtype])
    if a.positions_step:
        positions = memory(a.positions, (p.tokens,), (a.positions_step,), torch.int32)
    norms = [vector(x, p.head_dim, DTYPES[p.weight_dtype]) for x in (a.q_norm, a.k_norm)]
    reference.qk_norm_rope_append(
        memory(a.q, heads, (*a.q_strides, 1), dtype), *rows, cos_sin=table,
        interleaved=p.interleaved, q_norm=norms[0], k_norm=norms[1], eps=a.eps,
        positions=positions, out=memory(a.out, heads, (*a.out_strides, 1), dtype), **where,
    )  # fmt: skip


class FakeDevice:
    """One device: its dispatcher, its streams (a number each) and whether a capture is on."""

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        self.loaded: set[Any] = set()
        self.prepared: list[Any] = []
        self.launches: list[tuple[int, AppendArguments]] = []
        self.stream, self.is_capturing = 7, False
        self.budgets = {7: Budget(132, "grid", True), 8: Budget(32, "mask", False)}
        profile: Any = FakeProfile(capability)
        streams = Streams(
            lambda: -1, lambda index: self.stream, lambda raw, index: self.budgets[raw],
            lambda: self.is_capturing,
        )  # fmt: skip
        self.eager = EagerAppend(-1, AppendDispatcher(profile, lambda: self), streams)

    def is_loaded(self, problem: AppendProblem) -> bool:
        return replace(problem, tokens=1, batch=1) in self.loaded

    def prepare(self, problem: AppendProblem, config: Any, budget: Budget) -> Any:
        self.loaded.add(replace(problem, tokens=1, batch=1))
        self.prepared.append((problem, config, budget))

        def launch(arguments: AppendArguments, stream: int) -> None:
            self.launches.append((stream, arguments))
            append(problem, arguments)

        return launch

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.eager(Call(*args, **options))


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
        names = ("cu_q_lens", "page_indptr", "k_scale", "v_scale")
        options = {name: options[name] for name in names if name in options}
        assert device(None, *args[1:], **options, check=True) is None
        reference.append_kv(*same[1:], **options)
    else:
        want = reference.qk_norm_rope_append(*same, **options)
        out = {"new": None, "out": torch.empty_like(args[0]), "in-place": args[0]}[place]
        assert torch.equal(device(*args, **options, out=out, check=True), want)
    for x, y in zip(args[3:5], same[3:5], strict=True):
        assert torch.equal(x.float().nan_to_num(7), y.float().nan_to_num(7))
    stream, _ = device.launches[0]
    assert (stream, len(device.launches)) == (7, 1)


def test_a_second_call_prepares_nothing(device):
    args, options = make(ALL)
    for _ in range(3):
        device(*args, **options)
    assert (len(device.prepared), len(device.launches)) == (1, 3)
    device.stream = 8
    device(*args, **options)
    assert [x[2].num_sms for x in device.prepared] == [132, 32]
    assert device.launches[-1][0] == 8


def test_rows_that_are_not_whole_16_bytes(device):
    """One element more between tokens: other code, the same values."""
    args, options = make(ALL)
    apart = torch.zeros(13, 4 * 64 + 1).half()[:, :-1].unflatten(1, (4, 64))
    apart.copy_(args[0])
    want = device(*args, **options)
    assert torch.equal(device(apart, *args[1:], **options), want)
    assert [x[0].aligned for x in device.prepared] == [True, False]


def test_budgets(device):
    args, options = make(ALL)
    device(*args, **options, num_sms=20)
    assert device.prepared[-1][2] == Budget(20, "grid", True)
    for num_sms, match in ((133, "133 is above the device's 132"), (0, "at least 1")):
        with pytest.raises(BudgetError, match=match):
            device(*args, **options, num_sms=num_sms)
    device.stream = 8
    with pytest.raises(BudgetError, match="40 is above the 32 SMs of the stream's partition"):
        device(*args, **options, num_sms=40)


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
    assert not device.launches


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
