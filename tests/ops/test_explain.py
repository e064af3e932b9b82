"""Questions about a GEMM on a machine without a GPU: the shipped profile answers."""

from __future__ import annotations

import pytest
import torch

import smkern.ops
from smkern.errors import ArgumentError, BudgetError
from smkern.tuning.config import Budget

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
