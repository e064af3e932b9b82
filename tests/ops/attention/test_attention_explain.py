"""Questions about attention on a machine without a GPU: the shipped profile answers."""

from __future__ import annotations

import pytest
import torch

import smkern.ops
from smkern.errors import ArgumentError, BudgetError
from smkern.kernels.attention.args import WorkspaceLayout
from smkern.tuning.attention.shapes import Budget

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="answers for the GPU there is")

LLAMA = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16}


def explain(batch=64, **changes):
    return smkern.ops.explain_attention(batch, **(LLAMA | {"max_kv_len": 4096} | changes))


def test_a_decode_step_in_an_imagined_partition():
    found = explain(num_sms=32, confined="mask", clusters=False)
    assert found.budget == Budget(32, "mask", False)
    assert found.config.kernel == "cuda"
    assert found.source in ("table", "model")
    assert found.bound in ("memory", "work")
    assert found.bytes_moved > 2 * 64 * 4096 * 8 * 128 * 2
    # 1.07 GB at no more than the device's 4.8 TB/s
    assert 223 < found.floor_us < found.predicted_us
    assert found.units == 64 * 8 * 4
    assert found.workspace_bytes == WorkspaceLayout.of(found.problem.shape).num_bytes


def test_a_prefill_step_is_bound_by_products():
    found = explain(1, max_q_len=8192, max_kv_len=8192)
    assert found.budget == Budget(132, "mask", True)
    assert found.flops == pytest.approx(2 * 32 * 128 * 8192**2, rel=1e-3)
    assert found.bound != "memory"
    assert found.ctas == 132


def test_less_to_read_takes_less():
    times = [explain(**change).predicted_us for change in (
        {}, {"window": 512}, {"kv_lens": [1000]}, {"cache_dtype": torch.float8_e4m3fn}
    )]  # fmt: skip
    assert all(time < times[0] for time in times[1:])
    assert explain(max_total_kv=64 * 1024).bytes_moved < explain().bytes_moved


@pytest.mark.parametrize("num_sms", [16, 48, 100])
def test_a_grid_has_one_cta_an_sm(num_sms):
    found = explain(num_sms=num_sms)
    assert found.budget.confined == "grid"
    assert found.ctas == num_sms


def test_backends():
    assert explain(backend="model").source == "model"
    found = explain(backend="triton", softcap=True, sinks=True, dtype=torch.float16)
    assert (found.source, found.config.kernel) == ("forced", "triton")
    assert found.problem.softcap
    assert found.problem.sinks
    with pytest.raises(ArgumentError, match="backend='cutlass': use None or one of"):
        explain(backend="cutlass")


@pytest.mark.parametrize("backend", [None, "triton"])
def test_it_prints_a_sentence(backend):
    text = str(explain(num_sms=32, confined="mask", backend=backend))
    for part in ("batch of 64", "32/8 heads of 128", "on 32 SMs", "us predicted", "floor"):
        assert part in text
    assert "\n" not in text


BAD = [
    ({"batch": 0}, "batch=0"),
    ({"num_q_heads": 30}, "30 query heads over 8 KV heads"),
    ({"head_dim": 80}, "head_dim=80"),
    ({"page_size": 24}, "page_size=24"),
    ({"max_q_len": 0}, "max_q_len=0"),
    ({"window": 0}, "window=0"),
    ({"dtype": torch.float32}, "q is torch.float32 on a GPU"),
    ({"cache_dtype": torch.float16}, "the cache is torch.float16, q torch.bfloat16"),
    ({"backend": "x"}, "backend='x'"),
]


@pytest.mark.parametrize(("bad", "message"), BAD)
def test_bad_questions(bad, message):
    with pytest.raises(ArgumentError, match=message):
        explain(**bad)


def test_bad_budgets():
    with pytest.raises(BudgetError, match="above the device"):
        explain(num_sms=1000)
    with pytest.raises(BudgetError, match="num_sms=0"):
        explain(num_sms=0)
