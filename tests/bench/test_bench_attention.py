"""The attention suite on CPU tensors and a virtual clock: the reference computes."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace

import pytest

import smkern
from smkern.bench.attention import beside, layouts, providers, suite
from smkern.bench.attention.beside import beside_cell
from smkern.bench.attention.cases import CASES, MIXED, SKEWED, SKEWED_LENGTHS
from smkern.bench.attention.flashinfer import FlashInfer
from smkern.bench.attention.providers import AttentionBench
from smkern.bench.cases import Sizes, groups_of
from smkern.bench.cells import cell_head
from smkern.bench.contention import Beside
from smkern.bench.results import load_results
from smkern.measure.attention import BUDGETS, AttentionCase, AttentionOperands
from smkern.measure.timing import Timing
from smkern.tuning.attention.shapes import AttentionConfig
from tests.bench.doubles import FakePartitions, run_suite

HEADS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64}
TINY = (
    AttentionCase("tiny-decode", "decode", (1, 1), (37, 5), **HEADS),
    AttentionCase("tiny-prefill", "prefill", (24, 24), (24, 24), **HEADS),
    AttentionCase("tiny-mixed", "mixed", (1, 1, 21), (37, 5, 40), **HEADS),
)


def test_cases():
    assert len({case.name for case in CASES}) == len(CASES) == 10
    assert len(groups_of(CASES, BUDGETS)) == len(CASES) * len(BUDGETS)
    assert SKEWED.batch == 32
    assert set(SKEWED.kv_lens) == set(SKEWED_LENGTHS)
    assert [case.name for case in CASES if case.is_dense] == [
        "prefill-1x8192",
        "prefill-4x2048",
        "prefill-16x512",
    ]
    assert MIXED.num_decode == 64


@pytest.fixture
def bench(cuda):
    """The providers of the dense case, without FlashInfer."""
    return AttentionBench(AttentionOperands(TINY[1], device="cpu"), FlashInfer(None, None))


def test_our_call_passes_the_plan_and_the_backend(bench, cuda, monkeypatch):
    seen, plans = [], []
    monkeypatch.setattr(smkern, "paged_attention", lambda *a, **options: seen.append(options))
    monkeypatch.setattr(smkern, "plan_attention", lambda *a, **o: plans.append(o) or "plan")
    for one in bench.ours(TINY[1], FakePartitions(cuda).at(16)):
        one.make()(0)
    assert [options["backend"] for options in seen] == [None, "cuda", "triton"]
    assert all(options["plan"] == "plan" and options["max_q_len"] == 24 for options in seen)
    assert len(plans) == 1
    assert (plans[0]["max_kv_len"], plans[0]["num_tokens"]) == (24, 48)


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.kind)
def test_the_public_operator_is_right_on_cpu_tensors_and_a_missing_row_is_not(cuda, case):
    bench = AttentionBench(AttentionOperands(case, device="cpu"), FlashInfer(None, None))
    ours = next(iter(bench.ours(case, FakePartitions(cuda).at(16))))
    bench.reset(case)
    out = ours.make()(0)
    assert bench.complaint(case, ours, out) is None
    out[-1] = float("nan")
    assert "wrong result" in bench.complaint(case, ours, out)


def test_a_configuration_in_one_word():
    assert providers.describe(AttentionConfig("triton")) == "triton"
    config = AttentionConfig("cuda", ctas_per_sm=3, teams=2)
    assert providers.describe(config) == "cuda:ctas_per_sm=3:teams=2"


def test_peers_without_flashinfer_are_those_of_torch(bench, cuda):
    at = FakePartitions(cuda).at(16)
    assert [one.name for one in bench.peers(TINY[1], at)] == ["sdpa:cudnn", "sdpa:flash"]


def test_a_plan_that_cannot_be_made_says_why(virtual_gpu, bench, monkeypatch):
    monkeypatch.setattr(providers, "plan_of", lambda *a, **o: 1 / 0)
    (group,) = groups_of((TINY[1],), (16,))
    (cell,) = bench.more(group, FakePartitions(virtual_gpu), [])
    assert cell["error"] == "ZeroDivisionError: division by zero"


def test_beside_products_a_step_is_held_against_the_reader_there(virtual_gpu, monkeypatch):
    case, at = TINY[0], FakePartitions(virtual_gpu)
    for place in (at.at(16), at.at(116)):
        place.stream.cuda_stream = 1
    reader = SimpleNamespace(launch=lambda *a: None, tbps=lambda us: 2.0)
    monkeypatch.setattr(beside, "Reader", lambda shape: reader)
    dense = SimpleNamespace(calls=lambda: {"smkern": lambda i: None})
    monkeypatch.setattr(beside, "Dense", lambda: dense)
    monkeypatch.setattr(beside, "DeviceClock", lambda stream: None)
    monkeypatch.setattr(beside.Load, "of", lambda call, stream: None)
    us = case.bytes_moved / 1.5e6
    timings = {"attention": Timing((us,)), "read": Timing((7.0,))}
    found = Beside(timings, None, 1467.0)
    monkeypatch.setattr(beside, "time_beside", lambda probes, neighbour, clock: found)
    cell = beside_cell(case, lambda i: None, at.at(16), at.at(116))
    assert (cell["tbps"], cell["fraction_of_beside_floor"]) == (1.5, 0.75)
    assert cell["us"] / cell["beside_floor_us"] == pytest.approx(1 / 0.75, rel=1e-2)
    assert (cell["case"]["beside"], cell["sm_mhz"]) == ("dense", 1467.0)


@pytest.fixture
def on_cpu(virtual_gpu, monkeypatch):
    """Every launch takes 300 us, a plan 3; SDPA has neither of its GPU backends here."""
    untimed, plan_of = providers.our_call, providers.plan_of

    def our_call(ops, plan, backend):
        call = untimed(ops, plan, backend)

        def timed(i):
            virtual_gpu.work_us(300.0)
            return call(i)

        return timed

    def timed_plan(ops, place, out=None):
        virtual_gpu.work_us(3.0)
        return plan_of(ops, place, out)

    for module, cases in ((suite, TINY), (layouts, TINY[:1])):
        monkeypatch.setattr(module, "SIZES", Sizes(cases, cases, BUDGETS, BUDGETS))
        monkeypatch.setattr(module, "AttentionOperands", partial(AttentionOperands, device="cpu"))
        monkeypatch.setattr(module, "flashinfer_with", lambda: (None, "not here"))
    monkeypatch.setattr(providers, "our_call", our_call)
    monkeypatch.setattr(providers, "selection", lambda *a: {"config": "reference"})
    monkeypatch.setattr(providers, "PLAN_CALLS", 2)
    monkeypatch.setattr(providers, "plan_of", timed_plan)
    monkeypatch.setattr(suite, "device_info", lambda: SimpleNamespace(num_sms=132))
    monkeypatch.setattr(providers, "beside_cell", told_of_the_complement)


def told_of_the_complement(case, call, place, other):
    head = cell_head(beside.OP, case.about, place, "smkern") | {"group_sms": place.num_sms}
    return head | {"us": 1.0, "fraction_of_beside_floor": 0.9, "other": other.num_sms}


def test_the_suite_measures_writes_and_resumes(on_cpu, tmp_path):
    out = tmp_path / "attention.json"
    output = run_suite(suite.command, out, "--budgets", "16")
    assert "without FlashInfer, its cells are left out: not here" in output
    assert "0 groups left" in output
    data = json.loads(out.read_text())
    by = {(c["op"], c["provider"], c["case"]["name"], c["placement"]): c for c in data["cells"]}
    for case in TINY:
        ours = by["paged_attention", "smkern", case.name, "spread"]
        assert ours["us"] == pytest.approx(300.0, rel=0.01), ours
        assert (ours["config"], ours["layout"], ours["watts"]) == ("reference", "HND", 400.0)
        assert ours["case"] == case.about
        plan = by["plan_attention", "smkern", case.name, "spread"]
        assert plan["us"] == pytest.approx(3.0, rel=0.01), plan
    others = {
        c["case"]["name"]: c["other"] for c in data["cells"] if c["op"] == "paged_attention_beside"
    }
    assert others == {"tiny-decode": 116}
    assert data["meta"]["flashinfer"] is None
    assert data["summary"]["plan_us"]["met"] is True
    run_suite(suite.command, out, "--budgets", "16,24", "--resume")
    placements = {(c["num_sms"], c["placement"]) for c in load_results(out).cells}
    assert placements == {(16, "spread"), (16, "default"), (24, "spread"), (24, "default")}


def test_layouts_are_measured_alone(on_cpu, tmp_path):
    run_suite(layouts.command, tmp_path / "layouts.json", "--budgets", "16")
    cells = load_results(tmp_path / "layouts.json").cells
    assert [(c["op"], c["provider"]) for c in cells] == [
        ("paged_attention", "smkern"),
        ("paged_attention", "smkern:cuda"),
        ("paged_attention", "smkern:triton"),
    ]


def test_a_deadline_leaves_groups(on_cpu, tmp_path):
    output = run_suite(suite.command, tmp_path / "x.json", "--budgets", "16", "--time-limit-s", "0")
    assert "0 cells" in output
    assert "3 groups left" in output
