"""The runtime suite on CPU tensors: a small model, and this process as the device."""

from __future__ import annotations

import gc
import json
import weakref
from contextlib import contextmanager, nullcontext
from itertools import groupby
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from smkern.bench.model.cases import ModelPlan
from smkern.bench.model.model import Model
from smkern.bench.runtime import steady_bench, suite
from smkern.bench.runtime.cases import RuntimePlan, gain_name, gap_name
from smkern.bench.runtime.chunked import schedule
from smkern.bench.runtime.figures import Spans, common, percentile, rate
from smkern.bench.runtime.model_steps import pieces_of
from smkern.bench.runtime.rows import gains, summarize
from smkern.bench.runtime.smkern_steps import SmkernSteps
from smkern.bench.runtime.stamps import HostStamps
from smkern.bench.runtime.steady import Pace, paced
from smkern.bench.runtime.steady_bench import SteadyBench
from smkern.bench.runtime.stock_steps import StockSteps
from smkern.bench.tables.runtime import gains_table
from smkern.measure.captured import Captured
from smkern.models import preset
from smkern.rope import Rope
from smkern.runtime.host_device import HostDevice
from smkern.runtime.place import Place
from tests.bench.doubles import run_suite
from tests.bench.torch_kernels import TorchKernels

pytestmark = pytest.mark.slow

PLAN = RuntimePlan("qwen3-8b", (60_000, 90_000), (24, 40), (4, 12), batch=2, context=16, tokens=40)
SIZES = {"num_layers": 2, "hidden_size": 64, "num_q_heads": 2, "num_kv_heads": 1, "head_dim": 64,
         "vocab_size": 96, "intermediate_size": 96, "dtype": torch.float32}  # fmt: skip


def small_model() -> Model:
    config = preset("qwen3-8b").replace(**SIZES, rope=Rope(64, theta=1e6))
    return Model(ModelPlan(PLAN.model, (PLAN.batch,), PLAN.tokens), "cpu", config)


def small_steps(provider, model, plan, marks):
    given = plan, model, marks, lambda place: None
    return SmkernSteps(*given) if provider == "smkern" else StockSteps(*given, TorchKernels())


@contextmanager
def small_bench(model, plan, provider, seconds):
    device, decode, prefill = HostDevice(rungs=plan.rungs), HostStamps(), HostStamps()
    steps = small_steps(provider, model, plan, decode)
    yield SteadyBench(plan, steps, device, decode, prefill, seconds=0.05)


@pytest.fixture
def small(monkeypatch):
    for module in ("cases", "model"):
        monkeypatch.setattr(f"smkern.bench.model.{module}.CONTEXT", 16)
    monkeypatch.setattr("smkern.bench.model.model.ROOM", 32)
    monkeypatch.setattr(steady_bench, "made_model", lambda plan: small_model())
    monkeypatch.setattr(steady_bench, "open_bench", small_bench)
    monkeypatch.setattr(suite, "PLANS", (PLAN,))
    monkeypatch.setattr(suite, "device_info", lambda: None)
    monkeypatch.setattr("smkern.bench.runtime.subjects.STOCK_RUNGS", {PLAN.model: (24,)})
    for name, value in {
        "switch.SWITCHES": 3,
        "switch.RATE_S": 0.05,
        "launching.ROUNDS": 1,
        "chunked.LEAST_STEPS": 6,
    }.items():
        monkeypatch.setattr(f"smkern.bench.runtime.{name}", value)


def run(path, *options: str) -> list:
    run_suite(suite.command, path, *options)
    return json.loads(path.read_text())["cells"]


def named(cells, name):
    return [cell for cell in cells if cell["case"]["name"] == name]


def test_every_steady_subject_yields_its_cells(small, tmp_path):
    only = "aggregated,steady,gaps,layerwise,switch,stock"
    cells = run(tmp_path / "runtime.json", "--only", only)
    assert [c for c in cells if c.get("error")] == []
    assert [c["case"]["rung"] for c in named(cells, "steady") if c["provider"] == "smkern"] == [
        24,
        40,
    ]
    for limit in PLAN.limits_ms:
        ours, stock = named(cells, gain_name(limit))
        assert (ours["provider"], stock["provider"]) == ("smkern", "stock")
        assert ours["value"] == pytest.approx(
            ours["mux_tokens_per_ms"] / ours["aggregated_tokens_per_ms"], rel=1e-3, abs=1e-4
        )
        assert ours["bound"] > 0
    for name in (gap_name(1), gap_name(2), "switch_us", "switch_handover_us_p99"):
        assert named(cells, name)[0]["value"] >= 0
    assert {c["case"]["beside"] for c in named(cells, "layerwise_overhead_fraction")} == {
        False,
        True,
    }


def test_a_resumed_run_measures_what_is_left(small, tmp_path, monkeypatch):
    path = tmp_path / "runtime.json"
    run(path, "--only", "steady", "--rungs", "24")
    prepare = SteadyBench.prepare

    def prepared(self, *rungs) -> None:
        assert rungs == (40,)
        prepare(self, *rungs)

    monkeypatch.setattr(SteadyBench, "prepare", prepared)
    cells = run(path, "--only", "steady", "--rungs", "24,40", "--resume")
    assert [c.get("error") for c in named(cells, "steady")] == [None, None]


def test_rounds_visit_both_sides_by_turns_with_models_made_once(small, tmp_path, monkeypatch):
    opened, visited = [], []
    together, mixed = SteadyBench.together, SmkernSteps.mixed

    @contextmanager
    def counted(model, plan, provider, seconds):
        opened.append(provider)
        with small_bench(model, plan, provider, seconds) as bench:
            yield bench

    def seen(name, method):
        def call(self, *args, **more):
            visited.append(name)
            return method(self, *args, **more)

        return call

    monkeypatch.setattr(steady_bench, "open_bench", counted)
    monkeypatch.setattr(SteadyBench, "together", seen("steady", together))
    monkeypatch.setattr(SmkernSteps, "mixed", seen("chunked", mixed))
    path = tmp_path / "runtime.json"
    cells = run(path, "--only", "aggregated,steady", "--rungs", "24", "--rounds", "2")
    assert [c for c in cells if c.get("error")] == []
    assert opened == ["smkern"]
    assert [name for name, _ in groupby(visited)] == ["chunked", "steady"] * 2
    (both,) = named(cells, "steady")
    assert both["fraction_of_beside_floor"] >= 0
    assert both["value"] == pytest.approx(sum(both["rounds"]) / 2)
    assert {c["rounds"] for c in named(cells, gain_name(PLAN.limits_ms[0]))} == {2}
    curve = named(cells, "mixed_forward")
    assert [(c["case"]["rows"], c["chunk"], len(c["rounds"])) for c in curve] == [
        (4, 2, 2),
        (12, 10, 2),
    ]
    assert list(curve[0]["by_start_ms"]) == ["0", "19", "38"]
    assert "mixed_forward" not in str(summarize(cells))


def test_what_fails_is_a_cell_and_the_rest_goes_on(small, tmp_path, monkeypatch):
    monkeypatch.setattr(SteadyBench, "prepare", lambda self, *rungs: 1 / 0)
    cells = run(tmp_path / "runtime.json", "--only", "steady,gaps")
    assert [c["error"] for c in cells] == ["ZeroDivisionError: division by zero"] * 3


def test_no_subject_by_that_name(tmp_path):
    result = CliRunner().invoke(suite.command, ["--only", "speed"])
    assert result.exit_code == 1
    assert "no subject is named 'speed'; there are queues," in str(result.exception)


@pytest.mark.parametrize("provider", ["smkern", "stock"])
def test_the_mixed_forward_computes_what_a_prompt_alone_does(small, provider):
    steps = small_steps(provider, small_model(), PLAN, HostStamps())
    whole = Place.whole(132)
    steps.prepare(whole)
    steps.layers(0, 2, whole)
    prompt = steps.prompt if provider == "stock" else steps.prompt.buffers
    expected = prompt.logits.clone()
    for start in range(0, PLAN.tokens, 8):
        forward = steps.mixed(8, start)
        forward.token_ids[:8] = steps.prompt.token_ids[start : start + 8]
        forward.run()
    assert torch.allclose(forward.logits[0], expected[0], atol=1e-4)


def test_stock_kernels_compute_the_same_model(small):
    model, whole = small_model(), Place.whole(132)
    ours, stock = (small_steps(name, model, PLAN, HostStamps()) for name in ("smkern", "stock"))
    for steps in (ours, stock):
        steps.prepare(whole)
    ours.prompt.token_ids.copy_(stock.prompt.token_ids)
    for steps in (ours, stock):
        steps.layers(0, 2, whole)
    assert torch.allclose(stock.prompt.logits, ours.prompt.buffers.logits, atol=1e-4)
    ours.decode_inputs.token_ids.copy_(stock.step.token_ids)
    for steps in (ours, stock):
        steps.decode(whole)
    assert torch.allclose(stock.step.logits, ours.decode_logits, atol=1e-4)


def test_a_step_is_captured_once_a_place_and_stamped(small):
    marks = HostStamps()
    steps = small_steps("smkern", small_model(), PLAN, marks)
    place = Place.of("decode", 24, 132)
    for _ in range(2):
        steps.prepare(place)
        steps.decode(place)
    assert len(marks.us()) == 4
    steps.close()
    with pytest.raises(KeyError):
        steps.decode(place)


def test_a_graph_keeps_what_it_reads(monkeypatch):
    """Its launches have the addresses of tensors that nothing else may hold."""

    class Step:
        runs = 0

        def run(self) -> None:
            self.runs += 1

    class Partition:
        stream = SimpleNamespace(synchronize=lambda: None)
        closed = False

        @contextmanager
        def capture(self, pool):
            yield SimpleNamespace(replay=lambda: None, close=lambda: setattr(self, "closed", True))

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    step, partition = Step(), Partition()
    captured, alive = Captured(step.run, partition, on_gpu=True), weakref.ref(step)
    assert step.runs == 2, "one loads kernels, one is captured"
    del step
    gc.collect()
    captured.replay()
    assert alive() is not None
    captured.close()
    assert partition.closed


def test_pieces_run_over_the_end_of_a_prompt():
    assert pieces_of(8, 0, 40) == [(8, 0)]
    assert pieces_of(8, 36, 40) == [(4, 36), (4, 0)]


def test_a_schedule_takes_the_largest_chunk_that_keeps_the_limit():
    times = {(size, at): size + at / 10 for size in (4, 8, 16) for at in (0, 20)}
    steps = schedule(times, 8.5, 40)
    assert [next(steps) for _ in range(5)] == [(8, 0), (4, 8), (4, 12), (4, 16), (4, 20)]
    assert next(schedule(times, 3.0, 40)) == (4, 0), "prompts go on"


def test_steps_gaps_and_rates_of_stamps():
    spans = Spans.of([0, 9, 10, 19, 22, 30, 31])
    assert spans == Spans((0, 10, 22), (9, 19, 30))
    assert spans.periods_us == [10, 11]
    assert spans.gap_shares == [0.1, 3 / 11]
    assert spans.within(5, 30) == Spans((10, 22), (19, 30))
    assert common([0, 100], [20, 120], settle=0.25) == (40, 100)
    assert rate([0, 10, 20, 30], 5, 5, 30) == 1e3 * 5 * 2 / 20
    with pytest.raises(ValueError, match="1 groups ended"):
        rate([0, 10], 5, 5, 30)
    assert [percentile(range(1, 101), share) for share in (0.5, 0.99)] == [50, 99]


def test_paced_steps_end_once_a_limit(small, tmp_path):
    with small_bench(small_model(), PLAN, "smkern", 0.05) as bench:
        (cell,) = paced(bench, 24, 40.0)
    assert cell["case"] == {"model": "qwen3-8b", "name": "paced", "rung": 24, "limit_ms": 40.0}
    assert cell["tbt_p50_ms"] > 20
    assert cell["value"] > 0


def test_a_pace_learns_how_long_a_step_takes():
    pace = Pace(1000.0, asked_us=100.0)
    pace.over(400.0)
    assert (pace.due_us, pace.asked_us) == (400 + 1000 - 300, None)


def steady(rung, tokens, p50, p99, provider="smkern"):
    cell = PLAN.cell("steady", provider, tokens, "tokens/ms", rung=rung)
    return cell | {"tbt_p50_ms": p50, "tbt_p99_ms": p99}


def chunked(limit, tokens, p50, p99):
    cell = PLAN.cell("aggregated", "smkern", tokens, "tokens/ms", limit_ms=limit, margin=1.0)
    return cell | {"tbt_p50_ms": p50, "tbt_p99_ms": p99, "chunk": 256}


def test_an_aim_is_met_by_both_ratios_or_not_at_all():
    """Chunks whose median alone keeps the limit may carry more than those of 99 steps in 100."""
    cells = [
        steady(40, 27.0, 14.0, 14.4),
        chunked(15, 17.0, 14.0, 14.9),
        PLAN.cell("aggregated", "smkern", 19.0, "tokens/ms", limit_ms=15, margin=1.06)
        | {"tbt_p50_ms": 14.9, "tbt_p99_ms": 15.6, "chunk": 280},
    ]
    (gain,) = gains(cells)
    assert (gain["value"], gain["value_p50"], gain["aim"]) == (1.5882, 1.4211, 1.5)
    assert summarize([*cells, gain])["qwen3-8b"][gain_name(15)]["met"] is False
    assert "**1.59**" in gains_table([*cells, gain])


def test_a_gain_takes_the_best_of_both_sides_that_keeps_the_limit():
    cells = [
        steady(32, 30.0, 15.2, 15.4),
        steady(36, 27.0, 14.6, 15.1),
        steady(40, 24.0, 14.0, 14.4),
        chunked(15, 18.0, 14.9, 14.95),
        chunked(20, 25.0, 19.9, 20.3),
        PLAN.cell("prefill_alone", "smkern", 36.0, "tokens/ms"),
    ]
    first, second = gains(cells)
    assert (first["case"]["name"], first["value"], first["rung"]) == (gain_name(15), 1.3333, 40)
    assert (first["value_p50"], first["bound"]) == (1.5, 2.0)
    assert (first["kept_by"], second["kept_by"]) == ("p99", "p50"), "no chunk keeps 20 ms by p99"
    assert (second["value"], second["rung"], second["value_p50"]) == (1.2, 32, 1.2)
    rows = summarize([*cells, first, second])["qwen3-8b"]
    assert rows[gain_name(15)] == {"value": 1.3333, "target": 1.5, "met": False, "cells": 1}
    assert rows[gain_name(20)]["met"] is False
