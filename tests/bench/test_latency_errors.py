"""Errors of latency models as a command: a table, a learning curve, cells of a results file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from smkern.bench.latency_errors import command, curve_cells, error_cells
from smkern.bench.results import load_results
from smkern.latency.accuracy import Accuracy, Errors, LearningPoint
from smkern.latency.models import MODELS
from smkern.latency.profile_file import Measured, ProfileFile
from tests.latency.small import SIZES
from tests.latency.test_accuracy import measured

FOUND = Accuracy(
    {"decode": Errors(2, 0.04, 0.06), "mixed": Errors(0, 0.0, 0.0), "all": Errors(2, 0.04, 0.06)},
    {"decode": Errors(1, 0.1, 0.1), "all": Errors(1, 0.1, 0.1)},
    guard_coverage=0.995,
    guard_over=0.11,
    refused=3,
)


def test_a_cell_for_each_figure() -> None:
    cells = {cell["case"]["name"]: cell for cell in error_cells("m", {"table": FOUND})}
    assert {name: cell["value"] for name, cell in cells.items()} == {
        "solo_mape": 0.04,
        "solo_worst": 0.06,
        "beside_mape": 0.1,
        "beside_worst": 0.1,
        "guard_coverage": 0.995,
        "guard_over": 0.11,
    }
    one = cells["solo_mape"]
    assert (one["op"], one["provider"], one["unit"], one["refused"]) == (
        "latency", "smkern", "fraction", 3,
    )  # fmt: skip
    assert one["by_kind"].keys() == {"decode", "all"}
    assert "by_kind" not in cells["guard_over"]


def test_a_learning_curve_has_the_mean_of_the_draws_that_could_be_fitted() -> None:
    better = replace(FOUND, solo={"all": Errors(2, 0.02, 0.06)})
    points = [
        LearningPoint("bullet", 25, 0, FOUND),
        LearningPoint("bullet", 25, 1, better),
        LearningPoint("bullet", 25, 2, None, "too few"),
        LearningPoint("drift", 25, 0, None, "too few"),
    ]
    (solo, beside) = curve_cells("m", points)
    assert solo["case"] == {"model": "m", "name": "solo_mape_by_samples", "samples": 25}
    assert (solo["value"], solo["draws"], solo["not_fitted"]) == (0.03, [0.04, 0.02], 1)
    assert beside["value"] == pytest.approx(0.1)


def test_the_command_judges_a_profile(tmp_path: Path) -> None:
    file = ProfileFile(tmp_path / "small.profile.jsonl")
    meta = {"gpu": "NVIDIA H200", "model": "small", "date": "2026-11-22", "driver": "1"}
    file.begin(meta | {"sizes": SIZES.to_json(), "gemms": None})
    samples = measured()
    file.add([Measured("fit", sample) for sample in samples])
    file.add([Measured("judge", sample, held_out=True) for sample in samples[::3]])
    out = tmp_path / "latency.json"
    ran = CliRunner().invoke(command, [str(file.path), "--out", str(out)])
    assert ran.exit_code == 0, ran.output
    assert f"fitted to {len(samples)} launches, judged by {len(samples[::3])}" in ran.output
    results = load_results(out)
    assert results.meta["gpu"] == "NVIDIA H200"
    # judged by what they were fitted to, models that hold the truth have no error
    values = {
        (cell["provider"], cell["case"]["name"]): cell["value"]
        for cell in results.cells
        if "samples" not in cell["case"]
    }
    assert values["drift", "solo_mape"] == values["bullet", "solo_mape"] == 0.0
    assert values["duetserve", "solo_mape"] > 0.05
    curves = {cell["provider"] for cell in results.cells if "samples" in cell["case"]}
    assert len(curves) == len(MODELS)

    # another profile of the model, with fewer samples, replaces all of its cells
    kept = len(results.cells)
    for model in ("small", "other"):
        case = {"model": model, "name": "solo_mape_by_samples", "samples": 12_345}
        results.add({"op": "latency", "case": case, "provider": "smkern", "value": 1.0})
    results.save(out)
    CliRunner().invoke(command, [str(file.path), "--out", str(out)], catch_exceptions=False)
    again = load_results(out).cells
    assert len(again) == kept + 1
    stale = [cell["case"]["model"] for cell in again if cell["case"].get("samples") == 12_345]
    assert stale == ["other"]


def test_a_file_that_is_no_profile_is_named(tmp_path: Path) -> None:
    path = tmp_path / "none.profile.jsonl"
    path.write_text("{}\n")
    ran = CliRunner().invoke(command, [str(path)])
    assert "none.profile.jsonl is not a profile of smkern" in str(ran.exception)
