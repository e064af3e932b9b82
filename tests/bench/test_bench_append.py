"""The append suite: its cases, and a run on CPU tensors and a virtual clock."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from click.testing import CliRunner

from smkern.bench.append import providers, suite
from smkern.bench.append.cases import BUDGETS, CASES, summarize
from smkern.bench.append.providers import AppendBench, torch_call
from smkern.bench.cases import Sizes, groups_of, named
from smkern.bench.plots import draw
from smkern.bench.results import Results, load_results
from smkern.bench.rows import loses_to_best
from smkern.bench.tables.markdown import NOT_MEASURED
from smkern.bench.tables.operators import append_table
from smkern.measure.append import AppendCase, AppendOperands
from tests.bench.doubles import FakePartitions, run_suite, slowed

SIZES = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64}
TINY = (
    AppendCase("plain", 8, **SIZES),
    AppendCase("norm-rope", 96, **SIZES),
    AppendCase("fp8", 8, **SIZES),
)


def test_cases():
    assert len({case.name for case in CASES}) == len(CASES) == 15
    assert all(sum(case.q_lens) == case.tokens for case in CASES)
    assert len(groups_of(CASES, BUDGETS)) == 15 * 7
    long = next(case for case in CASES if case.name == "norm-rope-8192")
    assert long.q_lens == (2048,) * 4
    assert long.bytes_moved == 8192 * 128 * (2 * 8 * 4 + 32 * 4 + 4)
    assert [case.tokens for case in named(CASES, ["fp8-8"])] == [8, 8192]


@pytest.fixture
def small_operands(monkeypatch):
    monkeypatch.setattr(AppendCase, "num_sets", 2)
    return partial(AppendOperands, device="cpu")


@pytest.fixture
def on_cpu(virtual_gpu, monkeypatch, small_operands):
    """Our calls take 200 us and torch's 500; its compiler is not asked."""
    monkeypatch.setattr(suite, "SIZES", Sizes(TINY, TINY, BUDGETS, BUDGETS))
    monkeypatch.setattr(suite, "AppendOperands", small_operands)
    monkeypatch.setattr(suite, "flashinfer_with", lambda *parts: (None, "not here"))
    ours = slowed(providers.our_call, virtual_gpu, 200.0)
    monkeypatch.setattr(providers, "our_call", ours)
    theirs = slowed(lambda ops, compiled: torch_call(ops, False), virtual_gpu, 500.0)
    monkeypatch.setattr(providers, "torch_call", theirs)
    monkeypatch.setattr(providers, "selection", lambda *a: {"config": "reference"})


def test_the_suite_measures_writes_and_resumes(on_cpu, tmp_path):
    out = tmp_path / "append.json"
    output = run_suite(suite.command, out, "--budgets", "16")
    assert "its cells are left out: not here" in output
    assert "0 groups left" in output
    data = json.loads(out.read_text())
    by = {(c["op"], c["provider"], c["case"]["name"], c["placement"]): c for c in data["cells"]}
    for case in TINY:
        ours = by[case.op, "smkern", case.name, "spread"]
        assert ours["us"] == pytest.approx(200.0, rel=0.01), ours
        assert (ours["config"], ours["watts"]) == ("reference", 400.0)
        assert ours["case"] == case.about
        assert ours["vs_best"] == pytest.approx(2.5, rel=0.01)
        assert by[case.op, "torch", case.name, "default"]["us"] == pytest.approx(500.0, rel=0.01)
    assert data["summary"]["append_worst_vs_best"]["met"] is True
    run_suite(suite.command, out, "--budgets", "16,24", "--resume")
    placements = {(c["num_sms"], c["placement"]) for c in load_results(out).cells}
    assert placements == {(16, "spread"), (16, "default"), (24, "spread"), (24, "default")}


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


def test_peers_are_chosen_by_name(on_cpu, tmp_path):
    out = tmp_path / "append.json"
    run_suite(suite.command, out, "--budgets", "16", "--peers", "torch")
    assert {c["provider"] for c in json.loads(out.read_text())["cells"]} == {"smkern", "torch"}
    ran = CliRunner().invoke(suite.command, ["--out", str(out), "--peers", "vllm"])
    assert "no peer is named 'vllm'" in str(ran.exception)


def test_summary_names_what_was_not_measured():
    cell = {"op": "append_kv", "provider": "smkern", "num_sms": 16, "us": None, "error": "why",
            "case": {"name": "plain-8", "tokens": 8}}  # fmt: skip
    rows = summarize([cell])
    assert rows["append_not_measured"] == [{"name": "plain-8", "num_sms": 16, "error": "why"}]
    assert rows["append_worst_vs_best"]["value"] is None
    assert summarize([]) == {}
    assert loses_to_best(cell | {"vs_best": 0.9})
    assert not loses_to_best(cell)


def test_fused_operands_are_views(small_operands):
    one = small_operands(TINY[1]).sets[0]
    assert one.q.stride() == one.k.stride() == (8 * 64, 64, 1)
    assert one.out.is_contiguous()
    assert one.cache("HND")[0].shape == one.cache("NHD")[0].shape
    assert torch.equal(torch.tensor(one.cache("HND")[0].shape[1:]), torch.tensor([16, 2, 64]))


def test_table_and_picture(tmp_path):
    results = Results(meta={"gpu": "NVIDIA H200"})
    for tokens in (64, 512):
        for provider, us in (("smkern", 10.0), ("flashinfer", 20.0), ("torch:compile", 30.0)):
            case = {"name": f"plain-{tokens}", "tokens": tokens}
            results.add(
                {"op": "append_kv", "provider": provider, "case": case, "num_sms": 16,
                 "group_sms": 16, "us": us, "tbps": 10 / us, "fraction_of_ceiling": 0.5,
                 "vs_best": 2.0, "vs_best_again": 1.9}
            )  # fmt: skip
    assert "| plain-64 | 10.0 (1.90) |" in append_table(results.cells)
    assert append_table([]) == NOT_MEASURED
    (picture,) = draw("append", results, tmp_path)
    assert picture.name == "append.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert draw("append", Results(), tmp_path) == []
