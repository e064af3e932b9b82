"""Questions about a GEMM on a machine without a GPU: the shipped profile answers."""

from __future__ import annotations

import pytest
import torch

import smkern.ops
from smkern.errors import ArgumentError, BudgetError
from smkern.kernels.cublaslt import WORKSPACE_BYTES
from smkern.tuning.config import Budget
from smkern.tuning.constraints import COUNTER_BYTES

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="answers for the GPU there is")


def test_a_partition_can_be_imagined():
    found = smkern.ops.explain_gemm(64, 6144, 4096, num_sms=32, confined="mask", clusters=False)
    assert found.budget == Budget(32, "mask", False)
    assert found.source in ("table", "model")
    assert found.predicted_us > 0
    assert "6144" in str(found)


def test_the_default_is_the_whole_device():
    found = smkern.ops.explain_gemm(64, 6144, 4096)
    assert found.budget.num_sms >= 100
    assert found.budget.confined == "mask"


@pytest.mark.parametrize("confined", ["mask", "grid"])
def test_a_partition_can_be_asked_about(confined):
    budget = Budget(48, confined, False)
    heads = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128, "page_size": 16}
    ask = (
        lambda **where: smkern.ops.explain_gemm(64, 6144, 4096, **where),
        lambda **where: smkern.ops.explain_gemm_swiglu(64, 6144, 4096, **where),
        lambda **where: smkern.ops.explain_attention(4, **heads, max_kv_len=512, **where),
    )
    for explain in ask:
        assert explain(partition=budget).budget == budget
        assert explain(partition=budget, num_sms=16).budget == Budget(16, "grid", False)
        assert explain(num_sms=16).budget == Budget(16, "grid", True)
        with pytest.raises(BudgetError, match="60 is above the 48 SMs of the stream's partition"):
            explain(partition=budget, num_sms=60)


def test_bad_questions():
    with pytest.raises(BudgetError, match="above the device"):
        smkern.ops.explain_gemm(64, 6144, 4096, num_sms=1000)
    with pytest.raises(ArgumentError, match="m=0"):
        smkern.ops.explain_gemm(0, 6144, 4096)
    with pytest.raises(ArgumentError, match="backend='x'"):
        smkern.ops.explain_gemm(1, 6144, 4096, backend="x")


def test_workspace_bytes_is_what_the_split_needs():
    found = smkern.ops.explain_gemm(8, 64, 16384, num_sms=132)
    needed = smkern.ops.gemm_workspace_bytes(8, 64, 16384, num_sms=132)
    assert needed >= found.workspace_bytes
    assert smkern.ops.gemm_workspace_bytes(64, 64, 64, batch_invariant=True) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_library_that_is_named_has_a_workspace(dtype):
    """It takes aligned operands alone."""
    named = smkern.gemm_workspace_bytes(64, 6144, 4096, dtype=dtype, backend="cublaslt")
    assert named == COUNTER_BYTES + WORKSPACE_BYTES
