"""The suite of e4m3 GEMMs: its cases, and a run on CPU tensors and a virtual clock."""

from __future__ import annotations

import json
import sys
from functools import partial
from types import ModuleType

import pytest

from smkern.bench import fp8, peers
from smkern.bench.cases import Sizes
from smkern.bench.fp8 import CASES, EVERY, Fp8Bench, Fp8Case, GemmOperands
from smkern.bench.fp8_grouped import GroupedCase, GroupedOperands
from smkern.bench.fp8_rows import summarize
from smkern.bench.tables.gemm import fp8_table
from smkern.ops.reference.fp8 import dequantize
from tests.bench.doubles import FakePartitions, run_suite, slowed

TINY = (
    Fp8Case("block", "tiny", 5, 256, 256),
    Fp8Case("row", "tiny", 3, 64, 128),
    Fp8Case("tensor", "tiny", 3, 64, 128),
    GroupedCase("block", "tiny", 64, "skewed", 128, 256, True, 8),
    GroupedCase("row", "tiny", 3, "even", 64, 128, False, 4),
)


def test_cases():
    assert len({case.name for case in EVERY}) == len(EVERY) == 48 + 24
    assert CASES[0].bytes_moved == 16 * 4096 + 6144 * 4096 + 2 * 16 * 6144
    assert CASES[0].flops == 2 * 16 * 6144 * 4096
    down = GroupedCase("row", "down", 64, "skewed", 2048, 768, False)
    assert (down.rows, sum(count > 0 for count in down.counts)) == (512, 112)
    assert down.bytes_moved == 112 * 2048 * 768 + 512 * (768 + 2 * 2048)
    assert down.flops == 2 * 512 * 2048 * 768


@pytest.fixture
def on_cpu(virtual_gpu, monkeypatch):
    monkeypatch.setattr(fp8, "SIZES", Sizes(TINY, TINY, (16,), (16,)))
    monkeypatch.setattr(fp8, "sets_for", lambda *_, **__: 2)
    monkeypatch.setattr(fp8, "GemmOperands", partial(GemmOperands, device="cpu"))
    monkeypatch.setattr(fp8, "GroupedOperands", partial(GroupedOperands, device="cpu"))
    for calls in fp8.CALLS.values():
        for name, us in (("smkern", 100.0), ("bf16", 180.0)):
            monkeypatch.setitem(calls, name, slowed(calls[name], virtual_gpu, us))


@pytest.mark.slow
def test_the_suite_measures_and_writes(on_cpu, tmp_path):
    out = tmp_path / "fp8.json"
    run_suite(fp8.command, out, "--budgets", "16", "--peers", "bf16")
    data = json.loads(out.read_text())
    ours = [c for c in data["cells"] if c["provider"] == "smkern"]
    assert [c["case"]["name"] for c in ours] == [case.name for case in TINY]
    assert all(c["us"] == pytest.approx(100.0, rel=0.01) for c in ours)
    assert data["summary"]["fp8_block_few_rows_times_bf16"]["value"] == pytest.approx(1.8, rel=0.01)
    assert all(0 < c["relative_error"] < 0.004 for c in data["cells"])
    assert data["summary"]["fp8_block_error_over_bf16"]["met"]
    assert data["summary"]["fp8_experts_error_over_bf16"]["cells"] == 2
    experts = data["summary"]["fp8_block_experts_64_tokens_times_bf16"]
    assert (experts["value"], experts["cells"]) == (pytest.approx(1.8, rel=0.01), 1)
    assert data["summary"]["fp8_not_measured"] == []


def test_a_wrong_result_is_no_time(cuda, monkeypatch):
    monkeypatch.setattr(fp8, "sets_for", lambda *_, **__: 2)
    bench = Fp8Bench(GemmOperands(TINY[0], device="cpu"))
    (ours,) = bench.ours(TINY[0], FakePartitions(cuda).at(16))
    bench.reset(TINY[0])
    assert "wrong result" in bench.complaint(TINY[0], ours, None)
    ours.make()(0)
    assert bench.complaint(TINY[0], ours, None) is None
    bench.ops.out[0] *= 2
    assert "wrong result" in bench.complaint(TINY[0], ours, None)


def deepgemm_stub():
    """DeepGEMM's functions, on CPU tensors."""
    module, layout = ModuleType("deep_gemm"), ModuleType("deep_gemm.utils.layout")
    sizes = []

    def gemm(a, b, out, *, disable_ue8m0_cast):
        out.copy_(dequantize(*a) @ dequantize(*b).T)

    def grouped(a, b, out, expert_of, *, disable_ue8m0_cast):
        assert not expert_of.any(), "of one expert"
        out.copy_(dequantize(*a) @ dequantize(*b)[0].T)

    module.set_num_sms = sizes.append
    module.fp8_gemm_nt, module.m_grouped_fp8_gemm_nt_contiguous = gemm, grouped
    layout.get_mn_major_tma_aligned_tensor = lambda scale: scale.t().contiguous().t()
    modules = {"deep_gemm": module, "deep_gemm.utils.layout": layout}
    return sizes, modules | {"deep_gemm.utils": ModuleType("deep_gemm.utils")}


@pytest.mark.slow
def test_flashinfer_takes_part_where_it_is_installed(on_cpu, tmp_path, monkeypatch):
    module = ModuleType("flashinfer.gemm")

    def gemm(a, w, a_scale, w_scale, *, out):
        assert a_scale.is_contiguous(), "by columns"
        out.copy_(dequantize(a, a_scale.t()) @ dequantize(w, w_scale).T)

    module.fp8_blockscale_gemm_sm90 = gemm
    package = ModuleType("flashinfer")
    package.__version__ = "9.9"
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    monkeypatch.setitem(sys.modules, "flashinfer.gemm", module)
    out = tmp_path / "fp8.json"
    run_suite(fp8.command, out, "--budgets", "16", "--peers", "flashinfer")
    data = json.loads(out.read_text())
    assert data["meta"]["flashinfer"] == "9.9"
    theirs = [c for c in data["cells"] if c["provider"] == "flashinfer"]
    assert {c["case"]["name"] for c in theirs} == {"block-tiny-5"}, "products by blocks alone"
    assert all(c["us"] > 0 for c in theirs)
    assert data["summary"]["fp8_block_times_flashinfer"]["cells"] == 1


@pytest.mark.slow
def test_deepgemm_takes_part_where_it_is_installed(on_cpu, tmp_path, monkeypatch):
    even = GroupedCase("block", "tiny", 16, "even", 128, 256, True, 1)
    monkeypatch.setattr(fp8, "SIZES", Sizes((*TINY, even), TINY, (16,), (16,)))
    sizes, modules = deepgemm_stub()
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(peers, "version", lambda name: "9.9")
    out = tmp_path / "fp8.json"
    run_suite(fp8.command, out, "--budgets", "16", "--peers", "deepgemm")
    data = json.loads(out.read_text())
    assert data["meta"]["deepgemm"] == "9.9"
    theirs = {
        c["case"]["name"]: c.get("us") or c["error"]
        for c in data["cells"]
        if c["provider"] == "deepgemm"
    }
    ragged = "block-experts-tiny-64-skewed"
    assert {*theirs} == {"block-tiny-5", even.name, ragged}, "by blocks alone"
    assert "multiples of 128 rows" in theirs.pop(ragged)
    assert all(us > 0 for us in theirs.values())
    assert data["summary"]["fp8_block_times_deepgemm"]["cells"] == 2
    assert {*sizes} == {16}


def test_peers_are_left_out_where_they_are_not_installed(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    meta = {}
    assert peers.installed(fp8.PEERS, meta) == ("bf16", "torch")
    assert meta == {"deepgemm": None, "flashinfer": None}
    said = capsys.readouterr().err
    assert "without DeepGEMM" in said
    assert "without FlashInfer" in said
    assert peers.installed(("torch",), meta) == ("torch",)


def test_a_summary_of_nothing_is_empty():
    assert summarize([]) == {}


def cell(provider, us, *, m=64, num_sms=24, scales="block", shape="qkv", **more):
    case = {"name": f"{scales}-{shape}-{m}", "m": m, "scales": scales}
    return {"provider": provider, "case": case, "num_sms": num_sms, "us": us} | more


def test_few_and_many_rows_are_told_apart():
    cells = [
        cell("smkern", 10.0, vs_best=1.5, relative_error=0.003),
        cell("bf16", 18.0, relative_error=0.002),
        cell("smkern", 100.0, m=1024, num_sms=84, vs_best=1.21),
        cell("bf16", 160.0, m=1024, num_sms=84),
        cell("smkern", 50.0, m=1024, num_sms=132, vs_best=1.0),
        cell("bf16", 90.0, m=1024, num_sms=132),
        cell("smkern", 50.0, m=1024, num_sms=24),
        cell("bf16", 50.0, m=1024, num_sms=24),
    ]
    found = summarize(cells)
    assert found["fp8_block_few_rows_times_bf16"]["value"] == pytest.approx(1.8)
    assert found["fp8_block_few_rows_times_bf16"]["met"]
    assert found["fp8_block_error_over_bf16"] == {
        "value": pytest.approx(1.5), "target": 1.2, "met": False, "cells": 1,
    }  # fmt: skip
    many = found["fp8_block_many_rows_times_bf16"]
    assert (many["value"], many["cells"]) == (pytest.approx((1.6 * 1.8) ** 0.5, abs=1e-3), 2)
    assert found["fp8_block_worst_times_bf16"]["value"] == pytest.approx(1.0)
    assert found["fp8_many_rows_vs_best"]["value"] == pytest.approx(1.1)
    assert found["fp8_row_many_rows_times_bf16"]["value"] is None


def test_the_table_has_means_over_the_products():
    def experts(provider, us, routing):
        name = f"row-experts-down-64-{routing}"
        case = {"name": name, "scales": "row", "experts": 8, "tokens": 64}
        return {"provider": provider, "case": case, "num_sms": 24, "us": us}

    cells = [
        cell("smkern", 10.0), cell("bf16", 20.0), cell("torch", None, error="no cluster"),
        cell("smkern", 10.0, shape="out"), cell("bf16", 5.0, shape="out"),
        cell("smkern", 10.0, num_sms=132), cell("torch", 11.0, num_sms=132),
        cell("torch", 12.0, num_sms=132), cell("deepgemm", 9.0, num_sms=132),
        experts("smkern", 10.0, "even"), experts("bf16", 40.0, "even"),
        experts("smkern", 10.0, "skewed"), experts("bf16", 10.0, "skewed"),
    ]  # fmt: skip
    text = fp8_table(cells)
    assert "| scales of, rows | 24 | 132 |" in text
    assert "| block, 64 | 1.00 / - / - | - / 1.10 / 0.90 |" in text
    assert "| row, experts of 64 tokens | 2.00 / - / - |  |" in text
    found = summarize(cells)
    assert found["fp8_row_experts_64_tokens_times_bf16"]["met"]
    assert found["fp8_row_few_rows_times_bf16"]["value"] is None, "experts are rows of their own"
