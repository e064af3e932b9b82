"""Several rounds of the runtime suite, with subjects that measure what they are told to."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from smkern.bench.results import Results, load_results
from smkern.bench.runtime.cases import RuntimePlan, gain_name
from smkern.bench.runtime.figures import tbt_of
from smkern.bench.runtime.rounds import Rounds, combined
from smkern.bench.runtime.rows import gains, summarize
from smkern.bench.runtime.subjects import SUBJECTS, Task
from smkern.bench.runtime.suite import run
from smkern.bench.suite import Output

pytestmark = pytest.mark.slow

PLAN = RuntimePlan("qwen3-8b", (15,), (24, 40), (4, 12))


def steady(value, p50=14.0, p99=14.5, rung=24, **more):
    cell = PLAN.cell("steady", "smkern", value, "tokens/ms", rung=rung)
    return cell | {"tbt_p50_ms": p50, "tbt_p90_ms": p50, "tbt_p99_ms": p99, "steps": 10} | more


def test_a_single_round_stays_as_it_is():
    assert combined([steady(20.0, gap=1)]) == steady(20.0, gap=1)


def test_the_median_rate_and_the_steps_of_all_rounds():
    times = [[14.0, 14.9], [13.0, 14.1], [13.5, 14.2]]
    values = [20.0, 26.0, 21.0]
    cells = [steady(x, alone=x) | tbt_of(ms) for x, ms in zip(values, times, strict=True)]
    found = combined(cells)
    assert (found["value"], found["tbt_p50_ms"], found["tbt_p90_ms"]) == (21.0, 14.05, 14.9)
    assert (found["tbt_p99_ms"], found["steps"], found["alone"]) == (14.9, 6, 21.0)
    assert found["steps_ms"] == [14.0, 14.9, 13.0, 14.1, 13.5, 14.2]
    assert found["rounds"] == values
    assert "failed_rounds" not in found


def test_what_stands_beside_a_median_is_one_too():
    """A p99, a chunk's size or a forward's time of the last round alone says another thing."""
    cells = [
        steady(20.0, p99=31.0, rung=24, said="a", by_start_ms={"0": 3.0, "64": 9}, graph=True),
        steady(20.0, p99=90.0, rung=24, said="b", by_start_ms={"0": 4.0, "64": 9}, graph=True),
        steady(20.0, p99=30.0, rung=24, said="c", by_start_ms={"0": 9.0, "64": 9}, graph=True),
    ]
    found = combined(cells)
    assert (found["tbt_p99_ms"], found["said"], found["graph"]) == (31.0, "c", True)
    assert found["by_start_ms"] == {"0": 4.0, "64": 9}
    assert found["case"] == cells[0]["case"]
    assert isinstance(found["steps"], int)


def test_a_round_without_a_value():
    cells = [PLAN.cell("switch_handover_us_p50", "smkern", value, "us") for value in (None, 4.0)]
    assert (combined(cells)["value"], combined(cells)["rounds"]) == (4.0, [None, 4.0])
    assert combined(cells[:1] * 2)["value"] is None


def test_a_task_that_fails_marks_what_it_did_not_measure():
    rounds = Rounds()
    rounds.add("a", steady(20.0))
    rounds.add("a", steady(30.0, rung=40))
    rounds.end("a")
    rounds.number = 2
    assert [c["case"]["rung"] for c in rounds.now()] == []
    assert rounds.add("a", steady(22.0))["rounds"] == [20.0, 22.0]
    (missed,) = rounds.fail("a", "no")
    assert missed == steady(30.0, rung=40) | {"failed_rounds": {"2": "no"}}
    assert rounds.add("b", steady(32.0, rung=40))["rounds"] == [30.0, 32.0], "another task's turn"
    assert rounds.is_whole("a")


def test_gains_say_how_many_rounds_there_were():
    chunks = PLAN.cell("aggregated", "smkern", 18.0, "tokens/ms", limit_ms=15, margin=1.0)
    chunks |= {"tbt_p50_ms": 14.0, "tbt_p99_ms": 14.5, "chunk": 256}
    (once,) = gains([steady(24.0), chunks])
    (twice,) = gains([steady(24.0, rounds=[24.0] * 3), chunks | {"rounds": [18.0] * 2}])
    (mixed,) = gains([steady(24.0, rounds=[24.0] * 3), chunks])
    assert "rounds" not in once
    assert (twice["rounds"], mixed["rounds"]) == (2, 1)


@dataclass
class Script:
    """Subjects whose tasks yield the next of a list of values, or raise it."""

    values: dict[str, list]
    once: tuple[str, ...] = ()
    visits: list[str] = field(default_factory=list)

    def subjects(self, monkeypatch) -> tuple[str, ...]:
        for name in self.values:
            monkeypatch.setitem(SUBJECTS, name, lambda tasks, name=name: self.tasks(name))
        return tuple(self.values)

    def tasks(self, name):
        def measure():
            self.visits.append(name)
            value = self.values[name].pop(0)
            if isinstance(value, Exception):
                raise value
            yield PLAN.cell(name, "smkern", value, "us")

        yield Task(name, "smkern", {}, measure, is_once=name in self.once)


class Visits:
    """A deadline after so many tasks."""

    def __init__(self, most: int) -> None:
        self.left = most

    @property
    def passed(self) -> bool:
        self.left -= 1
        return self.left < 0


def measured(script, monkeypatch, tmp_path, rounds, results=None, most=99, **more):
    path = tmp_path / "runtime.json"
    output = Output(path, deadline=Visits(most))
    subjects, results = script.subjects(monkeypatch), results or Results()
    left = run((PLAN,), subjects, results, output, seconds=0.1, rounds=rounds, **more)
    return left, {c["case"]["name"]: c for c in load_results(path).cells}


def test_subjects_are_visited_by_turns(monkeypatch, tmp_path):
    script = Script({"x": [1, 3, 2], "y": [5, 5, 8], "count": [7]}, once=("count",))
    _, cells = measured(script, monkeypatch, tmp_path, 3)
    assert script.visits == ["x", "y", "count", "x", "y", "x", "y"]
    assert (cells["x"]["value"], cells["x"]["rounds"]) == (2, [1, 3, 2])
    assert (cells["y"]["value"], cells["count"]["value"]) == (5, 7)
    assert "rounds" not in cells["count"]


@pytest.mark.parametrize(
    ("values", "value", "rounds", "failed"),
    [
        ([1, 3, RuntimeError("hot")], 2, [1, 3], {"3": "RuntimeError: hot"}),
        ([1, RuntimeError("hot"), 3], 2, [1, 3], {"2": "RuntimeError: hot"}),
        ([RuntimeError("hot"), 1, 3], 2, [1, 3], {"1": "RuntimeError: hot"}),
        ([RuntimeError("hot"), 1, RuntimeError("not")], 1, None,
         {"1": "RuntimeError: hot", "3": "RuntimeError: not"}),
    ],
)  # fmt: skip
def test_a_failed_round_keeps_the_others(values, value, rounds, failed, monkeypatch, tmp_path):
    _, cells = measured(Script({"x": values}), monkeypatch, tmp_path, 3)
    assert (cells["x"]["value"], cells["x"].get("rounds")) == (value, rounds)
    assert cells["x"]["failed_rounds"] == failed
    assert "error" not in cells["x"]


def test_no_round_that_works_is_an_error(monkeypatch, tmp_path):
    script = Script({"x": [RuntimeError("a"), RuntimeError("b")]})
    _, cells = measured(script, monkeypatch, tmp_path, 2)
    assert (cells["x"]["value"], cells["x"]["error"]) == (None, "RuntimeError: b")
    assert summarize(cells.values())["not_measured"][0]["error"] == "RuntimeError: b"


def test_a_resumed_run_skips_what_the_file_had_in_every_round(monkeypatch, tmp_path):
    def before():
        results = Results()
        results.add(PLAN.cell("x", "smkern", 4, "us"))
        results.add(PLAN.cell("y", "smkern", None, "us") | {"error": "RuntimeError: hot"})
        return results

    script = Script({"x": [], "y": [5, 6]})
    _, cells = measured(script, monkeypatch, tmp_path, 2, before())
    assert script.visits == ["y", "y"]
    assert (cells["x"]["value"], cells["y"]["value"]) == (4, 5.5)
    _, cells = measured(Script({"x": [8, 9]}), monkeypatch, tmp_path, 2, before(), again=True)
    assert cells["x"]["rounds"] == [8, 9], "what the file had is no round"


def test_the_deadline_ends_later_rounds_too(monkeypatch, tmp_path):
    script = Script({"x": [1, 3], "y": [5, 7]})
    left, cells = measured(script, monkeypatch, tmp_path, 2, most=3)
    assert left == ([], ["qwen3-8b y"])
    assert (cells["x"]["rounds"], cells["y"]["value"]) == ([1, 3], 5)
    assert gain_name(15) not in cells
