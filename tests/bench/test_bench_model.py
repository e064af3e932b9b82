"""The model suite on CPU tensors: a small model, its graphs run eagerly, and made-up times."""

from __future__ import annotations

import json

import pytest
import torch

from smkern.bench.model import measure, prompt, suite
from smkern.bench.model.cases import DecodeCase, ModelPlan
from smkern.bench.model.floor import floor_us
from smkern.bench.model.measure import Measurer
from smkern.bench.model.model import Model
from smkern.bench.model.operators import operator_calls
from smkern.bench.model.overlap import forbid_overlap
from smkern.device import Budget
from smkern.kernels import driver, gemm_frame
from smkern.latency.cost import kernels_of
from smkern.latency.model_gemms import problems_of
from smkern.measure.timing import Timing
from smkern.models import Quantization
from smkern.models.presets import preset
from smkern.profile import load_profile
from smkern.tuning.config import Epilogue
from tests.bench.doubles import FakePartitions, Meter, run_suite

pytestmark = pytest.mark.slow

PLAN = ModelPlan("qwen3-8b", (1, 2), 40, (16, 132), (116, 132))
PROFILE = load_profile("h200")
SIZES = {"num_layers": 2, "hidden_size": 64, "num_q_heads": 2, "num_kv_heads": 1, "head_dim": 64,
         "vocab_size": 96, "dtype": torch.float32}  # fmt: skip


def tiny(name: str = "qwen3-8b"):
    from smkern.rope import Rope

    config = preset(name)
    inner = {} if config.moe else {"intermediate_size": 96}
    return config.replace(**SIZES, **inner, rope=Rope(64, theta=1e6))


def made_up(loads, **options):
    """Each call once; a decode step takes 20 ms, a layer 3."""
    found = {}
    for name, load in loads.items():
        load.call(0)
        found[name] = Timing((20_000.0,) * 3 if name == "decode" else (3_000.0,) * 3)
    return found


@pytest.fixture
def partitions(cuda, monkeypatch):
    monkeypatch.setattr(measure, "time_together", made_up)
    for module in ("cases", "model"):
        monkeypatch.setattr(f"smkern.bench.model.{module}.CONTEXT", 16)
    monkeypatch.setattr("smkern.bench.model.model.ROOM", 32)
    return FakePartitions(cuda)


@pytest.fixture
def model(partitions):
    return Model(PLAN, "cpu", tiny())


def measurer(model) -> Measurer:
    return Measurer(model, PROFILE, Meter(), rounds=1)


def test_a_loop_finds_the_same_lengths_at_every_replay(model, partitions):
    loop = model.decode(2, partitions.at(132))
    for _ in range(40):
        loop.call(0)
    assert loop.graph.inputs.kv_lens.tolist() == [17, 17]
    assert not loop.graph.inputs.finished.any()
    assert loop.step.kv_lens.tolist() == [16, 16]
    loop.close()


def test_pages_are_dealt_out_once(model):
    tables = torch.cat([model.caches.decode.flatten(), model.caches.prefill.flatten()])
    assert tables.unique().numel() == tables.numel() == model.caches.layers[0][0].shape[0]
    assert model.caches.layers[0][0].shape[1:] == (16, 1, 64)
    assert not torch.equal(*model.caches.layers[0])


def test_logits_must_be_finite(model, partitions):
    model.decoder.weights.final_norm.fill_(float("nan"))
    with pytest.raises(ValueError, match="batch 1: logits are not finite"):
        model.decode(1, partitions.at(132))


def test_a_decode_step_alone_and_beside_a_prompt(model, partitions):
    case = DecodeCase(PLAN.model, 1)
    cells = list(measurer(model).decode(case, partitions.at(16), partitions.at(116)))
    assert [(c["op"], c["case"]["beside"], c["num_sms"]) for c in cells] == [
        ("decode_step", None, 16),
        ("decode_step", "prefill 1x40", 16),
        ("prefill", "decode 1x16", 116),
    ]
    kernels = kernels_of(model.config, case.forward.load, l2_bytes=PROFILE.info.l2_bytes)
    floor = floor_us(kernels, PROFILE.bandwidth(16), 16)
    assert cells[0]["us"] == 20_000.0
    assert cells[0]["floor_us"] == pytest.approx(floor, abs=0.01)
    assert (cells[0]["limit"], cells[0]["tokens_per_ms"]) == (1.6, 0.05)
    beside = floor_us(kernels, PROFILE.bandwidth(16, beside=True), 16)
    assert cells[1]["fraction_of_beside_floor"] == round(beside / cells[1]["us"], 4)
    assert cells[2]["us"] == 2 * 3_000.0
    assert cells[2]["tokens_per_ms"] == pytest.approx(40 / 6, rel=1e-3)
    assert cells[2]["beside_sms"] == 16


def test_prompts_that_share_a_forward_have_its_tokens(model):
    one, four = (model.prefill_step(case.batch) for case in PLAN.prompts)
    assert (four.num_tokens, four.cu_q_lens.tolist()) == (one.num_tokens, [0, 10, 20, 30, 40])
    assert four.kv_lens.tolist() == [10] * 4
    assert len(set(four.page_table.flatten().tolist())) == 4 == len(four.page_table)


def test_what_fails_beside_a_prompt_leaves_the_step_alone(model, partitions, monkeypatch):
    monkeypatch.setattr(Model, "prefill_step", lambda self: 1 / 0)
    case = DecodeCase(PLAN.model, 1)
    alone, beside = measurer(model).decode(case, partitions.at(16), partitions.at(116))
    assert alone["us"] == 20_000.0
    assert beside["error"] == "ZeroDivisionError: division by zero"


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-30b-a3b"])
def test_every_kernel_of_the_floor_has_its_operator(partitions, name):
    config = tiny(name)
    if config.moe is not None:
        from smkern.models import MoeConfig

        config = config.replace(moe=MoeConfig(4, 2, 32))
    model = Model(PLAN, "cpu", config)
    assert made_anew(model, partitions) == {"plan", "embedding"}


def made_anew(model, partitions):
    """Holds a step that is made of its operators, one by one, against the decoder's.

    Returns:
        Those that have no floor.
    """
    loop = model.decode(2, partitions.at(132))
    step = loop.step
    want = model.decoder.forward(step).clone()
    calls = operator_calls(model, loop)
    layer = [name for name in calls if name not in measure.ONCE]
    step.buffers.logits.zero_()
    for name in ("plan", "embedding"):
        calls[name](0)
    for index in range(model.config.num_layers):
        for name in layer:
            calls[name](index)
    for name in ("final_norm", "head"):
        calls[name](0)
    assert torch.equal(step.buffers.logits, want)
    calls["sample"](3)
    kernels = kernels_of(model.config, PLAN.prompt.forward.load, l2_bytes=1)
    assert {kernel.name for kernel in kernels} <= set(calls)
    return set(calls) - {kernel.name for kernel in kernels}


def test_the_breakdown_times_each_operator(model, partitions, cuda, monkeypatch):
    def timed(cases, rounds, while_busy, errors):
        return {name: Timing((10.0,)) for name in cases}

    monkeypatch.setattr(measure, "time_interleaved", timed)
    case = DecodeCase(PLAN.model, 1)
    cells = list(measurer(model).breakdown(case, partitions.at(16)))
    counts = {cell["case"]["kernel"]: cell["count"] for cell in cells}
    assert (counts["qkv"], counts["head"], counts["plan"]) == (2, 1, 1)
    assert all(cell["us"] == 10.0 for cell in cells), cells


def test_a_prompt_beside_its_gemms(model, partitions, monkeypatch):
    times = prompt.PromptTimes(Timing((2e3,)), Timing((1e3,)), 10**9)
    monkeypatch.setattr(measure, "time_prompt", lambda *a: times)
    (cell,) = measurer(model).prefill(PLAN.prompt, partitions.at(116), 2e-4)
    flops = cell["tflops"] * 2e3
    assert cell["gemm_tflops"] == pytest.approx(1.0)
    assert cell["of_gemm"] == pytest.approx(flops / 2e3, abs=1e-3)
    assert cell["of_chip"] == pytest.approx(cell["tflops_per_sm"] / 2e-4, rel=1e-3)


def test_a_prompt_s_passes(model, partitions):
    times = prompt.time_prompt(model, model.prefill_step().planned(), partitions.at(132), Meter())
    hidden, qkv, inner = 64, 4 * 64, 96
    assert times.gemm_flops == 2 * 2 * 40 * hidden * (qkv + 2 * 64 + 3 * inner)
    assert len(times.whole.us_all) == len(times.gemms.us_all) == prompt.ROUNDS


@pytest.mark.parametrize("cache", [False, True])
def test_a_model_in_fp8(partitions, cache):
    """Its step and its prompt, against floors of its bytes; its operators one by one."""
    plan = PLAN.in_fp8("fp8-block")
    plan = plan.with_fp8_cache() if cache else plan
    assert plan.model == "qwen3-8b+fp8-block" + cache * "+fp8-kv"
    assert plan.config == preset("qwen3-8b").replace(quantization=Quantization("fp8-block"))
    wide = {"hidden_size": 128, "num_kv_heads": 2, "intermediate_size": 256}
    model = Model(plan, "cpu", tiny().replace(**wide, quantization=Quantization("fp8-block")))
    assert {x.dtype for x in model.caches.layers[0]} == {
        torch.float8_e4m3fn if cache else torch.float32
    }
    case = DecodeCase(plan.model, plan.batches[0])
    alone, *_ = measurer(model).decode(case, partitions.at(16), None)
    kernels = kernels_of(
        model.config, case.forward.load, l2_bytes=PROFILE.info.l2_bytes, cache_bytes=2 - cache
    )
    floor = floor_us(kernels, PROFILE.bandwidth(16), 16)
    assert alone["floor_us"] == pytest.approx(floor, abs=0.01)
    times = prompt.time_prompt(model, model.prefill_step().planned(), partitions.at(132), Meter())
    assert times.gemm_flops == 2 * 2 * 40 * 128 * (6 * 64 + 2 * 64 + 3 * 256)
    assert made_anew(model, partitions) == {"plan", "embedding", "quantize o"}


@pytest.mark.parametrize("kind", ["fp8-channel", "fp8-tensor"])
def test_passes_that_quantize_are_operators_too(partitions, kind):
    config = tiny().replace(quantization=Quantization(kind))
    model = Model(PLAN.in_fp8(kind), "cpu", config)
    assert "quantize o" in made_anew(model, partitions)


def test_gemms_to_compile():
    config = preset("qwen3-8b")
    step = problems_of(config, 64, 64)
    assert {(p.n, p.k, p.epilogue.key) for p in step} == {
        (6144, 4096, "none"), (4096, 4096, "residual"), (151936, 4096, "none"),
        (24576, 4096, "swiglu"), (4096, 12288, "residual"),
    }  # fmt: skip
    in_fp8 = problems_of(preset("qwen3-8b-fp8"), 64, 64)
    assert [(p.n, p.k) for p in in_fp8] == [(151936, 4096)]


def test_a_prompts_gemms_compile_without_their_epilogues_too(monkeypatch):
    forwards, alone = [], []
    monkeypatch.setattr(suite, "compile_forwards", lambda _, given: forwards.extend(given) or 3)
    monkeypatch.setattr(suite, "precompile", lambda given: alone.extend(given) or 2)
    small, large = Budget(16, "mask"), Budget(116, "mask")
    assert suite.compile_gemms(preset("qwen3-8b"), PLAN, [small], [large]) == 5
    assert forwards == [([(1, 1), (2, 2)], [small]), ([(40, 1), (40, 4)], [large])]
    assert (24576, Epilogue()) in {(x.n, x.epilogue) for x, budget, _ in alone if budget is large}


@pytest.fixture
def on_cpu(partitions, cuda, monkeypatch):
    monkeypatch.setattr(suite, "PLANS", (PLAN,))
    monkeypatch.setattr(suite, "QUICK_PLANS", (PLAN,))
    monkeypatch.setattr(suite, "Partitions", lambda budgets, placements: FakePartitions(cuda))
    monkeypatch.setattr(suite, "power_meter", Meter)
    monkeypatch.setattr(suite, "trim_memory", lambda keep: None)
    monkeypatch.setattr(suite, "device_info", lambda: PROFILE.info)
    monkeypatch.setattr(suite, "compile_gemms", lambda *a: 0)
    monkeypatch.setattr(suite, "Model", lambda plan: Model(plan, "cpu", tiny()))
    monkeypatch.setattr(suite, "forbid_overlap", lambda: None)
    monkeypatch.setattr(measure, "layer_launch_us", lambda decoder, step: 100.0)


def test_the_suite_measures_writes_and_goes_on(on_cpu, tmp_path):
    out = tmp_path / "model.json"
    output = run_suite(suite.command, out)
    assert "0 tasks left" in output
    assert "| **limit** |" in output
    data = json.loads(out.read_text())
    ops = [cell["op"] for cell in data["cells"]]
    # 2 batches: alone on 16 and 132, beside on 16 with the prompt's side; 2 prompts; launches
    assert (ops.count("decode_step"), ops.count("prefill"), ops.count("layer_launch")) == (6, 6, 1)
    assert not [cell["error"] for cell in data["cells"] if "error" in cell]
    partition = next(c for c in data["cells"] if c["op"] == "prefill" and "of_gemm" in c)
    assert partition["of_chip"] > 0
    run_suite(suite.command, out, "--no-overlap")
    cells = json.loads(out.read_text())["cells"]
    assert len(cells) == len(data["cells"]) + 4, "steps alone, beside what was there"
    run_suite(suite.command, out, "--resume", "--batches", "1")
    assert len(json.loads(out.read_text())["cells"]) == len(cells)


def test_a_task_that_fails_is_a_cell_and_is_tried_again(on_cpu, tmp_path, monkeypatch):
    out = tmp_path / "model.json"
    with monkeypatch.context() as patch:
        patch.setattr(measure, "time_prompt", lambda *a: 1 / 0)
        output = run_suite(suite.command, out, "--batches", "1")
    assert "4 tasks left" in output
    errors = [c["error"] for c in json.loads(out.read_text())["cells"] if "error" in c]
    assert errors == ["ZeroDivisionError: division by zero"] * 4
    assert "0 tasks left" in run_suite(suite.command, out, "--batches", "1", "--resume")
    assert not [c for c in json.loads(out.read_text())["cells"] if "error" in c]


def test_launches_that_never_overlap(monkeypatch):
    told = []

    def launcher(*args, overlap):
        told.append(overlap)

    monkeypatch.setattr(driver, "launcher", launcher)
    monkeypatch.setattr(gemm_frame, "launcher", launcher)
    forbid_overlap()
    gemm_frame.launcher(1, 2, overlap=True)
    driver.launcher(1, 2, overlap=True)
    assert told == [False, False]
