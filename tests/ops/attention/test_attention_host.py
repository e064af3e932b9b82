"""Attention on CPU tensors: the public operators, their plans, and what they refuse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import smkern.ops as smkern
from smkern.errors import ArgumentError, BudgetError
from smkern.kernels.attention.items import plan_items
from smkern.ops.reference import attention as reference
from smkern.tuning.attention.shapes import AttentionShape
from tests.ops.attention.cases import FP8, Case, make
from tests.ops.tensors import ints

DECODE = Case(lengths=((1, 37), (1, 5), (1, 0)))
MIXED = Case(lengths=((1, 37), (3, 40), (0, 4), (9, 9)))
SIZES = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 16}


def plan_of(made, **changes):
    """A plan with a call's numbers."""
    q, k_cache = made.args[:2]
    numbers = {"num_q_heads": q.shape[1], "num_kv_heads": k_cache.shape[2], "max_kv_len": 64,
               "head_dim": q.shape[2], "page_size": k_cache.shape[1]}  # fmt: skip
    for name in ("cu_q_lens", "max_q_len", "causal", "window"):
        if name in made.options:
            numbers[name] = made.options[name]
    return smkern.plan_attention(made.args[4], **(numbers | changes))


@pytest.mark.parametrize("case", [DECODE, MIXED, replace(MIXED, flat=True),
                                  replace(MIXED, options={"window": 3, "softcap": 2.0}),
                                  replace(MIXED, options={"sinks": True, "causal": False}),
                                  ])  # fmt: skip
@pytest.mark.parametrize("planned", [True, False])
def test_cpu_tensors_run_the_reference(case, planned):
    made = make(case)
    want, want_lse = reference.paged_attention(*made.args, **made.options)
    plan = plan_of(made, num_sms=3) if planned else None
    options = made.options | {"plan": plan, "num_sms": 3, "check": True}
    out, lse = smkern.paged_attention(*made.args, **options, return_lse=True)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
    into, log = torch.full_like(out, float("nan")), torch.empty_like(lse)
    assert smkern.paged_attention(*made.args, **options, out=into, lse=log) is into
    assert torch.equal(into, want)
    assert torch.equal(log, want_lse)


@pytest.mark.parametrize("scale", [None, 0.5, torch.tensor(0.5)])
def test_fp8_caches(scale):
    made = make(Case(cache_dtype=FP8))
    options = made.options | {"k_scale": scale, "v_scale": scale}
    want, _ = reference.paged_attention(*made.args, **options)
    assert torch.equal(smkern.paged_attention(*made.args, **options), want)


@pytest.mark.parametrize(("q_tokens", "batch"), [(0, 0), (0, 2), (3, 0)])
def test_nothing_to_do(q_tokens, batch):
    q, cache = torch.zeros(q_tokens, 4, 64), torch.zeros(0 if not batch else 3, 16, 2, 64)
    args = (q, cache, cache, torch.zeros(batch, 2).int(), torch.full((batch,), 7).int())
    cu = torch.zeros(batch + 1).int()
    out = smkern.paged_attention(*args, cu_q_lens=cu, max_q_len=4, check=True)
    assert out.shape == q.shape


def test_a_plan_is_the_specification_and_is_made_anew_in_place():
    plan = smkern.plan_attention(ints(300, 20), **SIZES, max_kv_len=512, num_sms=16)
    shape = AttentionShape(2, 4, 2, 64, 16, 1, 512, 2, 1024)
    assert plan.shape == shape
    assert plan.budget.num_sms == 16
    assert plan.workspace_bytes == plan.workspace.nbytes > 0
    assert torch.equal(plan.buffer, torch.from_numpy(plan_items(shape, [300, 20], None, 16)))
    places = plan.buffer.data_ptr(), plan.workspace.data_ptr()
    again = smkern.plan_attention(
        ints(1, 512), **SIZES, max_kv_len=512, num_sms=16, out=plan, check=True
    )
    assert again is plan
    assert places == (plan.buffer.data_ptr(), plan.workspace.data_ptr())
    assert torch.equal(plan.buffer, torch.from_numpy(plan_items(shape, [1, 512], None, 16)))


def test_bounds_of_a_plan():
    cu = ints(0, 9, 12)
    ragged = {**SIZES, "cu_q_lens": cu, "max_q_len": 9, "max_kv_len": 64}
    assert smkern.plan_attention(ints(9, 40), **ragged).shape.max_tokens == 18
    tight = smkern.plan_attention(ints(9, 40), **ragged, num_tokens=12, max_total_kv=60)
    assert (tight.shape.max_tokens, tight.shape.max_total_kv) == (12, 60)
    assert smkern.plan_attention(ints(9), **SIZES, max_kv_len=64, max_total_kv=10**12).shape == (
        AttentionShape(1, 4, 2, 64, 16, 1, 64, 1, 64)
    )
    smkern.plan_attention(ints(), **SIZES, max_kv_len=0)


PLAN_ERRORS = [
    ({"num_q_heads": 5}, "5 query heads over 2 KV heads"),
    ({"num_kv_heads": 0}, "num_kv_heads=0"),
    ({"head_dim": 80}, "head_dim=80"),
    ({"page_size": 8}, "page_size=8"),
    ({"page_size": 16.0}, r"page_size=16\.0 is no whole number"),
    ({"max_q_len": 2}, "max_q_len=2 without cu_q_lens"),
    ({"num_tokens": 3}, "num_tokens=3 without cu_q_lens"),
    ({"max_kv_len": -1}, "max_kv_len=-1"),
    ({"max_kv_len": True}, "max_kv_len=True"),
    ({"max_kv_len": 1.5}, "max_kv_len=1.5"),
    ({"max_q_len": 0}, "max_q_len=0"),
    ({"max_total_kv": -1}, "max_total_kv=-1"),
    ({"window": 0}, "window=0"),
    ({"cu_q_lens": ints(0, 1)}, r"cu_q_lens has shape \[2\], wanted \[3\]"),
    ({"cu_q_lens": torch.zeros(3)}, r"cu_q_lens is torch.float32"),
    ({"cu_q_lens": torch.zeros(3, device="meta").int()}, "cu_q_lens is on meta"),
    ({"out": 3}, "out is int"),
]


@pytest.mark.parametrize(("bad", "message"), PLAN_ERRORS)
def test_a_plan_refuses(bad, message):
    with pytest.raises(ArgumentError, match=message):
        smkern.plan_attention(ints(3, 4), **({**SIZES, "max_kv_len": 64} | bad))


@pytest.mark.parametrize("bad", [None, [3], ints(3).long(), ints(3, 4)[None], ints(3, 4, 5)[::2]])
def test_a_plan_refuses_such_lengths(bad):
    with pytest.raises(ArgumentError, match="kv_lens"):
        smkern.plan_attention(bad, **SIZES, max_kv_len=64)


def test_a_plan_is_not_made_anew_with_other_numbers():
    plan = smkern.plan_attention(ints(3, 4), **SIZES, max_kv_len=64, num_sms=8)
    other = {"max_kv_len": 32, "causal": False}
    with pytest.raises(ArgumentError, match=r"max_kv_len 64 \(here 32\).*causal True"):
        smkern.plan_attention(ints(3, 4), **(SIZES | other), num_sms=8, out=plan)
    with pytest.raises(ArgumentError, match="plan for 8 SMs, this call has 9"):
        smkern.plan_attention(ints(3, 4), **SIZES, max_kv_len=64, num_sms=9, out=plan)
    with pytest.raises(BudgetError, match="num_sms=0"):
        smkern.plan_attention(ints(3, 4), **SIZES, max_kv_len=64, num_sms=0)


PLAN_CHECKS = [
    ((-1, 4), None, r"kv_lens\[0\] is -1"),
    ((3, 65), None, r"kv_lens\[1\] is 65, wanted 0 to max_kv_len 64"),
    ((60, 60), None, "sum to 120, above max_total_kv 100"),
    ((3, 4), (0, 4, 3), r"cu_q_lens\[2\] is 3, below"),
    ((3, 4), (0, 4, 15), r"cu_q_lens\[2\] is 15, outside the 12 tokens"),
    ((3, 4), (-1, 4, 8), r"cu_q_lens\[0\] is -1, outside"),
    ((3, 4), (0, 1, 11), "request 1 has 10 query tokens, above max_q_len 9"),
]


@pytest.mark.parametrize(("kv_lens", "cu", "message"), PLAN_CHECKS)
def test_a_checked_plan_names_the_row(kv_lens, cu, message):
    ragged = {"cu_q_lens": ints(*cu), "max_q_len": 9, "num_tokens": 12} if cu else {}
    options = {**SIZES, "max_kv_len": 64, "max_total_kv": 100, **ragged}
    smkern.plan_attention(ints(*kv_lens), **options)
    with pytest.raises(ArgumentError, match=message):
        smkern.plan_attention(ints(*kv_lens), **options, check=True)


def test_merge_states_on_the_host():
    outs, lses = torch.randn(3, 5, 4, 64, dtype=torch.float16), torch.randn(3, 5, 4)
    want = reference.merge_states(outs, lses)
    for got in (smkern.merge_states(outs, lses), smkern.merge_states(list(outs), list(lses))):
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    into = torch.empty_like(outs[0])
    assert smkern.merge_states(outs, lses, out=into, lse=torch.empty(5, 4), num_sms=4)[0] is into
    assert torch.equal(into, want[0])


MERGE_ERRORS = [
    ({"outs": torch.zeros(2, 5, 64)}, "outs has shape"),
    ({"outs": []}, "outs is list"),
    ({"outs": [torch.zeros(1, 2, 3), torch.zeros(1)]}, "several shapes"),
    ({"outs": torch.zeros(2, 5, 4, 64).double()}, "dtype torch.float64"),
    ({"outs": torch.zeros(2, 5, 4, 128)[..., ::2]}, "inner stride"),
    ({"lses": torch.zeros(2, 5, 4).half()}, "lses is"),
    ({"lses": torch.zeros(2, 4, 5)}, "lses is"),
    ({"out": torch.zeros(5, 4, 64).half()}, "out is"),
    ({"out": torch.zeros(1, 4, 64).expand(5, 4, 64)}, "share an address"),
    ({"lse": torch.zeros(4, 5)}, "lse is"),
    ({"lse": torch.zeros(5, 4, device="meta")}, "lse is on meta"),
]


@pytest.mark.parametrize(("bad", "message"), MERGE_ERRORS)
def test_merge_states_refuses(bad, message):
    given = {"outs": torch.zeros(2, 5, 4, 64), "lses": torch.zeros(2, 5, 4)} | bad
    outs, lses = given.pop("outs"), given.pop("lses")
    with pytest.raises(ArgumentError, match=message):
        smkern.merge_states(outs, lses, **given)


def test_merge_states_refuses_overlap():
    outs = torch.zeros(2, 5, 4, 64)
    with pytest.raises(ArgumentError, match=r"out at .* overlaps outs"):
        smkern.merge_states(outs, torch.zeros(2, 5, 4), out=outs[1])
