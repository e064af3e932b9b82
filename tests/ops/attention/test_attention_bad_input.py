"""What `paged_attention` refuses: by host numbers always, by device memory with `check=True`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import smkern.ops as smkern
from smkern.errors import ArgumentError, BudgetError
from smkern.ops.checks import MAX_WINDOW
from tests.ops.attention.cases import FP8, NAMES, SIZES, Case, make
from tests.ops.tensors import ints

DECODE = Case(lengths=((1, 37), (1, 5), (1, 20)))
RAGGED = Case(lengths=((1, 37), (3, 40), (9, 9)))
HALF = torch.float16


def call(case, **changes):
    """A call in order but for `changes`."""
    made = make(case)
    args = dict(zip(NAMES, made.args, strict=True)) | made.options | changes
    positional = [args.pop(name) for name in NAMES]
    return smkern.paged_attention(*positional, **args)


def caches(*shape, dtype=HALF):
    return {"k_cache": torch.zeros(shape, dtype=dtype), "v_cache": torch.zeros(shape, dtype=dtype)}


DECODE_ERRORS = [
    ({"q": None}, "q is NoneType"),
    ({"page_table": None}, "page_table is NoneType"),
    ({"kv_lens": [3, 4, 5]}, "kv_lens is list"),
    ({"q": torch.zeros(3, 256).half()}, r"q has shape \[3, 256\]"),
    ({"q": torch.zeros(3, 4, 128).half()[..., ::2]}, r"inner stride must be 1; call q"),
    ({"q": torch.zeros(3, 4, 64).double()}, "q is torch.float64"),
    ({"q": torch.zeros(3, 4, 64).bfloat16()}, "k_cache is torch.float16, q is torch.bfloat16"),
    ({"q": torch.zeros(3, 5, 64).half()}, "5 query heads over 2 KV heads"),
    ({"q": torch.zeros(3, 4, 96).half()}, "q has head_dim 96, the caches have 64"),
    ({"q": torch.zeros(3, 4, 80).half(), **caches(9, 16, 2, 80)}, "head_dim=80: there is"),
    (caches(9, 8, 2, 64), "page_size=8: there is"),
    (caches(9, 16, 0, 64), "num_kv_heads=0"),
    (caches(0, 16, 2, 64), "the cache has 0 pages"),
    (caches(9, 16, 2, 64, dtype=torch.float8_e5m2), "k_cache is torch.float8_e5m2"),
    ({"k_cache": torch.zeros(9, 32, 64).half()}, "k_cache has shape"),
    ({"v_cache": torch.zeros(9, 16, 2, 128).half()[..., ::2]}, "v_cache has strides"),
    ({"v_cache": torch.zeros(9, 16, 2, 64).to(FP8)}, "both must be of one shape and dtype"),
    ({"v_cache": torch.zeros(5, 16, 2, 64).half()}, "both must be of one shape and dtype"),
    ({"k_cache": torch.zeros(9, 16, 2, 64, device="meta").half()}, "k_cache is on meta, q on cpu"),
    ({"page_table": torch.zeros(3, 4, device="meta").int()}, "page_table is on meta, q on cpu"),
    ({"page_table": torch.zeros(3, 4)}, r"page_table is torch.float32, wanted torch.int32"),
    ({"page_table": torch.zeros(2, 4).int()}, "page_table has 2 rows, kv_lens 3 requests"),
    ({"page_table": torch.zeros(12).int()}, "without page_indptr"),
    ({"page_table": torch.zeros(3, 0).int()}, r"page_table is \[3, 0\]"),
    ({"page_table": torch.zeros(4, 3).int().t()}, "page_table has strides"),
    ({"page_indptr": ints(0, 1, 2, 3)}, r"wanted \[total\] with page_indptr"),
    ({"page_table": ints(0, 1, 2), "page_indptr": ints(0, 1, 2)}, r"page_indptr has shape \[3\]"),
    ({"page_table": ints(0), "page_indptr": ints(0, 1, 1, 1).long()}, "page_indptr is torch.int64"),
    ({"kv_lens": torch.zeros(3)}, "kv_lens is torch.float32"),
    ({"kv_lens": torch.zeros(3, device="meta").int()}, "kv_lens is on meta"),
    ({"kv_lens": ints(37, 5, 20)[None]}, "kv_lens has shape"),
    ({"q": torch.zeros(5, 4, 64).half()}, "q has 5 tokens for 3 requests: without cu_q_lens"),
    ({"max_q_len": 2}, "max_q_len=2 without cu_q_lens"),
    ({"scale": float("nan")}, "scale=nan"),
    ({"scale": float("inf")}, "scale=inf"),
    ({"scale": 0.0}, r"scale=0\.0: pass a finite number above 0"),
    ({"scale": -0.3}, r"scale=-0\.3: pass a finite number above 0"),
    ({"scale": "a"}, "scale='a' is no number"),
    ({"scale": torch.tensor(0.5)}, r"scale=tensor\(0\.5000\) is no number"),
    ({"window": 0}, "window=0"),
    ({"window": 2.5}, r"window=2\.5"),
    ({"softcap": 0.0}, r"softcap=0\.0"),
    ({"softcap": -1}, "softcap=-1"),
    ({"sinks": torch.zeros(2)}, r"sinks has shape \[2\], wanted \[4\]"),
    ({"sinks": torch.zeros(4).half()}, "sinks is torch.float16"),
    ({"k_scale": 0.5}, "k_scale is given and the cache is torch.float16"),
    ({"v_scale": torch.ones(1)}, "v_scale is given"),
    ({"out": torch.zeros(3, 4, 64)}, "out is"),
    ({"out": torch.zeros(3, 2, 64).half()}, "out is"),
    ({"out": torch.zeros(1, 4, 64).half().expand(3, 4, 64)}, "two of its elements"),
    ({"lse": torch.zeros(3, 4).half()}, "lse is"),
    ({"lse": torch.zeros(3, 3)}, "lse is"),
    ({"lse": torch.zeros(4, 3).t()}, "lse is"),
    ({"plan": 3}, "plan is int"),
    ({"backend": "fa3"}, "backend='fa3'"),
]


@pytest.mark.parametrize(("bad", "message"), DECODE_ERRORS, ids=lambda x: str(x)[:30])
def test_named_errors(bad, message):
    with pytest.raises(ArgumentError, match=message):
        call(DECODE, **bad)


RAGGED_ERRORS = [
    ({"max_q_len": None}, "max_q_len is missing"),
    ({"max_q_len": 0}, "max_q_len=0"),
    ({"cu_q_lens": ints(0, 1, 4)}, r"cu_q_lens has shape \[3\], wanted \[4\]"),
    ({"cu_q_lens": ints(0, 1, 4, 13).long()}, "cu_q_lens is torch.int64"),
    ({"cu_q_lens": torch.zeros(4, device="meta").int()}, "cu_q_lens is on meta"),
]


@pytest.mark.parametrize(("bad", "message"), RAGGED_ERRORS)
def test_named_errors_of_ragged_queries(bad, message):
    with pytest.raises(ArgumentError, match=message):
        call(RAGGED, **bad)


@pytest.mark.parametrize(
    "bad", [torch.ones(2), torch.ones(1, device="meta"), torch.ones(1).half(), torch.inf, "x", -2.0]
)
def test_scales_of_fp8_caches(bad):
    with pytest.raises(ArgumentError, match="k_scale"):
        call(replace(DECODE, cache_dtype=FP8), k_scale=bad)


@pytest.mark.parametrize("scales", [{"k_scale": torch.zeros(1)}, {"k_scale": torch.tensor([-1.0])},
                                    {"v_scale": torch.tensor([float("nan")])}])  # fmt: skip
def test_a_checked_call_reads_scales(scales):
    (name,) = scales
    case = replace(DECODE, cache_dtype=FP8)
    call(case, **scales)
    with pytest.raises(ArgumentError, match=f"{name}=.*: pass a finite number"):
        call(case, **scales, check=True)


def test_a_negative_v_scale_is_served():
    case = replace(DECODE, cache_dtype=FP8)
    torch.manual_seed(1)
    want = call(case, v_scale=3.0)
    torch.manual_seed(1)
    assert torch.equal(call(case, v_scale=-3.0), -want)


@pytest.mark.parametrize("num_sms", [0, -3, True, 1.5])
def test_budgets(num_sms):
    with pytest.raises(BudgetError, match="num_sms="):
        call(DECODE, num_sms=num_sms)


@pytest.mark.parametrize("check", [False, True])
def test_requests_of_length_zero_give_zeros(check):
    made = make(DECODE)
    out, lse = smkern.paged_attention(*made.args[:4], ints(37, 0, 20), return_lse=True, check=check)
    assert (out[1] == 0).all()
    assert (lse[1] == float("-inf")).all()
    assert out.isfinite().all()
    assert (out[0] != 0).any()


@pytest.mark.parametrize("check", [False, True])
def test_an_empty_batch(check):
    sizes = {"page_table": torch.zeros(0, 4).int(), "kv_lens": ints()}
    out = call(DECODE, **sizes, q=torch.zeros(0, 4, 64).half(), check=check)
    assert out.shape == (0, 4, 64)


@pytest.mark.parametrize("case", [DECODE, RAGGED])
def test_nan_where_nobody_may_look_reaches_no_result(case):
    """Cases keep NaN in pages of nobody and behind each request's last key."""
    made = make(case)
    assert made.args[1].isnan().any()
    assert made.args[2].isnan().any()
    out, lse = smkern.paged_attention(*made.args, **made.options, return_lse=True, check=True)
    assert out.isfinite().all()
    assert lse.isfinite().all()


PLANS = [
    ({"num_q_heads": 8}, r"num_q_heads 8 \(here 4\)"),
    ({"num_kv_heads": 4}, r"num_kv_heads 4 \(here 2\)"),
    ({"head_dim": 128}, r"head_dim 128 \(here 64\)"),
    ({"page_size": 32}, r"page_size 32 \(here 16\)"),
    ({"causal": False}, r"causal False \(here True\)"),
    ({"window": 9}, r"window 9 \(here 0\)"),
    ({"num_sms": 7}, "plan for 7 SMs, this call has 1"),
    ({"kv_lens": ints(3, 4)}, r"batch 2 \(here 3\)"),
    ({"cu_q_lens": ints(0, 1, 2, 3), "max_q_len": 2}, r"max_q_len 2 \(here 1\)"),
]


@pytest.mark.parametrize(("other", "message"), PLANS)
def test_a_plan_of_another_step(other, message):
    numbers = {"kv_lens": ints(37, 5, 20), **SIZES} | other
    plan = smkern.plan_attention(numbers.pop("kv_lens"), **numbers)
    with pytest.raises(ArgumentError, match=message):
        call(DECODE, plan=plan)


def test_a_plan_of_fewer_tokens_or_another_device():
    ragged = {"cu_q_lens": ints(0, 1, 4, 13), "max_q_len": 9}
    plan = smkern.plan_attention(ints(37, 40, 9), **SIZES, **ragged, num_tokens=12)
    with pytest.raises(ArgumentError, match="q has 13 tokens, the plan is for at most 12"):
        call(RAGGED, plan=plan)
    plan = smkern.plan_attention(ints(37, 5, 20), **SIZES)
    away = type(plan)(plan.shape, plan.budget, plan.buffer.to("meta"), plan.workspace)
    with pytest.raises(ArgumentError, match="plan is a plan on meta, the call is on cpu"):
        call(DECODE, plan=away)


def test_a_table_may_be_narrower_than_its_plan_allows():
    plan = smkern.plan_attention(ints(37, 5, 20), **(SIZES | {"max_kv_len": 4096}))
    assert torch.equal(call(DECODE, plan=plan).isfinite(), torch.ones(3, 4, 64).bool())


def test_out_may_not_overlap():
    made = make(DECODE)
    q, k_cache, *rest = made.args
    with pytest.raises(ArgumentError, match=r"out at .* overlaps q"):
        smkern.paged_attention(q, k_cache, *rest, out=q)
    inside = k_cache.view(-1)[: q.numel()].view(q.shape)
    with pytest.raises(ArgumentError, match=r"out at .* overlaps k_cache"):
        smkern.paged_attention(q, k_cache, *rest, out=inside)


def spoiled(case, at, value):
    """Arguments and options of a case, one entry of its table changed."""
    torch.manual_seed(0)
    made = make(case)
    made.args[3][at] = value
    return [*made.args], made.options


CHECKS = [
    (DECODE, (0, 2), 10**6, "request 0 has page 1000000 at its entry 2"),
    (DECODE, (1, 0), -1, "request 1 has page -1 at its entry 0"),
    (replace(RAGGED, flat=True), 4, 99, "request 1 has page 99 at its entry 1"),
]


@pytest.mark.parametrize(("case", "at", "value", "message"), CHECKS)
def test_a_checked_call_names_the_page(case, at, value, message):
    args, options = spoiled(case, at, value)
    args[1:3] = [args[1].nan_to_num(1.0)] * 2
    assert smkern.paged_attention(*args, **options).isfinite().all()
    with pytest.raises(ArgumentError, match=message):
        smkern.paged_attention(*args, **options, check=True)


@pytest.mark.parametrize(("at", "value"), [((0, 3), -5), ((1, 1), 77)])
def test_entries_behind_the_last_key_are_not_looked_at(at, value):
    args, options = spoiled(DECODE, at, value)
    smkern.paged_attention(*args, **options, check=True)


@pytest.mark.parametrize(("scale", "k_scale"), [(2.0**-126, 2.0**-30), (1e20, 1e20)])
def test_a_product_of_scales_that_fp32_does_not_hold(scale, k_scale):
    case = replace(DECODE, cache_dtype=torch.float8_e4m3fn, options={})
    with pytest.raises(ArgumentError, match="scale x k_scale="):
        call(case, scale=scale, k_scale=k_scale)


def test_the_widest_window_leaves_room_in_32_bits():
    sizes = SIZES | {"window": 2**31 - 1}
    assert smkern.plan_attention(ints(37, 5, 20), **sizes).shape.window == MAX_WINDOW == 2**30


def test_entries_before_a_window_are_not_looked_at():
    args, options = spoiled(replace(DECODE, options={"window": 5}), (0, 0), -1)
    smkern.paged_attention(*args, **options, check=True)
    args[3][0, 2] = -1
    with pytest.raises(ArgumentError, match="request 0 has page -1 at its entry 2"):
        smkern.paged_attention(*args, **options, check=True)


LENGTHS = [
    (DECODE, {"kv_lens": ints(37, -2, 20)}, r"kv_lens\[1\] is -2"),
    (DECODE, {"kv_lens": ints(37, 5, 999)}, r"kv_lens\[2\] is 999, wanted 0 to max_kv_len 64"),
    (RAGGED, {"cu_q_lens": ints(0, 4, 1, 13)}, r"cu_q_lens\[2\] is 1, below"),
    (RAGGED, {"cu_q_lens": ints(0, 1, 4, 14)}, r"cu_q_lens\[3\] is 14, outside the 13 tokens"),
    (RAGGED, {"max_q_len": 8}, "request 2 has 9 query tokens, above max_q_len 8"),
    (replace(RAGGED, flat=True), {"kv_lens": ints(37, 40, 17)}, "request 2 has 17 keys, 2 pages"),
    (
        replace(RAGGED, flat=True),
        {"page_indptr": ints(0, 3, 6, 99)},
        r"page_indptr\[3\] is 99, outside",
    ),
    (
        replace(RAGGED, flat=True),
        {"page_indptr": ints(0, 4, 3, 7)},
        "request 1 has 40 keys, 3 pages of 16, and -1 entries",
    ),
]


@pytest.mark.parametrize(("case", "bad", "message"), LENGTHS)
def test_a_checked_call_names_the_request(case, bad, message):
    with pytest.raises(ArgumentError, match=message):
        call(case, **bad, check=True)


def test_a_table_that_is_too_short_for_a_planned_length():
    plan = smkern.plan_attention(ints(37, 5, 20), **(SIZES | {"max_kv_len": 4096}))
    with pytest.raises(ArgumentError, match="request 2 has 90 keys, 6 pages of 16, and 4 entries"):
        call(DECODE, plan=plan, kv_lens=ints(37, 5, 90), check=True)
