"""What a GEMM refuses, and that the message gives the value, the limit and the remedy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from smkern.errors import ArgumentError, BudgetError, DeviceError
from smkern.ops import aliasing, checks
from smkern.ops.gemm.call import Gemm, problem_of, rows_aligned
from smkern.ops.gemm.operator import GEMM
from smkern.ops.operator_check import check_operator
from smkern.tuning.config import Budget


def half(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def check(**changes):
    return check_operator(GEMM, Gemm(**{"a": half(4, 16), "w": half(8, 16)} | changes))


def test_the_result_is_known():
    assert check() == (((4, 8), torch.bfloat16),)


FAR = torch.empty_strided((2, 16), (2**31, 1), dtype=torch.bfloat16, device="meta")
"""Two rows four gigabytes apart, of which there is no memory."""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"a": 3}, "a is int, not a torch.Tensor"),
        ({"a": np.zeros((4, 16))}, "a is ndarray"),
        ({"a": half(2, 4, 16)}, r"a has shape \[2, 4, 16\].*flatten"),
        ({"a": half(16)}, r"a has shape \[16\]"),
        ({"w": half(8, 15)}, r"w has shape \[8, 15\], wanted \[any, 16\]"),
        ({"w": half(16, 8).t()}, r"w has strides \(1, 8\).*w.contiguous\(\)"),
        ({"w": half(8, 16).float()}, r"w is torch.float32, a is torch.bfloat16: convert"),
        ({"w": half(8, 16).to("meta")}, "w is on meta, a on cpu"),
        ({"a": half(4, 16).long(), "w": half(8, 16).long()}, "dtype torch.int64 is not supported"),
        (
            {"a": half(1, 16).as_strided((1, 16), (1, 1)), "w": FAR},
            r"w has a row stride of 2147483648 elements, the largest is 2147483647",
        ),
        ({"bias": half(7)}, r"bias has shape \[7\], wanted \[8\]"),
        ({"bias": half(16)[::2]}, r"bias has stride 2, wanted 1"),
        ({"bias": [0.0] * 8}, "bias is list"),
        ({"residual": half(4, 9)}, r"residual has shape \[4, 9\], wanted \[4, 8\]"),
        ({"out": half(8, 4)}, r"out has shape \[8, 4\], wanted \[4, 8\]"),
        (
            {"out": half(1, 8).expand(4, 8)},
            r"out has strides \(0, 1\) for shape \[4, 8\]: two of its elements share",
        ),
        ({"out": half(4, 8).half()}, "out is torch.float16"),
        ({"activation": "relu"}, r"activation='relu': use None or one of \['silu', 'gelu'\]"),
        ({"activation": ["silu"]}, "activation=.'silu'."),
        ({"backend": "cuda"}, "backend='cuda': use None or one of"),
    ],
)
def test_refused(changes, message):
    with pytest.raises(ArgumentError, match=message):
        check(**changes)


def test_row_strides_are_free():
    buffer = half(32, 64)
    check(a=buffer[:4, 3:19], w=buffer[:8, 40:56], out=buffer[8:12, :8])


def test_old_devices_and_fp32_are_refused_on_a_gpu():
    with pytest.raises(DeviceError, match=r"compute capability 7.5, smkern needs 8.0"):
        checks.check_capability(torch.device("cuda", 0), (7, 5))
    with pytest.raises(ArgumentError, match=r"torch.float32 on a GPU: use"):
        problem_of(Gemm(half(1, 1).float(), half(1, 1).float()), True)


WHOLE, PART = Budget(132, "grid", True), Budget(32, "mask", False)


@pytest.mark.parametrize(
    ("num_sms", "stream", "message"),
    [
        (0, WHOLE, "num_sms=0: a budget is at least 1"),
        (-8, WHOLE, "num_sms=-8"),
        (True, WHOLE, "num_sms=True"),
        (16.0, WHOLE, "num_sms=16.0 is no whole number"),
        ("16", WHOLE, "num_sms='16' is no whole number"),
        (133, WHOLE, "num_sms=133 is above the device's 132"),
        (133, PART, "num_sms=133 is above the device's 132"),
        (33, PART, "num_sms=33 is above the 32 SMs of the stream's partition"),
    ],
)
def test_budgets_refused(num_sms, stream, message):
    with pytest.raises(BudgetError, match=message):
        checks.resolve_budget(num_sms, stream, 132)


def test_budgets_resolved():
    assert checks.resolve_budget(None, PART, 132) is PART
    assert checks.resolve_budget(32, PART, 132) is PART
    assert checks.resolve_budget(np.int64(31), PART, 132) == Budget(31, "grid", False)
    assert checks.resolve_budget(1, WHOLE, 132) == Budget(1, "grid", True)


def test_overlap_is_exact_for_columns_of_one_buffer():
    buffer = half(8, 64)
    left, right, middle = buffer[:, :32], buffer[:, 32:], buffer[:, 16:48]
    assert not aliasing.overlaps(left, right)
    assert not aliasing.overlaps(right, left)
    assert aliasing.overlaps(left, middle)
    assert aliasing.overlaps(middle, right)
    assert not aliasing.overlaps(buffer[:4], buffer[4:])
    assert aliasing.overlaps(buffer[:5], buffer[4:])
    assert not aliasing.overlaps(buffer[1:, :16], buffer[:7, 16:32])
    assert aliasing.overlaps(buffer[1:, :16], buffer[:7, 8:24]) is True


def test_only_the_whole_residual_may_be_out():
    out, w = half(8, 32), half(32, 8)

    def check_overlap(**options):
        aliasing.check_overlap(GEMM, Gemm(**{"a": half(8, 8), "w": w, "out": out} | options))

    check_overlap(residual=out)
    check_overlap(residual=out.view(8, 32))
    row = half(1, 32)
    check_overlap(out=row, residual=row.as_strided((1, 32), (7, 1)))
    with pytest.raises(ArgumentError, match=r"overlaps residual.*only be out itself"):
        check_overlap(out=out[:4], residual=out[1:5])
    with pytest.raises(ArgumentError, match=r"out at 0x\w+ \(512 bytes\) overlaps a at"):
        check_overlap(a=out)


def test_overlap_of_one_shape_and_strides_is_exact():
    pages = half(2, 4, 3, 8)
    assert not aliasing.overlaps(pages[:, :, 0], pages[:, :, 1]), "interleaved by row"
    assert not aliasing.overlaps(pages[:, 0], pages[:, 1])
    assert aliasing.overlaps(pages[:, :, 0], pages[:, :, 0])
    wide = half(4, 32)
    assert aliasing.overlaps(wide[:, :16], wide[:, 8:24])
    assert not aliasing.overlaps(half(1).expand(3, 4), half(1).expand(3, 4))


def test_alignment_looks_at_every_pitch_and_the_width():
    aligned = rows_aligned
    assert aligned(8, 16, [half(4, 16), None, half(3, 8)])
    assert not aligned(9, 16, [half(4, 16)])
    assert not aligned(8, 17, [half(4, 24)[:, :17]])
    assert not aligned(8, 16, [half(4, 17)[:, :16]])
    assert not aligned(8, 16, [half(1, 16).expand(4, 16)])
    assert aligned(8, 16, [half(1, 17)[:, :16]]), "one row has no pitch"
    assert aligned(8, 16, [half(4, 24)[:, :16]])


def test_spans():
    assert aliasing.span_bytes(half(4, 16)) == 128
    assert aliasing.span_bytes(half(4, 32)[:, :16]) == 2 * (3 * 32 + 16)
    assert aliasing.span_bytes(half(0, 16)) == 0
    assert aliasing.span_bytes(half(5)) == 10
    assert aliasing.span_bytes(None) == 0
