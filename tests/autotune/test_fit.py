"""Fitting the cost model: it finds the constants of an imagined device, and says what is lost."""

import gzip
import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from smkern.autotune import fit, raw
from smkern.measure.gemm import SHAPES
from smkern.tuning import cells, constraints, cost_constants
from smkern.tuning.cost_constants import DEFAULTS

pytestmark = pytest.mark.slow


def test_gap_is_what_the_pick_loses(measurements, profile):
    items = [replace(item, us=item.predicted_us) for item in measurements]
    assert fit.gap(items, profile, DEFAULTS).geomean == pytest.approx(1.0)
    worst = {}
    for item in items:  # make every cell's pick 10% slower than the others
        best = worst.setdefault(fit.key_of(item), item)
        if item.predicted_us < best.predicted_us:
            worst[fit.key_of(item)] = item
    items = [replace(item, us=1.1 if worst[fit.key_of(item)] is item else 1.0) for item in items]
    found = fit.gap(items, profile, DEFAULTS)
    assert found.geomean == pytest.approx(1.1)
    assert found.cells == len(worst)


def test_fit_predicts_the_imagined_device(measurements, profile, truth):
    fitted = fit.fit(measurements, profile, names=[n for n in fit.NAMES if n != "blend"])
    predicted = fit.predictions(measurements, profile, fitted)
    measured = [item.us for item in measurements]
    errors = [abs(p / us - 1) for p, us in zip(predicted, measured, strict=True)]
    assert sum(errors) / len(errors) < 0.03
    before = fit.gap(measurements, profile, DEFAULTS).geomean
    after = fit.gap(measurements, profile, fitted).geomean
    possible = fit.gap(measurements, profile, truth).geomean
    assert after <= min(before, possible + 0.003)


def test_failed_and_library_results_are_not_fitted_to(measurements):
    one = measurements[0]
    left = fit.usable(
        [
            replace(one, error="wrong result"),
            replace(one, config=constraints.CUBLASLT),
            replace(one, us=1.0),
            replace(one, us=2.0),
        ]
    )
    assert [item.us for item in left] == [2.0], "of repeats the last counts"


def test_command_writes_constants_that_dispatch_reads(measurements, profile, tmp_path, monkeypatch):
    path = tmp_path / "raw.jsonl"
    raw.append(path, measurements[:160])
    monkeypatch.setattr(fit, "load_profile", lambda: profile)
    out, left = tmp_path / "h200" / "cost_model.json", tmp_path / "left"
    packed = tmp_path / "raw.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    words = [str(packed), "--out", str(out), "--check", "--iterations", "2"]
    result = CliRunner().invoke(fit.command, [*words, "--leave-out", str(left)])
    assert result.exit_code == 0, result.output
    assert "fitted: " in result.output
    assert "every third of the weights" in result.output
    assert "every third of the budgets" in result.output
    assert {tuple(map(int, x.stem.split("x"))) for x in left.glob("*.json")} == set(SHAPES)
    monkeypatch.setattr(cells, "SHIPPED", tmp_path)
    cost_constants.load_constants.cache_clear()
    loaded = cost_constants.load_constants("NVIDIA H200")
    cost_constants.load_constants.cache_clear()
    assert loaded != DEFAULTS
    assert loaded.blend == DEFAULTS.blend
    assert json.loads(out.read_text())["meta"]["gpu"] == "NVIDIA H200"


def test_held_out_values_are_in_neither_place_twice(measurements):
    seen, unseen = fit.held_out(measurements, lambda item: item.budget.num_sms)
    assert len(seen) + len(unseen) == len(measurements)
    counts = [{item.budget.num_sms for item in part} for part in (seen, unseen)]
    assert not counts[0] & counts[1]
    assert all(counts)
