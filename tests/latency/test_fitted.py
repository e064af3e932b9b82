"""Latency models from files and from what ships."""

from __future__ import annotations

from pathlib import Path

import pytest

from smkern.errors import ArgumentError, LatencyError, TableError
from smkern.latency import Bullet, DuetServe, Size, load_model, read_model
from smkern.latency.fitted import read_samples
from smkern.latency.profile_file import Measured, ProfileFile
from smkern.latency.sample import Sample, samples_of
from smkern.latency.table import gemms_in, read_timings, shipped_path
from tests.latency.small import SIZES
from tests.latency.test_accuracy import PROMPT, STEP


def test_what_ships_is_a_model_s_samples() -> None:
    path = shipped_path("qwen3-8b", "h200")
    samples, sizes, gpu, gemms = read_samples(path)
    cells, expected = read_timings(path)
    assert samples == samples_of(cells.cells, sizes.num_layers)
    assert (sizes, gpu, gemms) == (expected, "NVIDIA H200", gemms_in(path, cells))
    bullet = load_model("bullet", "Qwen3-8B", "NVIDIA H200")
    assert isinstance(bullet, Bullet)
    alone = next(sample for sample in samples if sample.alone)
    assert bullet.alone_us(alone.size, alone.num_sms) == pytest.approx(alone.us)


def test_held_out_launches_of_a_profile_are_left_out(tmp_path: Path) -> None:
    file = ProfileFile(tmp_path / "small.profile.jsonl")
    file.begin({"gpu": "NVIDIA H200", "sizes": SIZES.to_json(), "gemms": None})
    # a profile's line of a decode step says nothing of layers
    kept = Sample(Size(num_layers=4, batch=2, total_kv=20), 20, 100.0)
    file.add([Measured("a", kept), Measured("b", Sample(STEP, 24, 1e9), held_out=True)])
    samples, sizes, gpu, gemms = read_samples(file.path)
    assert (samples, sizes, gpu, gemms) == ([kept], SIZES, "NVIDIA H200", None)
    model = read_model("bullet", file.path)
    assert model.alone_us(STEP, 20) == pytest.approx(100.0)
    with pytest.raises(LatencyError, match="no prefill was measured"):
        model.alone_us(PROMPT, 20)
    assert isinstance(read_model("duetserve", file.path), DuetServe)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"no latency model 'vidur': there are .*bullet"):
        load_model("vidur")
    with pytest.raises(
        TableError, match=r"no timings of 'gpt-2' on 'h200'; there are .*read_model"
    ):
        load_model("bullet", "gpt-2")
    with pytest.raises(TableError, match=r"none\.json is not there"):
        read_model("bullet", tmp_path / "none.json")
    with pytest.raises(TableError, match=r"none\.jsonl is not there"):
        read_model("bullet", tmp_path / "none.jsonl")
