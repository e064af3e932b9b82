"""The operator suite: its cases, its rivals on CPU tensors, and a run on a virtual clock."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from smkern.bench.cases import Sizes, groups_of, named
from smkern.bench.cells import cell_head
from smkern.bench.frame import Provider
from smkern.bench.ops import cases, suite
from smkern.bench.ops.cases import (
    BUDGETS,
    CASES,
    MORE_CASES,
    USUAL_CASES,
    OpCase,
    expert_counts,
)
from smkern.bench.ops.providers import BUILDERS, OpBench
from smkern.bench.ops.rivals import Rivals, relative_error
from smkern.bench.ops.rows import summarize
from smkern.bench.plots import draw
from smkern.bench.results import Results
from smkern.bench.tables.operators import ops_table, sample_table
from smkern.device import Budget
from smkern.measure.append import AppendCase
from smkern.measure.partitions import Place
from tests.bench.doubles import run_suite, slowed
from tests.bench.test_bench_append import TINY as APPENDS

TINY = (
    cases.norm("rms_norm", 5, 64),
    cases.norm("add_rms_norm", 5, 64),
    cases.silu_and_mul(5, 32),
    cases.embedding(5, 64, 40),
    cases.gemm_swiglu(5, 32, 64),
    cases.gemm_residual(5, 32, 64),
    cases.sample(9, 300),
    cases.topk_softmax(5, 16, 4),
    cases.moe_permute(5, 64, 16, 4),
    cases.grouped_gemm(8, "even", swiglu=True, hidden=64, inner=32, experts=8, top_k=2),
    cases.grouped_gemm(8, "skewed", swiglu=False, hidden=64, inner=32, experts=8, top_k=2),
    cases.moe_unpermute(5, 64, 4),
)
by_name = pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)


@pytest.fixture(autouse=True)
def two_sets(monkeypatch):
    monkeypatch.setattr(OpCase, "num_sets", 2)


def rivals_of(case: OpCase) -> Rivals:
    return BUILDERS[case.op](case, None, "cpu")


def test_cases():
    assert len(USUAL_CASES) == 29
    assert len({case.name for case in (*USUAL_CASES, *MORE_CASES)}) == 29 + 13
    assert {case.op for case in CASES} == set(BUILDERS)
    assert len(groups_of(USUAL_CASES, BUDGETS)) == 29 * 6
    by = {case.name: case for case in CASES}
    assert by["add_rms_norm-8192x4096"].bytes_moved == 2 * (4 * 8192 + 1) * 4096
    assert by["gemm_swiglu-64x12288x4096"].flops == 2 * 64 * 2 * 12288 * 4096
    assert by["sample-128x151936"].bytes_moved == 2 * 128 * 151936
    assert by["sample-128x151936"].about == {
        "name": "sample-128x151936", "batch": 128, "vocab": 151936, "dtype": "bf16",
    }  # fmt: skip
    assert [c.name for c in named(USUAL_CASES, ["topk"])] == [
        "topk_softmax-64x128x8",
        "topk_softmax-4096x128x8",
    ]


def test_experts_that_no_row_chose_are_not_read():
    assert expert_counts(10, 8, "even") == (2, 2, 1, 1, 1, 1, 1, 1)
    assert expert_counts(64, 16, "skewed")[:2] == (16, 16)
    assert expert_counts(64, 16, "skewed")[-2:] == (0, 0)
    assert sum(expert_counts(513, 128, "skewed")) == 513
    with pytest.raises(ValueError, match="'random'"):
        expert_counts(8, 8, "random")
    sizes = {"swiglu": False, "hidden": 64, "inner": 32, "experts": 8, "top_k": 1}
    few = cases.grouped_gemm(4, "even", **sizes)
    assert few.bytes_moved == 2 * (4 * 64 * 32 + 4 * (64 + 32))


@by_name
def test_torch_s_sequence_is_right_and_a_wrong_result_is_no_time(case):
    rivals = rivals_of(case)
    rivals.reset()
    results = rivals.call(rivals.torch)(0)
    assert rivals.complaint(results) is None
    rivals.reset()
    again = rivals.call(rivals.torch)(0)
    assert rivals.complaint(again) is None, "the reset undoes what a step changed in place"
    if case.op == "sample":
        worst = rivals.sets[0][0].float().argmin(-1).int()
        assert "9 of 9 tokens" in rivals.complaint((worst,))
    else:
        assert "wrong result" in rivals.complaint(
            [r.roll(1, 0) if r.dtype == torch.int32 else 1 + 1.5 * r for r in again]
        )


@by_name
def test_ours_is_right_wherever_it_is_there(case):
    rivals = rivals_of(case)
    rivals.reset()
    assert rivals.complaint(rivals.call(rivals.ours)(0)) is None


@by_name
def test_outputs_are_poisoned(case):
    rivals = rivals_of(case)
    rivals.reset()
    if rivals.reference and case.op not in ("moe_permute", "gemm_residual"):
        assert rivals.complaint([rivals.sets[0][-1]] * len(rivals.reference)) is not None


def test_torch_s_own_operators_are_rivals_too():
    rivals = rivals_of(TINY[0])
    assert rivals.complaint(rivals.call(rivals.others["torch:rms_norm"])(0)) is None
    rivals = rivals_of(TINY[5])
    assert rivals.complaint(rivals.call(rivals.others["cublas:addmm"])(0)) is None


def test_an_integer_is_right_or_wrong():
    offsets = torch.arange(1000, dtype=torch.int32)
    assert relative_error(offsets, offsets.clone()) == 0
    assert relative_error(offsets, offsets.index_fill(0, torch.tensor([7]), 8)) == float("inf")


def test_flashinfer_s_calls_are_as_its_signatures_say():
    """Its operators by name, with a module that records."""
    calls = []

    def record(name):
        return lambda *args, **options: calls.append((name, len(args), sorted(options)))

    module = SimpleNamespace(
        norm=SimpleNamespace(rmsnorm=record("rmsnorm"), fused_add_rmsnorm=record("add")),
        activation=SimpleNamespace(silu_and_mul=record("silu")),
        sampling=SimpleNamespace(
            softmax=record("softmax"),
            top_k_top_p_sampling_from_probs=record("probs"),
            top_k_top_p_sampling_from_logits=record("logits"),
        ),
    )
    for case in (*TINY[:3], TINY[4], TINY[6]):
        rivals = BUILDERS[case.op](case, module, "cpu")
        for name in ("flashinfer", "flashinfer:logits"):
            if name in rivals.others:
                rivals.call(rivals.others[name])(0)
    assert calls == [
        ("rmsnorm", 3, ["out"]), ("add", 4, []), ("silu", 2, []), ("silu", 2, []),
        ("softmax", 2, []), ("probs", 3, ["filter_apply_order", "offset", "seed"]),
        ("logits", 3, ["offset", "seed"]),
    ]  # fmt: skip


@pytest.fixture
def on_cpu(virtual_gpu, monkeypatch):
    """Torch's sequence as ours takes 200 us, as torch's 500; its compiler is not asked."""
    chosen, more = (TINY[1], TINY[6], APPENDS[1]), (APPENDS[0], APPENDS[2])
    monkeypatch.setattr(suite, "SIZES", Sizes(chosen, chosen, BUDGETS, BUDGETS, more))
    monkeypatch.setattr(AppendCase, "num_sets", 2)
    monkeypatch.setattr("smkern.bench.ops.append.selection", lambda *a: {})
    monkeypatch.setattr(suite, "flashinfer_with", lambda *parts: (None, "not here"))
    monkeypatch.setattr(suite, "ops_suite", partial(suite.ops_suite, device="cpu"))
    monkeypatch.setattr(suite, "compile_gemms", lambda cases, budgets: 0)

    def ours(self, case, place):
        make = slowed(self.rivals.call, virtual_gpu, 200.0)
        return [Provider("smkern", place, lambda: make(self.rivals.torch))]

    monkeypatch.setattr(OpBench, "ours", ours)
    monkeypatch.setattr(Rivals, "call", slowed(Rivals.call, virtual_gpu, 300.0))


def test_the_suite_measures_writes_and_resumes(on_cpu, tmp_path):
    out = tmp_path / "ops.json"
    output = run_suite(suite.command, out, "--budgets", "16", "--peers", "torch")
    assert "its cells are left out: not here" in output
    assert "0 groups left" in output
    data = json.loads(out.read_text())
    by = {(c["op"], c["provider"], c["placement"]): c for c in data["cells"]}
    ours = by["add_rms_norm", "smkern", "spread"]
    assert ours["us"] == pytest.approx(500.0, rel=0.01)
    assert ours["vs_best"] == pytest.approx(0.6, rel=0.01)
    assert "us_again" in ours, "a losing cell is measured again"
    assert by["sample", "torch", "default"]["us"] == pytest.approx(300.0, rel=0.01)
    assert by["qk_norm_rope_append", "torch", "spread"]["us"]
    assert data["summary"]["worst_vs_best"]["add_rms_norm"]["met"] is False
    assert data["meta"]["without_flashinfer"] == {}
    run_suite(suite.command, out, "--budgets", "16,32", "--peers", "torch", "--resume")
    assert {cell["num_sms"] for cell in json.loads(out.read_text())["cells"]} == {16, 32}


def test_appends_of_every_kind_are_measured_where_they_are_named(on_cpu, tmp_path):
    out = tmp_path / "ops.json"
    options = "--cases", "plain,norm-rope,fp8", "--budgets", "16", "--peers", "torch"
    run_suite(suite.command, out, *options)
    cells = json.loads(out.read_text())["cells"]
    for case in APPENDS:
        own = [c for c in cells if (c["op"], c["case"]) == (case.op, case.about)]
        assert [(c["provider"], c["placement"]) for c in own] == [
            ("smkern", "spread"), ("torch", "spread"), ("torch", "default"),
        ]  # fmt: skip
        assert all(c["us"] for c in own)
        assert own[0]["vs"].keys() == {"torch"}


def made(case: OpCase, num_sms: int, us: float, provider: str = "smkern", **values):
    place = Place(Budget(num_sms, "mask"), None, "spread")
    tbps = case.bytes_moved / us / 1e6
    return cell_head(case.op, case.about, place, provider) | {
        "group_sms": num_sms, "us": us, "tbps": tbps, "fraction_of_bandwidth": tbps / 3.0,
        "fraction_of_ceiling": tbps / 3.0, "tflops": 1.0,
    } | values  # fmt: skip


def test_rows():
    norm, sampled = cases.norm("add_rms_norm", 8192), cases.sample(128)
    floor = norm.bytes_moved / 3e6
    rows = summarize(
        [
            made(norm, 16, floor / 0.85, vs_best=0.98, vs_best_again=1.01),
            made(norm, 32, floor / 0.75, vs_best=1.2),
            made(sampled, 16, 2.5 * sampled.bytes_moved / 3e6, vs_best=4.0),
            made(sampled, 32, 1.0) | {"us": None, "error": "why"},
        ]
    )
    assert rows["worst_vs_best"]["add_rms_norm"]["value"] == 1.01
    assert rows["worst_vs_best"]["add_rms_norm"]["losing"] == 0
    share = rows["bandwidth_of_8192_tokens"]["add_rms_norm"]
    assert (share["value"], share["met"]) == (0.75, False)
    assert rows["bandwidth_of_8192_tokens"]["qk_norm_rope_append"]["value"] is None
    assert rows["sample_reads_of_logits"]["value"] == 2.5
    assert rows["sample_reads_of_logits"]["met"] is True
    assert rows["not_measured"] == [{"name": sampled.name, "num_sms": 32, "error": "why"}]
    assert summarize([]) == {}


def test_tables_and_picture(tmp_path):
    norm, sampled = cases.norm("add_rms_norm", 8192), cases.sample(128)
    results = Results(meta={"gpu": "NVIDIA H200"})
    for num_sms in (16, 132):
        results.add(made(norm, num_sms, 100.0, vs_best=1.5, best_peer="flashinfer"))
        results.add(made(norm, num_sms, 150.0, "flashinfer"))
        results.add(made(sampled, num_sms, 50.0, vs_best=0.9, best_peer="torch"))
    text = ops_table(results.cells)
    assert "| us (x best peer) \\ SMs | 16 | 132 |" in text
    assert "| add_rms_norm 8192x4096 | 100.0 (1.50) | 100.0 (1.50) |" in text
    assert "| sample 128x151936 | 50.0 (**0.90**) |" in text
    assert "| 128 rows | 3.9 | 3.9 |" in sample_table(results.cells)
    (picture,) = draw("ops", results, tmp_path)
    assert picture.name == "ops.png"
