"""The example's workload under both policies: simulated, and a tiny model on CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
from numpy import percentile
from rich.console import Console

from smkern.bench.runtime.workload import Sizes, open_executor
from smkern.examples import policies
from smkern.examples.policies import DECODE_SMS, Served, Shape, verdict, workload
from smkern.latency import TablePredictor
from smkern.models import Weights, preset
from smkern.runtime import Timeline
from tests.models.generation import tiny

SHORT = Shape(seconds=0.6, burst_s=0.4, burst=3)
TINY = replace(SHORT, short=(4, 12), long=(40, 90), new=(3, 9), scale=0.05)


@pytest.fixture
def console() -> Console:
    return Console(file=StringIO(), width=140)


@pytest.fixture(scope="module")
def simulated() -> list[Served]:
    return list(policies.simulated(SHORT))


def test_a_seed_gives_the_same_requests_in_their_order() -> None:
    arrivals = workload(SHORT)
    assert arrivals == workload(SHORT) != workload(SHORT, seed=1)
    times = [one.at_us for one in arrivals]
    assert times == sorted(times)
    assert times[0] == 0.0


def test_bursts_come_when_the_shape_says() -> None:
    long = [one for one in workload(SHORT) if one.prompt >= SHORT.long[0]]
    assert [one.at_us for one in long] == pytest.approx([2e5] * 3)


def test_fewer_layers_want_times_to_be_shorter() -> None:
    scaled = workload(replace(SHORT, scale=0.25))
    assert [one.at_us for one in scaled] == pytest.approx(
        [0.25 * one.at_us for one in workload(SHORT)]
    )
    assert [one.prompt for one in scaled] == [one.prompt for one in workload(SHORT)]


def test_both_policies_serve_all_of_it(simulated: list[Served]) -> None:
    arrivals = workload(SHORT)
    assert [one.name for one in simulated] == ["Chunked(512)", f"StaticSplit({DECODE_SMS})"]
    for one in simulated:
        assert one.stats.finished == {"length": len(arrivals)}
        assert one.stats.tokens == sum(request.new for request in arrivals)


def test_one_mixes_and_the_other_splits(simulated: list[Served]) -> None:
    mixed, split = (one.timeline.trace() for one in simulated)
    assert {span.lane for span in mixed.spans} == {"decode"}
    assert {span.lane for span in split.spans} == {"decode", "prefill"}
    assert DECODE_SMS in {span.place.num_sms for span in split.spans}


def test_callers_wait_about_as_long_as_the_runtime_says(simulated: list[Served]) -> None:
    for one in simulated:
        assert [len(times) - 1 for times in one.tokens_us] == [x.new for x in workload(SHORT)]
        assert fmean(one.tbt_ms) == pytest.approx(one.stats.tbt_us.mean / 1e3, rel=0.01)
        assert fmean(one.ttft_ms) == pytest.approx(one.stats.ttft_us.mean / 1e3, rel=0.1)


def test_the_simulation_is_deterministic(simulated: list[Served]) -> None:
    again = list(policies.simulated(SHORT))
    assert [one.stats for one in again] == [one.stats for one in simulated]


def test_a_model_on_cpu_tensors_is_measured() -> None:
    config = tiny(max_position=512)
    sizes = Sizes(
        (DECODE_SMS,), max_running=16, max_prefill=4, max_tokens=128, max_context=256, num_pages=200
    )
    with open_executor(Weights.random(config), sizes) as executor:
        served = list(policies.measured(TINY, executor, "NVIDIA H200"))
        executor.pool.check()
        assert executor.pool.usage.held == 0
    for one in served:
        assert one.stats.finished == {"length": len(workload(TINY))}
        assert one.stats.tbt_us.count


@pytest.mark.parametrize(("gpu", "is_known"), [("NVIDIA H200", True), ("NVIDIA T4", False)])
def test_a_predictor_where_the_gpu_was_timed(gpu: str, is_known: bool) -> None:
    found = policies.predictor_for(preset("qwen3-8b").replace(num_layers=8), gpu)
    assert isinstance(found, TablePredictor) is is_known


def test_a_table_row_for_each_policy(simulated: list[Served], console: Console) -> None:
    table = policies.table(simulated, "title")
    assert table.row_count == 2
    console.print(table)
    row = printed(console).splitlines()[-1].split()
    split = simulated[1]
    assert row[0] == f"StaticSplit({DECODE_SMS})"
    assert row[1] == f"{fmean(split.ttft_ms):.0f}"
    assert row[6] == f"{percentile(split.tbt_ms, 99):.2f}"
    assert row[-1] == f"{split.stats.bubble_ratio:.1%}"


def served(name: str, ttft: float, tbt: float, rate: float, step: float, sms: tuple[int, ...]):
    """What serving was like: ms, tokens/s, the ms of each step, and where steps ran."""
    stats: Any = SimpleNamespace(tokens_per_s=rate)
    spans = [SimpleNamespace(duration_us=1e3 * step, place=SimpleNamespace(num_sms=n)) for n in sms]
    trace = SimpleNamespace(lane=lambda lane: spans if lane == "decode" else ())
    timeline: Any = SimpleNamespace(trace=lambda: trace)
    return Served(name, stats, timeline, [[0.0, 1e3 * ttft, 1e3 * (ttft + tbt)]])


A = served("A", 300.0, 7.6, 4000.0, 7.4, (132,))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            served("B", 200.0, 5.0, 4500.0, 4.0, (32, 132)),
            "B beats A in mean TTFT (200 against 300 ms), p99 of TBT (5.0 against 7.6 ms) and "
            "throughput (4500 against 4000 tokens/s). A's tail is that of its steps: a step of A "
            "takes 7.4 ms at p50 and 7.4 at p99 on 132 SMs, one of B 4.0 ms at p50 and 4.0 at p99 "
            "on 32 to 132 SMs.",
        ),
        (
            served("B", 200.0, 12.2, 4010.0, 11.9, (32, 132)),
            "B beats A in mean TTFT (200 against 300 ms), but loses in p99 of TBT (7.6 against "
            "12.2 ms), with the same throughput. B's tail is that of its steps: ",
        ),
        (
            served("B", 400.0, 12.2, 4500.0, 4.0, (32,)),
            "A beats B in mean TTFT (300 against 400 ms) and p99 of TBT (7.6 against 12.2 ms), but "
            "loses in throughput (4500 against 4000 tokens/s). B's tail is not that of its steps, "
            "so tokens waited between them: ",
        ),
        (served("B", 300.0, 7.6, 4000.0, 7.4, (132,)), "A and B do not differ. "),
    ],
)
def test_the_verdict_says_what_the_figures_show(other: Served, said: str) -> None:
    assert verdict(A, other).startswith(said)


def test_without_a_gpu_table_verdict_picture_and_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, simulated: list[Served], console: Console
) -> None:
    monkeypatch.setattr(policies, "simulated", lambda shape, console: iter(simulated))
    policies.show(console, tmp_path, None)
    assert (tmp_path / "policies.png").stat().st_size > 10_000
    for name in ("chunked", "staticsplit"):
        assert Timeline.load(tmp_path / f"timeline-{name}.json").spans
    text = " ".join(printed(console).split())
    assert "simulated: an H200 by its table" in text
    assert f"Verdict: {verdict(*simulated)}" in text


def test_both_columns_of_the_picture_have_the_same_axes(
    simulated: list[Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **more: drawn.append(self))
    policies.draw(simulated, tmp_path / "x.png", "heading")
    requests, others, gaps, other_gaps = drawn[0].axes
    assert requests.get_xlim() == others.get_xlim() == gaps.get_xlim() == other_gaps.get_xlim()
    assert requests.get_ylim() == others.get_ylim()
    assert gaps.get_ylim() == other_gaps.get_ylim()
    assert requests.get_ylim()[1] >= len(workload(SHORT)) - 1, "all requests"


def test_with_a_gpu_some_layers_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, simulated: list[Served], console: Console
) -> None:
    seen: list[Any] = []

    def on_gpu(shape: Shape, config: Any, gpu: str, console: Console) -> Iterator[Served]:
        seen.extend([shape.scale, config.num_layers, gpu])
        return iter(simulated)

    monkeypatch.setattr(policies, "on_gpu", lambda *given: list(on_gpu(*given)))
    monkeypatch.setattr(policies, "draw", lambda *given: None)
    policies.show(console, tmp_path, "NVIDIA H200")
    layers = policies.LAYERS
    assert seen == [layers / 36, layers, "NVIDIA H200"]
    assert f"{layers} layers on an NVIDIA H200" in printed(console)


def printed(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()
