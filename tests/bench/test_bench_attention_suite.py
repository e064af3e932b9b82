"""The whole suite on CPU tensors and a virtual clock: the reference computes."""

from __future__ import annotations

import json
from functools import partial

import pytest
from click.testing import CliRunner

import smkern.bench.attention.suite as suite
from smkern.bench.attention import group as attention_group
from smkern.bench.attention import providers as attention_providers
from smkern.bench.attention.flashinfer import FlashInfer
from smkern.measure.attention import AttentionCase, AttentionOperands
from smkern.profile import load_profile
from tests.bench.doubles import Meter, Partitions

HEADS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64}
TINY = (
    AttentionCase("tiny-decode", "decode", (1, 1), (37, 5), **HEADS),
    AttentionCase("tiny-prefill", "prefill", (24, 24), (24, 24), **HEADS),
    AttentionCase("tiny-mixed", "mixed", (1, 12), (37, 40), **HEADS),
)


@pytest.fixture
def on_cpu(cuda, monkeypatch):
    """Every launch takes 300 us; SDPA has neither of its GPU backends here."""
    untimed = attention_providers.our_call

    def our_call(ops, plan, backend):
        call = untimed(ops, plan, backend)

        def timed(i):
            cuda.work_us(300.0)
            return call(i)

        return timed

    monkeypatch.setattr(suite, "CASES", TINY)
    monkeypatch.setattr("smkern.bench.attention.cases.CASES", TINY)
    monkeypatch.setattr(suite, "Partitions", partial(Partitions, cuda=cuda))
    monkeypatch.setattr(suite, "power_meter", Meter)
    monkeypatch.setattr("smkern.bench.sitting.trim_memory", lambda keep: None)
    monkeypatch.setattr("smkern.bench.frame.device_info", lambda: load_profile("h200").info)
    monkeypatch.setattr(suite, "AttentionOperands", partial(AttentionOperands, device="cpu"))
    monkeypatch.setattr(FlashInfer, "find", lambda: FlashInfer(None, None, "not here", None))
    monkeypatch.setattr(attention_providers, "our_call", our_call)
    monkeypatch.setattr(attention_providers, "_selection", lambda *a: {"config": "reference"})
    monkeypatch.setattr(attention_group, "PLAN_CALLS", 2)
    plan_of = attention_group.plan_of

    def timed_plan(ops, place, out=None):
        cuda.work_us(3.0)
        return plan_of(ops, place, out)

    monkeypatch.setattr(attention_group, "plan_of", timed_plan)


def test_the_suite_measures_writes_and_resumes(on_cpu, tmp_path):
    out = tmp_path / "attention.json"
    ran = CliRunner().invoke(suite.command, ["--out", str(out), "--budgets", "16"])
    assert ran.exit_code == 0, ran.output
    assert "without FlashInfer, its cells are left out: not here" in ran.output
    assert "0 groups left" in ran.output
    data = json.loads(out.read_text())
    by = {(c["op"], c["provider"], c["case"]["name"], c["placement"]): c for c in data["cells"]}
    for case in TINY:
        ours = by["paged_attention", "smkern", case.name, "spread"]
        assert ours["us"] == pytest.approx(300.0, rel=0.01), ours
        assert (ours["config"], ours["layout"], ours["watts"]) == ("reference", "HND", 400.0)
        assert ours["case"] == case.about
        plan = by["plan_attention", "smkern", case.name, "spread"]
        assert plan["us"] == pytest.approx(3.0, rel=0.01), plan
    assert data["meta"]["flashinfer"] is None
    assert data["summary"]["plan_us"]["met"] is True
    ran = CliRunner().invoke(suite.command, ["--out", str(out), "--budgets", "16,24", "--resume"])
    assert ran.exit_code == 0, ran.output
    assert len(json.loads(out.read_text())["cells"]) == 2 * len(data["cells"])


def test_a_deadline_leaves_groups(on_cpu, tmp_path):
    out = tmp_path / "attention.json"
    options = ["--out", str(out), "--budgets", "16", "--time-limit-s", "0"]
    ran = CliRunner().invoke(suite.command, options)
    assert ran.exit_code == 0, ran.output
    assert "0 cells" in ran.output
    assert "3 groups left" in ran.output
