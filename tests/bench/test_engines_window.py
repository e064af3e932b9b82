"""Goodput of a window: requests given to vLLM as they come, and its token budget searched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from smkern.bench.engines import suite, vllm_server, window
from smkern.bench.engines.cases import OURS, VLLM, EngineLoad
from smkern.bench.engines.rows import summarize
from smkern.bench.engines.vllm_server import Requests
from smkern.bench.engines.window import WindowTasks
from smkern.bench.replay.cases import Case
from smkern.bench.replay.measure import How
from smkern.bench.results import Results
from smkern.bench.suite import UnknownNameError
from smkern.bench.tables.engines import window_table
from smkern.errors import TraceError
from smkern.models import SamplingParams

LOAD = EngineLoad(limits_ms=(20,))


@dataclass
class Engine:
    """Steps of a millisecond, in which each request has a token."""

    clock_us: float = 0.0
    left: dict[str, int] = field(default_factory=dict)
    began_us: list[float] = field(default_factory=list)

    def add(self, name: str, ids: Sequence[int], new: int) -> None:
        assert len(ids) == 3
        self.left[name] = new
        self.began_us.append(self.clock_us)

    @property
    def is_busy(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Any]:
        assert self.left, "vLLM waits for ever where nothing runs"
        self.clock_us += 1000
        self.left = {name: new - 1 for name, new in self.left.items()}
        found = [
            SimpleNamespace(
                request_id=name, finished=not new, outputs=[SimpleNamespace(token_ids=[7])]
            )
            for name, new in self.left.items()
        ]
        self.left = {name: new for name, new in self.left.items() if new}
        return found


def test_requests_begin_when_they_come_and_end_behind_their_last_token(monkeypatch) -> None:
    engine = Engine()

    def sleep(seconds: float) -> None:
        engine.clock_us += 1e6 * seconds

    monkeypatch.setattr(vllm_server.time, "sleep", sleep)
    requests = Requests(engine, lambda: engine.clock_us)
    for at_us, new in ((500.0, 3), (1700.0, 1), (9000.0, 1)):
        params = SamplingParams(max_new_tokens=new, ignore_eos=True)
        requests.submit([1, 2, 3], params, arrival_us=at_us, deadline_ms=1.0)
    outputs = [(round(engine.clock_us), x.id, x.token) for x in requests.run()]
    assert engine.began_us == [500, 2500, 9000]  # the second waits for the step that runs
    assert outputs == [
        (1500, 0, 7), (2500, 0, 7), (3500, 0, 7), (3500, 0, None), (3500, 1, 7), (3500, 1, None),
        (10000, 2, 7), (10000, 2, None),
    ]  # fmt: skip


def served(case: Case, how: How, **asked: Any) -> dict[str, Any] | None:
    """Goodputs that rise to a budget of 400 and fall behind it; policies have 9."""
    make = asked["make"]
    rate = 9.0 if make is None else 8.0 - abs(make().tokens - 400) / 100
    assert case.policy == asked["spec"] == (f"vllm:{make().tokens}" if make else case.policy)
    if rate <= asked["least_rps"]:
        return None
    times = {"p50": 12.5, "p99": 19.5}
    found = {"goodput_rps": rate, "ttft_ms": times, "tbt_ms": times}
    return case.cell() | found | {"is_stable": case.order == "fcfs"}


@pytest.fixture
def results(monkeypatch) -> Results:
    """vLLM's and ours."""
    monkeypatch.setattr(window, "goodput_cell", served)
    found = Results({})
    for provider in (VLLM, OURS):
        made = WindowTasks(LOAD, provider, "arxiv-like", Path(), found, lambda: Any)
        for _, task in made.tasks():
            for cell in task():
                found.add(cell)
    return found


def test_the_best_budget_is_searched_and_its_neighbours_within_16_are_not_better(results) -> None:
    (best,) = (x for x in results.cells if x["case"]["policy"] == "vllm")
    tried = {x["budget"]: x["value"] for x in results.cells if x["case"]["name"] == "window_try"}
    assert list(tried) == [480, 544, 416, 352, 448, 384, 432, 400]
    assert (best["budget"], best["value"]) == (400, 8.0)


def test_what_was_tried_is_not_tried_again(results) -> None:
    def closed() -> Any:
        raise AssertionError("nothing is left to serve")

    again = WindowTasks(LOAD, VLLM, "arxiv-like", Path(), results, closed)
    ((_, task),) = again.tasks()
    (cell,) = task()
    assert cell in results.cells


def test_ratios_and_the_table_name_policy_and_order(results) -> None:
    rows = summarize(results.cells)
    names = [f"qwen3-8b arxiv-like 20ms {x}_over_vllm" for x in ("adaptive fcfs", "chunked fcfs")]
    assert [rows[name]["value"] for name in names] == [9 / 8, 9 / 8]
    _, _, *table = window_table(results.cells).splitlines()
    assert table == [
        f"| qwen3-8b, 20 ms: {engine} | {rate} | 12.5 | 19.5 | 12 | 20 | {queue} |"
        for engine, rate, queue in (
            ("vLLM, stock, 400 tokens a step", 8.0, "steady"),
            ("smkern's `Multiplexer`, `adaptive`, `fcfs`", 9.0, "steady"),
            ("smkern's `Multiplexer`, `adaptive`, `slack`", 9.0, "still grew"),
            ("smkern's `Multiplexer`, `chunked`, `fcfs`", 9.0, "steady"),
        )
    ]


@pytest.mark.parametrize("trace", ["azure-poems", "azure-code"])
def test_a_trace_that_is_not_there_is_named_before_anything_is_loaded(tmp_path, trace) -> None:
    given = ["--window", trace, "--traces-folder", str(tmp_path), "--out", str(tmp_path / "x.json")]
    found = CliRunner().invoke(suite.command, given)
    assert isinstance(found.exception, UnknownNameError | TraceError)
    assert "azure" in str(found.exception)
    assert not (tmp_path / "x.json").exists()
