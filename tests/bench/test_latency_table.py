"""Tables for the predictor, from profiles."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from smkern.bench import latency_table
from smkern.bench.latency_table import command, committed, write_table
from smkern.bench.results import FOLDER
from smkern.device import gpu_folder
from smkern.kernels.cute import compile as cute
from smkern.latency import TablePredictor
from smkern.latency.accuracy import accuracy
from smkern.latency.gemm_times import GemmTimes
from smkern.latency.model_gemms import gemm_times
from smkern.latency.profile_file import read_profile
from smkern.latency.table import SHIPPED
from smkern.latency.work import Chunk, Size
from smkern.models import preset
from smkern.profile import load_profile
from tests.extras import set_cutlass


def profile_of(model: str, gpu: str = "h200") -> Path:
    return FOLDER / gpu / f"{model}.profile.jsonl"


@pytest.mark.parametrize("profile", committed(), ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_committed_profile_makes_the_shipped_table(profile: Path, tmp_path: Path) -> None:
    made = write_table(profile, tmp_path)
    shipped = SHIPPED / made.relative_to(tmp_path)
    remedy = f"smkern bench latency-table {profile} --out {SHIPPED}"
    assert made.read_bytes() == shipped.read_bytes(), remedy


@pytest.mark.parametrize("profile", committed(), ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_committed_profile_has_todays_times_of_gemms(
    profile: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`smkern serve` multiplies a table's factors with today's."""
    measured = read_profile(profile)
    with_cutlass = bool(measured.meta.get("cutlass"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    set_cutlass(monkeypatch, with_cutlass)
    config, gpu = preset(str(measured.meta["model"])), load_profile(gpu_folder(measured.gpu))
    today = gemm_times(config, gpu, [16, 132])
    assert (today is None) is (measured.gemms is None)
    for at, num_sms in enumerate(today.sms if today else ()):
        index = measured.gemms.sms.index(num_sms)
        remedy = f"smkern bench latency-table --renew {profile} --out {SHIPPED}"
        assert today.layer_us[at] == pytest.approx(measured.gemms.layer_us[index], abs=0.1), remedy
        assert today.head_us[at] == pytest.approx(measured.gemms.head_us[index], abs=0.1), remedy


@pytest.mark.parametrize(
    ("model", "gpu", "alone", "beside"),
    [
        ("qwen3-8b", "h200", 0.04, 0.055),
        ("qwen3-32b", "h200", 0.04, 0.065),
        ("qwen3-8b", "h100-80gb-hbm3", 0.05, 0.07),
    ],
)
def test_held_out_steps_are_predicted(model: str, gpu: str, alone: float, beside: float) -> None:
    """By the shipped table: random steps of unlike requests, also on rungs that were not timed."""
    held_out = read_profile(profile_of(model, gpu)).held_out
    found = accuracy(TablePredictor.load(model, gpu), held_out)
    assert len(held_out) >= 80  # 32B's profile was cut after 350 cells
    assert found.refused == 0
    assert found.solo["all"].mean < alone
    assert found.beside["decode"].mean < beside
    assert found.beside["prefill"].mean < beside


def beginning(model: str, count: int, path: Path) -> Path:
    """A profile's first lines."""
    lines = profile_of(model).read_text().split("\n")[: count + 1]
    path.write_text("\n".join([*lines, ""]))
    return path


def test_a_profile_becomes_a_table(tmp_path: Path) -> None:
    path = write_table(beginning("qwen3-8b", 60, tmp_path / "p.jsonl"), tmp_path)
    assert path == tmp_path / "h200" / "qwen3-8b.json"
    predictor = TablePredictor.read(path)
    (timed,) = [
        line.sample
        for line in read_profile(tmp_path / "p.jsonl").lines
        if line.cell == "[24,[64,2048],[],false,false]"
    ]
    assert predictor.alone_us(timed.size, 24) == pytest.approx(timed.us, rel=1e-3)
    prompt = Size((Chunk(1024),), 36, 36, True)
    assert predictor.slowdown(timed.size, 24, prompt, 108) > 1.2


def test_command(tmp_path: Path) -> None:
    path = beginning("qwen3-8b", 30, tmp_path / "p.jsonl")
    done = CliRunner().invoke(command, [str(path), "--out", str(tmp_path)], catch_exceptions=False)
    assert done.output == f"{tmp_path / 'h200' / 'qwen3-8b.json'}\n"
    path.write_text(path.read_text().replace('"driver"', '"chauffeur"'))
    failed = CliRunner().invoke(command, [str(path), "--out", str(tmp_path)])
    assert "lacks driver in its provenance" in str(failed.exception)
    path.write_text("{}\n")
    failed = CliRunner().invoke(command, [str(path), "--out", str(tmp_path)])
    assert "its format is not" in str(failed.exception)


def test_a_profile_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was timed stays; a predictor's factors are over today's times of GEMMs."""
    path = beginning("qwen3-8b", 60, tmp_path / "p.jsonl")
    before, lines = read_profile(path), path.read_text().partition("\n")[2]
    times = GemmTimes.of([8, 132], lambda rows, num_sms: (1000.0 * rows - num_sms, 1.0))
    monkeypatch.setattr(latency_table, "gemm_times", lambda config, profile: times)
    monkeypatch.setattr(latency_table, "kernels_hash", lambda gpu, sizes: "today's")
    monkeypatch.setattr(cute, "absent", lambda: "")
    words = ["--renew", "--out", str(tmp_path), str(path)]
    assert CliRunner().invoke(command, words, catch_exceptions=False).exit_code == 0
    after = read_profile(path)
    assert (after.gemms, after.meta["kernels"]) == (times, "today's")
    assert after.meta["date"] == before.meta["date"]
    assert "renewed" in after.meta
    assert path.read_text().partition("\n")[2] == lines
    with pytest.warns(UserWarning, match="today's"):
        made = TablePredictor.read(tmp_path / "h200" / "qwen3-8b.json")
    sample = next(x for x in after.fitted if not (x.size.chunks or x.beside_sms))
    assert made.alone_us(sample.size, sample.num_sms) == pytest.approx(sample.us, rel=0.05)

    kept = path.read_bytes()
    monkeypatch.setattr(cute, "absent", lambda: "it is not installed")
    failed = CliRunner().invoke(command, words)
    assert "was timed with CUTLASS's kernels" in str(failed.exception)
    assert path.read_bytes() == kept
    path.write_text(path.read_text().replace('"cutlass"', '"shears"'))
    monkeypatch.setattr(cute, "is_there", lambda: True)  # some are kept
    failed = CliRunner().invoke(command, words)
    assert "was timed without CUTLASS's kernels" in str(failed.exception)
