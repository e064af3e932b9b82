"""Tables for the predictor, from profiles."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from smkern.bench.latency_table import command, committed, gemm_times, write_table
from smkern.latency import Sample, TablePredictor
from smkern.latency.accuracy import accuracy
from smkern.latency.gemm_times import ROWS
from smkern.latency.profile_file import read_profile
from smkern.latency.sample import samples_of
from smkern.latency.table import SHIPPED, gemms_in, read_timings
from smkern.latency.work import Chunk, Size
from smkern.models import preset
from smkern.profile import load_profile

MODELS = ("qwen3-8b", "qwen3-32b")
"""While ours was built their held-out steps were looked at."""


def profile_of(model: str) -> Path:
    (path,) = [path for path in committed() if path.name.startswith(f"{model}.")]
    return path


@pytest.mark.parametrize("model", [*MODELS, "qwen3-14b", "qwen3-30b-a3b"])
def test_shipped_tables_are_those_of_the_committed_profiles(model: str) -> None:
    meta, lines, sizes = read_profile(profile_of(model))
    table, of_table = read_timings(SHIPPED / "h200" / f"{model}.json")
    remedy = "a profile was measured again: smkern bench latency-table"
    assert (of_table, table.meta["kernels"]) == (sizes, meta["kernels"]), remedy
    alike = [x.sample for x in lines if not x.held_out]
    assert sorted(map(_key, samples_of(table.cells, sizes.num_layers))) == sorted(map(_key, alike))


def _key(sample: Sample) -> str:
    """All that a table keeps of a sample."""
    size, beside = sample.size, sample.beside
    what = [size.chunks, size.chunks and size.layers, size.batch, size.total_kv, sample.num_sms]
    other = beside and (beside.batch, beside.total_kv, beside.chunks)
    return repr([*what, round(sample.us, 1), sample.beside_sms, other])


@pytest.mark.parametrize("model", MODELS)
def test_held_out_steps_are_predicted(model: str) -> None:
    """By the shipped table: random steps of unlike requests, also on rungs that were not timed."""
    held_out = [line.sample for line in read_profile(profile_of(model))[1] if line.held_out]
    found = accuracy(TablePredictor.load(model), held_out)
    assert len(held_out) >= 100
    assert found.refused == 0
    assert found.solo["all"].mean < 0.04
    assert found.beside["decode"].mean < 0.075
    assert found.beside["prefill"].mean < 0.065


def test_gemms_of_a_model_go_up_a_stair() -> None:
    times = gemms_in(Path("x"), read_timings(SHIPPED / "h200" / "qwen3-8b.json")[0])
    assert times is not None
    assert (times.sms[0], times.sms[-1]) == (8, 132)
    profile = load_profile("h200")
    small = preset("qwen3-8b").replace(
        num_layers=1, hidden_size=1024, num_q_heads=8, num_kv_heads=2, intermediate_size=3072,
        vocab_size=32_000,
    )  # fmt: skip
    again = gemm_times(small, profile, [12, 100])
    for found in (times, again):
        assert found.us(130, 0, 1, 100) == found.us(144, 0, 1, 100)
        assert found.us(144, 0, 36, 100) == pytest.approx(36 * found.us(144, 0, 1, 100))
        assert found.us(144, 64, 1, 100) > found.us(144, 0, 1, 100)
        assert found.us(4096, 0, 1, 100) < found.us(4100, 0, 1, 100) < found.us(4352, 0, 1, 100)
        assert found.us(2 * ROWS[-1], 0, 1, 13) == pytest.approx(2 * found.us(ROWS[-1], 0, 1, 12))


def beginning(model: str, count: int, path: Path) -> Path:
    """A profile's first lines."""
    lines = profile_of(model).read_text().split("\n")[: count + 1]
    path.write_text("\n".join([*lines, ""]))
    return path


def test_a_profile_becomes_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smkern.bench.latency_table.gemm_times", lambda *args: _Known())
    path = write_table(beginning("qwen3-8b", 60, tmp_path / "p.jsonl"), tmp_path)
    assert path == tmp_path / "h200" / "qwen3-8b.json"
    predictor = TablePredictor.read(path)
    (timed,) = [
        line.sample
        for line in read_profile(tmp_path / "p.jsonl")[1]
        if line.cell == "[24,[64,2048],[],false,false]"
    ]
    assert predictor.alone_us(timed.size, 24) == pytest.approx(timed.us, rel=1e-3)
    prompt = Size((Chunk(1024),), 36, 36, True)
    assert predictor.slowdown(timed.size, 24, prompt, 108) > 1.2


class _Known:
    """The shipped table's GEMMs."""

    def to_json(self) -> dict[str, object]:
        text = (SHIPPED / "h200" / "qwen3-8b.json").read_text()
        return dict(json.loads(text)["meta"]["gemms"])


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("smkern.bench.latency_table.gemm_times", lambda *args: _Known())
    path = beginning("qwen3-8b", 30, tmp_path / "p.jsonl")
    done = CliRunner().invoke(command, [str(path), "--out", str(tmp_path)], catch_exceptions=False)
    assert done.output == f"{tmp_path / 'h200' / 'qwen3-8b.json'}\n"
    path.write_text("{}\n")
    failed = CliRunner().invoke(command, [str(path), "--out", str(tmp_path)])
    assert failed.exit_code == 1
    assert "its format is not" in failed.output
