"""A model over two GPUs, each of them split; processes of their own."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.models import rank_case
from tests.gpu.models.support import SLACK
from tests.processes import on_processes

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs of one host")


LIMIT_S = 240.0
"""Kernels compile in it."""
BF16, FP16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize(
    ("hidden", "dtype"), [(4096, BF16), (5120, BF16), (1024, FP16), (16384, BF16)]
)
def test_sums_by_one_kernel(hidden: int, dtype: torch.dtype) -> None:
    for outcome in on_processes(2, rank_case.sums, hidden, dtype, limit_s=LIMIT_S):
        assert outcome.error == ""
        assert outcome.result["equal"]
        assert outcome.result["gathered"]
        assert outcome.result["copied"]
        assert outcome.result["worst"] <= 1.0


@pytest.mark.parametrize(
    ("how", "family"), [("nccl", "qwen3"), ("one kernel", "qwen3"), ("one kernel", "qwen2")]
)
def test_logits_of_two_gpus_are_those_of_one(how: str, family: str) -> None:
    for outcome in on_processes(2, rank_case.logits, how, family, limit_s=LIMIT_S):
        assert outcome.error == ""
        found = outcome.result
        assert found["part"] <= SLACK * found["alone"], found
        assert found["equal"]
        assert found["equal on sides"]
