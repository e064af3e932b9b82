"""What operators refuse by name, and before anything is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import smkern
from smkern.errors import ArgumentError, BudgetError
from smkern.kernels.attention import cuda
from smkern.limits import MAX_REQUESTS, MIN_FLOAT, as_float, as_int
from smkern.ops.fp8.scales import check_block_scale
from tests.ops.tensors import ints

FP8 = torch.float8_e4m3fn
HUGE = 10**5000
"""Python refuses to write it out."""
SCALAR = torch.tensor(3)
"""Calls are remembered by their numbers, and this one is equal to itself whatever it holds."""


def rows() -> dict[str, Any]:
    return {"x": torch.ones(2, 4), "residual": torch.ones(2, 4), "weight": torch.ones(4)}


@pytest.mark.parametrize(
    "value", ["1", b"1", [1.0], np.ones(1), torch.ones(1), 1j, HUGE, SCALAR], ids=type
)
def test_numbers_are_numbers(value):
    with pytest.raises(ArgumentError, match="eps"):
        as_float("eps", value)
    with pytest.raises(ArgumentError, match="count"):
        as_int("count", value, 1)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_a_sparse_number_is_none():
    """Python takes it for a float, and torch's dispatcher would not."""
    with pytest.raises(ArgumentError, match="is no number: pass a float"):
        smkern.rms_norm(torch.ones(2, 4), torch.ones(4), eps=torch.tensor(1.0).to_sparse())


@pytest.mark.parametrize("scale", [1e-46, 1e-39, MIN_FLOAT / 2])
def test_a_scale_whose_inverse_fp32_cannot_hold(scale):
    """Zeros divided by it would be NaN."""
    k, cache = torch.zeros(1, 1, 64), torch.zeros(2, 1, 16, 1, 64).to(FP8)
    call = (k, k, *cache, ints(0).view(1, 1), ints(1))
    with pytest.raises(ArgumentError, match=r"k_scale=.* the smallest of fp32"):
        smkern.append_kv(*call, k_scale=scale)
    with pytest.raises(ArgumentError, match=r"k_scale=.* number above 0"):
        smkern.append_kv(*call, k_scale=torch.tensor(scale), check=True)
    smkern.append_kv(*call, k_scale=MIN_FLOAT, v_scale=torch.tensor(MIN_FLOAT), check=True)
    assert not cache.float().isnan().any()


def test_the_most_requests_of_a_plan():
    sizes = {"num_q_heads": 1, "num_kv_heads": 1, "head_dim": 64, "page_size": 1, "max_kv_len": 1}
    lens = torch.ones(MAX_REQUESTS + 1, dtype=torch.int32)
    with pytest.raises(ArgumentError, match="16385 requests: at most 16384"):
        smkern.plan_attention(lens, **sizes)
    q, cache = torch.zeros(len(lens), 1, 64), torch.zeros(2, 1, 1, 1, 64)
    with pytest.raises(ArgumentError, match="16385 requests: at most 16384"):
        smkern.paged_attention(q, *cache, torch.zeros(len(lens), 1).int(), lens)
    assert smkern.plan_attention(lens[1:], **sizes).shape.batch == MAX_REQUESTS == cuda.MAX_BATCH


def test_results_and_scales_whose_rows_are_too_far_apart():
    """Kernels take the step in 32 bits."""
    far = torch.empty(2**31 + 256, dtype=FP8)  # nobody touches it
    a, w = (
        smkern.quantize(torch.ones(2, 128), "block"),
        smkern.quantize(torch.ones(256, 128), "weight_block"),
    )
    scales = {"a_scale": a[1], "w_scale": w[1], "out_scale": torch.ones(2, 1)}
    out = far.as_strided((2, 128), (2**31, 1))
    with pytest.raises(ArgumentError, match="out has a row stride of 2147483648"):
        smkern.gemm_swiglu(a[0], w[0], **scales, out=out)
    with pytest.raises(ArgumentError, match="out_scale has a row stride of 2147483648"):
        check_block_scale("out_scale", out, 2, 128 * 128)


def test_states_that_cannot_be_counted():
    outs = torch.ones(1, 1, 1, 1).expand(2**12, 2**20, 1, 1)
    with pytest.raises(ArgumentError, match="merge fewer tokens at a time"):
        smkern.merge_states(outs, torch.ones(1, 1, 1).expand(2**12, 2**20, 1))


def test_tokens_of_no_request_are_checked_too():
    k, cache = torch.ones(2, 1, 64), torch.zeros(2, 2, 16, 1, 64)
    table, lens = torch.zeros(0, 2, dtype=torch.int32), ints()
    smkern.append_kv(k, k, *cache, table, lens, cu_q_lens=ints(0), check=True)
    found = smkern.qk_norm_rope_append(k, k, k, *cache, table, lens, cu_q_lens=ints(0), check=True)
    assert not found.any()
    assert not cache.any()


@pytest.mark.parametrize(
    "num_sms", [2**70, 2**31, HUGE, "3", [1], torch.ones(2), SCALAR, True], ids=type
)
def test_budgets_that_are_none(num_sms):
    lens = ints(3)
    sizes = {"num_q_heads": 1, "num_kv_heads": 1, "head_dim": 64, "page_size": 1, "max_kv_len": 4}
    with pytest.raises(BudgetError, match="num_sms"):
        smkern.plan_attention(lens, **sizes, num_sms=num_sms)
    with pytest.raises(BudgetError, match="num_sms"):
        smkern.rms_norm(torch.ones(2, 4), torch.ones(4), num_sms=num_sms)


@pytest.mark.parametrize("name", ["q", "k_cache", "page_table", "kv_lens", "plan"])
def test_meta_tensors_among_others(name):
    """A call on memory and on none writes nothing, so it must not return."""
    given: dict[str, Any] = {
        "q": torch.zeros(1, 1, 64), "k_cache": torch.zeros(1, 16, 1, 64),
        "v_cache": torch.zeros(1, 16, 1, 64), "page_table": ints(0).view(1, 1), "kv_lens": ints(3),
        "out": torch.full((1, 1, 64), torch.nan),
    }  # fmt: skip
    if name == "plan":
        given["plan"] = smkern.plan_attention(
            ints(3).to("meta"), num_q_heads=1, num_kv_heads=1, head_dim=64, page_size=16,
            max_kv_len=16, num_sms=1,
        )  # fmt: skip
    else:
        given[name] = given[name].to("meta")
    with pytest.raises(ArgumentError, match="meta"):
        smkern.paged_attention(**given)


@pytest.mark.parametrize("name", ["residual", "out"])
def test_what_requires_a_gradient_is_not_written(name):
    given = rows()
    given[name] = torch.zeros(2, 4, requires_grad=True)
    before = given["residual"].detach().clone()
    with pytest.raises(ArgumentError, match=rf"{name} requires a gradient.*no_grad"):
        smkern.add_rms_norm(**given)
    assert torch.equal(given["residual"], before)
    with torch.no_grad():
        smkern.add_rms_norm(**given)
    assert not torch.equal(given["residual"], before)


@pytest.mark.parametrize("name", ["residual", "out"])
def test_tensors_of_inference_mode_are_not_written_outside_it(name):
    given = rows()
    with torch.inference_mode():
        given[name] = torch.zeros(2, 4)
    before = given["residual"].clone()
    with pytest.raises(ArgumentError, match=rf"{name} was made in torch.inference_mode"):
        smkern.add_rms_norm(**given)
    assert torch.equal(given["residual"], before)
    with torch.inference_mode():
        smkern.add_rms_norm(**given)
    assert not torch.equal(given["residual"], before)


def test_a_plan_of_inference_mode_is_not_filled_outside_it():
    sizes = {"num_q_heads": 1, "num_kv_heads": 1, "head_dim": 64, "page_size": 1, "max_kv_len": 4}
    with torch.inference_mode():
        plan = smkern.plan_attention(ints(3), **sizes)
    with pytest.raises(ArgumentError, match="inference_mode"):
        smkern.plan_attention(ints(2), **sizes, out=plan)


@pytest.mark.parametrize("flag", ["yes", 2, None, torch.tensor(True), np.ones(2)])
def test_flags_are_true_or_false(flag):
    a = torch.ones(2, 4)
    with pytest.raises(ArgumentError, match=r"batch_invariant=.*True or False"):
        smkern.gemm(a, a, batch_invariant=flag)


@pytest.mark.parametrize("workspace", ["none", torch.zeros(2).to("meta"), torch.eye(2).to_sparse()])
def test_a_workspace_is_a_tensor_there(workspace):
    a = torch.ones(2, 4)
    with pytest.raises(ArgumentError, match="workspace"):
        smkern.gemm(a, a, workspace=workspace)
