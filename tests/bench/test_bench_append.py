"""The append in the operator suite: its cases and operands, and who is right on CPU tensors."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from smkern.bench.cases import named
from smkern.bench.ops.append import AppendBench
from smkern.bench.ops.cases import APPENDS
from smkern.measure.append import AppendCase, AppendOperands
from tests.bench.doubles import FakePartitions

SIZES = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64}
TINY = (
    AppendCase("plain", 8, **SIZES),
    AppendCase("norm-rope", 96, **SIZES),
    AppendCase("fp8", 8, **SIZES),
)


def test_cases():
    assert len(APPENDS) == 15
    assert all(sum(case.q_lens) == case.tokens for case in APPENDS)
    long = next(case for case in APPENDS if case.name == "norm-rope-8192")
    assert long.q_lens == (2048,) * 4
    assert long.bytes_moved == 8192 * 128 * (2 * 8 * 4 + 32 * 4 + 4)
    assert [case.tokens for case in named(APPENDS, ["fp8-8"])] == [8, 8192]


@pytest.fixture
def small_operands(monkeypatch):
    monkeypatch.setattr(AppendCase, "num_sets", 2)
    return partial(AppendOperands, device="cpu")


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.kind)
@pytest.mark.parametrize("fault", ["k", "v", "q", "row"])
def test_a_wrong_result_is_no_time(cuda, small_operands, case, fault):
    bench = AppendBench(small_operands(case), None)
    ops, (ours,) = bench.ops, bench.ours(case, FakePartitions(cuda).at(16))
    bench.reset(case)
    ours.make()(0)
    assert ops.error("HND") < 1e-6
    assert bench.complaint(case, ours, None) is None
    if fault == "q" and not case.turns:
        return
    one = ops.sets[0]
    k, v = one.cache("HND")
    target = {"k": k, "v": v, "q": one.out, "row": k}[fault]
    if fault == "row":
        target[ops.places.page[0], ops.places.slot[0]] = float("nan")
    else:
        target.copy_((1.2 * target.float()).to(target.dtype))
    assert "wrong result" in bench.complaint(case, ours, None)


def test_peers_are_chosen_by_the_suite_s_names(small_operands):
    ops, there = small_operands(TINY[0]), SimpleNamespace()
    found = [
        (name, about["layout"])
        for names in (["torch"], ["torch:compile", "other"])
        for name, about, _ in AppendBench(ops, there, names).others
    ]
    assert found == [
        ("torch", "NHD"), ("torch:compile", "NHD"), ("flashinfer", "HND"), ("flashinfer", "NHD"),
    ]  # fmt: skip
    assert not AppendBench(ops, None, ["other"]).others


def test_fused_operands_are_views(small_operands):
    one = small_operands(TINY[1]).sets[0]
    assert one.q.stride() == one.k.stride() == (8 * 64, 64, 1)
    assert one.out.is_contiguous()
    assert one.cache("HND")[0].shape == one.cache("NHD")[0].shape
    assert torch.equal(torch.tensor(one.cache("HND")[0].shape[1:]), torch.tensor([16, 2, 64]))
