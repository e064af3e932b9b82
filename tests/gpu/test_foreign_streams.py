"""Budgets of streams that smkern did not make."""

from __future__ import annotations

import pytest
import torch

import smkern
from smkern.bench.contexts import Driver
from smkern.partition import budget_of_stream


@pytest.fixture
def total() -> int:
    return smkern.device_info().num_sms


def test_plain_streams_have_the_device(total):
    for stream in (
        torch.cuda.default_stream(),
        torch.cuda.Stream(),
        torch.cuda.Stream(priority=-1),
    ):
        with torch.cuda.stream(stream):
            assert smkern.current_num_sms() == total


def test_a_green_stream_of_a_raw_driver_call(total):
    foreign = Driver().one_group(24)
    try:
        budget = budget_of_stream(foreign.stream.cuda_stream, 0)
        assert (budget.num_sms, budget.confined, budget.clusters) == (24, "mask", False)
        with torch.cuda.stream(foreign.stream):
            assert smkern.current_num_sms() == 24
            a = torch.randn(64, 512, device="cuda").bfloat16()
            w = torch.randn(256, 512, device="cuda").bfloat16()
            out = smkern.gemm(a, w)
        foreign.stream.synchronize()
        want = a.float() @ w.float().t()
        assert torch.linalg.vector_norm(out - want) < 5e-3 * torch.linalg.vector_norm(want)
        with (
            pytest.raises(smkern.errors.BudgetError, match="24"),
            torch.cuda.stream(foreign.stream),
        ):
            smkern.gemm(a, w, num_sms=32)
        assert smkern.current_num_sms() == total
        del out, a, w
    finally:
        foreign.stream.synchronize()
        foreign.close()


def test_torchs_own_green_contexts():
    try:
        green = Driver().torch_green(32)
    except smkern.errors.DeviceError as error:
        pytest.skip(str(error))
    with torch.cuda.stream(green.stream):
        assert smkern.current_num_sms() == green.num_sms == 32
    green.stream.synchronize()
