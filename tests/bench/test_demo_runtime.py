"""The demo's workload under both policies: simulated, and a tiny model on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

import smkern
from smkern.bench import demo, demo_runtime
from smkern.bench.demo_runtime import DECODE_SMS, Served, Shape, workload
from smkern.bench.runtime.serving import Sizes, open_executor
from smkern.errors import DeviceError
from smkern.latency import TablePredictor
from smkern.models import Weights, preset
from smkern.runtime import Timeline
from tests.models.generation import one_thread, tiny

SHORT = Shape(seconds=0.6, burst_s=0.4, burst=3)
TINY = replace(SHORT, short=(4, 12), long=(40, 90), new=(3, 9), scale=0.05)


@pytest.fixture(scope="module")
def simulated() -> list[Served]:
    return list(demo_runtime.simulated(SHORT))


def test_a_seed_gives_the_same_requests_in_their_order() -> None:
    asked = workload(SHORT)
    assert asked == workload(SHORT) != workload(SHORT, seed=1)
    times = [one.at_us for one in asked]
    assert times == sorted(times)
    assert times[0] == 0.0


def test_bursts_come_when_the_shape_says() -> None:
    long = [one for one in workload(SHORT) if one.prompt >= SHORT.long[0]]
    assert [one.at_us for one in long] == pytest.approx([2e5] * 3)
    assert SHORT.first_burst_us == pytest.approx(2e5)


def test_fewer_layers_want_times_to_be_shorter() -> None:
    scaled = workload(replace(SHORT, scale=0.25))
    assert [one.at_us for one in scaled] == pytest.approx(
        [0.25 * one.at_us for one in workload(SHORT)]
    )
    assert [one.prompt for one in scaled] == [one.prompt for one in workload(SHORT)]


def test_both_policies_serve_all_of_it(simulated: list[Served]) -> None:
    asked = workload(SHORT)
    assert [one.name for one in simulated] == ["Aggregated(512)", f"FixedSplit({DECODE_SMS})"]
    for one in simulated:
        assert one.stats.finished == {"length": len(asked)}
        assert one.stats.tokens == sum(request.new for request in asked)


def test_one_mixes_and_the_other_splits(simulated: list[Served]) -> None:
    mixed, split = (one.trace for one in simulated)
    assert {span.lane for span in mixed.spans} == {"decode"}
    assert {span.lane for span in split.spans} == {"decode", "prefill"}
    assert DECODE_SMS in {span.place.num_sms for span in split.spans}


def test_the_simulation_is_deterministic(simulated: list[Served]) -> None:
    again = list(demo_runtime.simulated(SHORT))
    assert [one.stats for one in again] == [one.stats for one in simulated]


def test_a_model_on_cpu_tensors_is_measured() -> None:
    config = tiny(max_position=512)
    sizes = Sizes(
        (DECODE_SMS,), max_running=16, max_prefill=4, max_tokens=128, max_context=256,
        num_pages=200,
    )  # fmt: skip
    with one_thread(), open_executor(Weights.random(config), sizes) as executor:
        served = list(demo_runtime.measured(TINY, executor, "NVIDIA H200"))
        executor.pool.check()
        assert executor.pool.usage.held == 0
    for one in served:
        assert one.stats.finished == {"length": len(workload(TINY))}
        assert one.stats.tbt_us.count


@pytest.mark.parametrize(("gpu", "is_known"), [("NVIDIA H200", True), ("NVIDIA T4", False)])
def test_a_predictor_where_the_gpu_was_timed(gpu: str, is_known: bool) -> None:
    found = demo_runtime.predictor_for(preset("qwen3-8b").replace(num_layers=8), gpu)
    assert isinstance(found, TablePredictor) is is_known


def test_a_table_row_for_each_policy(simulated: list[Served]) -> None:
    table = demo_runtime.table(simulated, "title")
    assert table.row_count == 2
    console = Console(file=StringIO(), width=140)
    console.print(table)
    row = console.file.getvalue().splitlines()[-1].split()  # type: ignore[attr-defined]
    stats = simulated[1].stats
    assert row[0] == f"FixedSplit({DECODE_SMS})"
    assert row[1] == f"{stats.ttft_us.mean / 1e3:.0f}"
    assert row[6] == f"{stats.tbt_us.p99 / 1e3:.2f}"
    assert row[-1] == f"{stats.bubble_ratio:.1%}"


def test_without_a_gpu_pictures_pages_and_traces_say_that_they_are_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, simulated: list[Served]
) -> None:
    monkeypatch.setattr(demo_runtime, "Shape", lambda: SHORT)
    monkeypatch.setattr(demo_runtime, "simulated", lambda shape: iter(simulated))
    console = Console(file=StringIO(), width=140)
    demo_runtime.show(console, tmp_path, None)
    for name in ("aggregated", "fixedsplit"):
        assert (tmp_path / f"timeline-{name}.png").stat().st_size > 10_000
        assert "simulated" in (tmp_path / f"timeline-{name}.html").read_text()
        assert Timeline.load(tmp_path / f"timeline-{name}.json").spans
    assert "simulated" in console.file.getvalue()  # type: ignore[attr-defined]


def test_with_a_gpu_some_layers_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, simulated: list[Served]
) -> None:
    seen: list[Any] = []

    @contextmanager
    def model_on_gpu(config: Any) -> Iterator[str]:
        seen.append(config.num_layers)
        yield "executor"

    def measured(shape: Shape, executor: Any, gpu: str) -> Iterator[Served]:
        seen.extend([shape.scale, executor, gpu])
        return iter(simulated)

    monkeypatch.setattr(demo_runtime, "model_on_gpu", model_on_gpu)
    monkeypatch.setattr(demo_runtime, "measured", measured)
    monkeypatch.setattr(demo_runtime, "draw", lambda *given: [])
    console = Console(file=StringIO(), width=140)
    demo_runtime.show(console, tmp_path, "NVIDIA H200")
    layers = demo_runtime.LAYERS
    assert seen == [layers, layers / 36, "executor", "NVIDIA H200"]
    assert f"{layers} layers on an NVIDIA H200" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("gpu", [None, "NVIDIA H200"])
def test_the_command_serves_first(
    gpu: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def device_info() -> Any:
        if gpu is None:
            raise DeviceError("none")
        return SimpleNamespace(name=gpu, num_sms=132)

    monkeypatch.setattr(smkern, "device_info", device_info, raising=False)
    monkeypatch.setattr(demo.doctor, "examine", lambda: SimpleNamespace(failed=False))
    monkeypatch.setattr(demo.doctor, "render", lambda report, console: None)
    monkeypatch.setattr(demo_runtime, "show", lambda console, out, name: seen.append(name))
    monkeypatch.setattr(demo, "demo_without_gpu", lambda console, out: seen.append("without"))
    monkeypatch.setattr(demo, "demo_with_gpu", lambda console, out, sms: seen.append(sms))
    done = CliRunner().invoke(demo.command, ["--out", str(tmp_path / "new")])
    assert done.exit_code == 0, done.output
    assert seen == ([None, "without"] if gpu is None else [gpu, 132])
