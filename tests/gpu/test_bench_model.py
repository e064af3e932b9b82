"""The model and operator suites on a GPU: every kind of cell of a small model, rivals checked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner

from smkern.bench.model.cases import DecodeCase, ModelPlan
from smkern.bench.model.measure import Measurer
from smkern.bench.model.model import Model
from smkern.bench.ops import suite as ops_suite
from smkern.bench.ops.cases import CASES
from smkern.bench.power import power_meter
from smkern.bench.results import load_results
from smkern.device import device_info
from smkern.latency.cost import kernels_of
from smkern.measure.partitions import Partitions
from smkern.models import Quantization, preset
from smkern.profile import load_profile

DECODE_SMS = 32


@pytest.fixture(scope="module")
def partitions() -> Iterator[Partitions]:
    total = device_info().num_sms
    with Partitions((DECODE_SMS, total - DECODE_SMS, total), placements=("spread",)) as made:
        yield made


PLAN = ModelPlan("qwen3-8b", (4,), 1024)
SMALL = preset("qwen3-8b").replace(
    num_layers=3, hidden_size=1024, intermediate_size=2048, vocab_size=4096, num_q_heads=8,
    num_kv_heads=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def measurer(partitions: Partitions) -> Measurer:
    return Measurer(Model(PLAN, config=SMALL), load_profile(), power_meter(), rounds=1)


def test_a_decode_step_alone_and_beside_a_prompt(partitions, measurer) -> None:
    place, other = partitions.at(DECODE_SMS), partitions.at(partitions.full.num_sms - DECODE_SMS)
    assert place is not None
    cells = list(measurer.decode(DecodeCase("qwen3-8b", 4), place, other))
    assert [cell.get("error") for cell in cells] == [None] * 3
    alone, beside, prompt = cells
    assert 0 < alone["fraction_of_ceiling"] < 1.05
    assert beside["us"] > 0
    assert prompt["tokens_per_ms"] > 0


def test_a_decode_step_on_the_whole_chip(partitions: Partitions, measurer: Measurer) -> None:
    (cell,) = measurer.decode(DecodeCase("qwen3-8b", 4), partitions.full, None)
    assert 0 < cell["fraction_of_ceiling"] < 1.05


def test_a_prompt_and_its_gemms(partitions: Partitions, measurer: Measurer) -> None:
    (cell,) = measurer.prefill(measurer.model.plan.prompt, partitions.full, None)
    assert cell["of_chip"] == 1.0
    assert cell["of_gemm"] > 0


def test_a_layer_s_launch(partitions: Partitions, measurer: Measurer) -> None:
    place = partitions.at(DECODE_SMS)
    assert place is not None
    (cell,) = measurer.launch(DecodeCase("qwen3-8b", 4), place)
    assert cell["value"] > 0


@pytest.mark.parametrize("kind", [None, "fp8-block", "fp8-channel"])
def test_every_operator_by_itself(partitions: Partitions, measurer: Measurer, kind: Any) -> None:
    place = partitions.at(DECODE_SMS)
    assert place is not None
    if kind is not None:
        config = SMALL.replace(quantization=Quantization(kind))
        plan = PLAN.in_fp8(kind).with_fp8_cache()
        measurer = replace(measurer, model=Model(plan, config=config))
    case = DecodeCase(measurer.model.plan.model, 4)
    cells = list(measurer.breakdown(case, place))
    assert {c["case"]["kernel"]: c["error"] for c in cells if c.get("error")} == {}
    kernels = kernels_of(measurer.model.config, case.forward.load, l2_bytes=50 << 20)
    assert {kernel.name for kernel in kernels} <= {cell["case"]["kernel"] for cell in cells}


def test_every_operator_is_right_beside_torch(tmp_path, monkeypatch) -> None:
    """The smallest case of each operator; wrong results of ours are errors in the file."""
    smallest = {case.op: case for case in reversed(CASES)}
    sizes = replace(ops_suite.SIZES, cases=tuple(smallest.values()))
    monkeypatch.setattr(ops_suite, "SIZES", sizes)
    out = tmp_path / "ops.json"
    args = ["--budgets", "32", "--peers", "torch,other", "--no-again", "--out", str(out)]
    ran = CliRunner().invoke(ops_suite.command, args, catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    cells = load_results(out).cells
    ours = [cell for cell in cells if cell["provider"] == "smkern"]
    assert {cell["op"] for cell in ours} == set(smallest)
    assert {cell["op"]: cell["error"] for cell in ours if cell.get("error")} == {}
    torch_cells = [cell for cell in cells if cell["provider"] == "torch"]
    # torch's grouped GEMM launches clusters, which spread SMs may not hold: its cell says so
    failed = {cell["op"]: cell["error"] for cell in torch_cells if cell.get("error")}
    assert failed.keys() <= {"grouped_gemm"}, failed
