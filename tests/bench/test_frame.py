"""The frame of suites on a made-up operator: rounds, cells, measured again, what is left."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from click.testing import CliRunner
from rich.progress import Progress

from smkern.bench.cases import Group, Sizes, case_options, groups_of, named
from smkern.bench.frame import Bench, GroupSuite, Provider, Rounds, note_again, wrong_result
from smkern.bench.results import Results, cell_key, load_results
from smkern.bench.rows import loses_to_best
from smkern.bench.suite import Deadline, Output, Run, UnknownNameError, conclude, suite_command
from smkern.profile import load_profile
from tests.bench.doubles import FakePartitions, Meter


@dataclass(frozen=True)
class Add:
    """A made-up operator."""

    size: int
    op: str = "add"
    bytes_moved: int = 1_000_000
    flops: int = 0

    @property
    def name(self) -> str:
        return f"add-{self.size}"

    @property
    def about(self) -> dict[str, Any]:
        return {"name": self.name, "size": self.size}


@dataclass
class AddBench(Bench[Add]):
    """Ours takes `ours_us`; peers are (provider, placement, layout, us, what its call returns)."""

    cuda: Any
    ours_us: float = 50.0
    rivals: list[tuple[str, str, str, float, Any]] = field(default_factory=list)
    budget_us: float = 2000.0
    log: list[str] = field(default_factory=list)

    def call(self, us: float, value: Any) -> Any:
        def call(i: int) -> Any:
            if isinstance(value, Exception):
                raise value
            self.cuda.work_us(us)
            return value

        return call

    def ours(self, case, place):
        tell = {"config": "best"}
        return [Provider("smkern", place, lambda: self.call(self.ours_us, 3), tell=lambda: tell)]

    def peers(self, case, place):
        for name, placement, layout, us, value in self.rivals:
            if place.placement == placement:
                make = lambda us=us, value=value: self.call(us, value)  # noqa: E731
                yield Provider(name, place, make, {"layout": layout})

    def reset(self, case):
        self.log.append("reset")

    def complaint(self, case, provider, result):
        return wrong_result(abs(result - 3) / 3, 0.01)


CASE, GROUP = Add(3), Group(Add(3), 16)


@pytest.fixture
def rounds(cuda) -> Rounds:
    return Rounds(FakePartitions(cuda), load_profile("h200"), Meter())


def cells_of(rounds, bench, is_losing=loses_to_best):
    return {(c["provider"], c["placement"]): c for c in rounds.measure(bench, GROUP, is_losing)}


def test_the_best_layout_and_place_of_a_peer_count(rounds, cuda):
    peers = [
        ("flashinfer:fa2", "spread", "HND", 90.0, 3),
        ("flashinfer:fa2", "spread", "NHD", 80.0, 3),
        ("flashinfer:fa2", "default", "HND", 70.0, 3),
        ("torch", "spread", "", 40.0, 3),
    ]
    cells = cells_of(rounds, AddBench(cuda, rivals=peers), None)
    assert len(cells) == len({cell_key(cell) for cell in cells.values()}) == 4
    assert cells["flashinfer:fa2", "spread"]["layout"] == "NHD"
    ours = cells["smkern", "spread"]
    assert ours["us"] == pytest.approx(50.0, rel=1e-3)
    assert ours["vs"] == pytest.approx({"flashinfer:fa2": 1.4, "torch": 0.8}, rel=1e-3)
    assert ours["vs_flashinfer"] == pytest.approx(1.4, rel=1e-3)
    assert (ours["best_flashinfer"], ours["best_peer"]) == ("flashinfer:fa2", "torch")
    assert (ours["case"], ours["group_sms"]) == (CASE.about, 16)
    assert (ours["sm_mhz"], ours["watts"], ours["config"]) == (1980.0, 400.0, "best")
    tbps = CASE.bytes_moved / 50 / 1e6
    bandwidth = rounds.profile.bandwidth(16)
    assert ours["fraction_of_bandwidth"] == pytest.approx(tbps / bandwidth, rel=1e-2)
    assert "vs_best_again" not in ours
    assert "vs" not in cells["torch", "spread"]


def test_a_group_that_loses_is_measured_again_and_both_results_stay(rounds, cuda):
    bench = AddBench(cuda, rivals=[("flashinfer:fa3", "default", "", 40.0, 3)])
    ours = cells_of(rounds, bench)["smkern", "spread"]
    assert ours["vs_best"] == pytest.approx(0.8, rel=1e-2)
    assert ours["vs_flashinfer_again"] == pytest.approx(0.8, rel=1e-2)
    assert ours["us_again"] == pytest.approx(50.0, rel=1e-3)
    assert bench.log == ["reset"] * 4


def test_who_is_wrong_or_raises_has_an_error_and_no_time(rounds, cuda):
    nan = float("nan")
    peers = [
        ("flashinfer:fa2", "spread", "", 9.0, 0),
        ("flashinfer:fa3", "spread", "", 9.0, nan),
        ("torch", "spread", "", 9.0, RuntimeError("no kernel\nmore")),
    ]
    cells = cells_of(rounds, AddBench(cuda, rivals=peers))
    errors = {c["provider"]: c["error"] for c in cells.values() if c.get("error")}
    assert errors["flashinfer:fa2"].startswith("wrong result: |out - torch| / |torch| is 1,")
    assert "is nan, at most 0.01" in errors["flashinfer:fa3"]
    assert errors["torch"] == "RuntimeError: no kernel"
    assert "vs" not in cells["smkern", "spread"]
    assert cells["torch", "spread"]["us"] is None


def test_the_second_result_stands_beside_the_first():
    ours = {"provider": "smkern", "placement": "spread", "num_sms": 16, "us": 10.0}
    ours |= {"vs_cublas": 0.9}
    peer = {"provider": "cublas", "placement": "default", "num_sms": 16, "us": 9.0}
    second = [ours | {"us": 9.5, "vs_cublas": 1.0}, peer | {"us": 9.4}]
    noted = note_again([ours, peer], second)
    assert (noted[0]["us"], noted[0]["us_again"], noted[0]["vs_cublas_again"]) == (10.0, 9.5, 1.0)
    assert noted[1]["us_again"] == 9.4
    assert note_again([ours, peer], []) == [ours, peer]


def suite_of(cuda, **options) -> GroupSuite:
    bench = AddBench(cuda, **options)
    return GroupSuite(lambda cases: bench, lambda cells: {"cells": len(cells)}, loses_to_best)


def test_a_run_goes_on_where_it_stopped(virtual_gpu, tmp_path):
    groups = groups_of((Add(1), Add(2)), (16, 132))
    suite, path = suite_of(virtual_gpu), tmp_path / "add.json"
    results = Results()
    stopped = Output(path, deadline=Deadline.after(0.0))
    assert suite.run(groups, results, stopped, again=True) == 4
    assert not path.exists()
    assert suite.run(groups[:3], results, Output(path), again=True) == 0
    loaded = load_results(path)
    assert loaded.summary == {"cells": 3}
    assert suite.pending(groups, loaded, again=True) == groups[3:]


def test_what_lost_only_once_is_measured_whole_again(virtual_gpu, tmp_path):
    suite = suite_of(virtual_gpu, rivals=[("torch", "spread", "", 40.0, 3)])
    results, output = Results(), Output(tmp_path / "add.json")
    assert suite.run([GROUP], results, output, again=False) == 0
    assert suite.pending([GROUP], results, again=True) == [GROUP]
    assert suite.run([GROUP], results, output, again=True) == 0
    assert all(cell["us_again"] for cell in results.cells)


def test_the_file_is_written_where_a_measurement_breaks(tmp_path):
    def measure(item):
        yield {"op": "add", "provider": "x", "case": item}
        raise RuntimeError("gone")

    run = Run(Results(), Output(tmp_path / "x.json"), lambda cells: {}, Progress())
    with pytest.raises(RuntimeError, match="gone"):
        run.through([1, 2], measure, 2)
    assert len(load_results(tmp_path / "x.json").cells) == 1


def test_cells_that_come_together_are_in_the_file_together(tmp_path, monkeypatch):
    path, now, seen = tmp_path / "x.json", [0.0], []
    monkeypatch.setattr("smkern.bench.suite.time.monotonic", lambda: now[0])

    def measure(item):
        now[0] += 10.0
        yield {"op": "add", "provider": "x", "case": item}
        seen.append(len(load_results(path).cells) if path.exists() else 0)
        yield {"op": "add", "provider": "y", "case": item}

    Run(Results(), Output(path), lambda cells: {}, Progress()).through([1, 2, 3], measure)
    assert seen == [0, 2, 4]


def test_what_failed_stays_in_the_summary_and_nothing_measured_writes_nothing(tmp_path):
    output = Output(tmp_path / "x.json", resume=True)

    def run_of(results: Results) -> Run:
        return Run(results, output, lambda cells: {"cells": len(cells)}, Progress())

    with pytest.raises(ZeroDivisionError):
        run_of(Results()).through([0], lambda item: [1 / item])
    assert not output.path.exists()
    run = run_of(Results())
    run.errors["torch"] = "why"
    run.through([1], lambda item: [{"op": "add", "provider": "x"}])
    assert load_results(output.path).summary == {"cells": 1, "failed": {"torch": "why"}}
    resumed = run_of(output.open())
    resumed.errors["flashinfer"] = "too"
    resumed.through([2], lambda item: [{"op": "mul", "provider": "x"}])
    summary = load_results(output.path).summary
    assert summary == {"cells": 2, "failed": {"torch": "why", "flashinfer": "too"}}


def test_cases_by_parts_of_their_names_and_budgets_of_the_device(virtual_gpu):
    sizes = Sizes((Add(1), Add(2), Add(12)), (Add(1),), (16, 132, 144), (16,))
    assert named(sizes.cases, ["2"]) == (Add(2), Add(12))
    with pytest.raises(UnknownNameError, match=r"no case is named 'mul'; there are add-1, add-2"):
        named(sizes.cases, ["add-1", "mul"])
    assert len(sizes.groups(quick=False, cases=None, budgets=None)) == 3 * 2
    assert sizes.groups(quick=True, cases=None, budgets=None) == [Group(Add(1), 16)]
    assert sizes.groups(quick=True, cases="12", budgets=(8,)) == [Group(Add(12), 8)]


def test_a_command_has_the_options_of_every_suite(tmp_path):
    seen = []

    @suite_command("add-up", *case_options("add-1", peers=("torch", "flashinfer")))
    def command(output: Output, **given: Any) -> None:
        """Add up."""
        seen.append((output, given))
        conclude(Results(summary={"row": {"value": 1, "met": False, "cells": 2}}), output.path, 4)

    out = tmp_path / "x.json"
    ran = CliRunner().invoke(command, ["--out", str(out), "--budgets", "16,32", "--no-again"])
    assert "MISSED (2 cells)" in ran.output
    assert "0 cells in" in ran.output
    assert "4 groups left (go on with --resume)" in ran.output
    (output, given) = seen[0]
    assert (output.path, output.resume, output.deadline.passed) == (out, False, False)
    assert given == {
        "cases": None, "budgets": (16, 32), "peers": "torch,flashinfer", "again": False,
    }  # fmt: skip
    shown = " ".join(CliRunner().invoke(command, ["--help"]).output.split())
    for text in ("Add up.", "--resume", "--time-limit-s", "<this GPU>/add_up.json"):
        assert text in shown
