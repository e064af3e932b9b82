from __future__ import annotations

import pytest
from click.testing import CliRunner

from smkern.bench.plots import PICTURES, command, draw
from smkern.bench.plots.operators import best, ideal
from smkern.bench.results import Results
from tests.bench.synthetic import cell

SHAPES = ((6144, 4096), (28672, 4096), (4096, 14336))


def results() -> Results:
    found = Results(meta={"gpu": "NVIDIA H200"})
    for shape in SHAPES:
        for m in (64, 2048):
            for num_sms in (16, 60, 100, 132):
                us = 1e5 / num_sms * m / 2048
                for provider, slower in (("smkern", 1.0), ("cublas", 1.3), ("wrong-budget", 2.0)):
                    found.add(cell(provider, m, num_sms, shape=shape, us=us * slower))
    return found


@pytest.mark.slow
def test_a_picture_a_row_count(tmp_path):
    results().save(tmp_path / "gemm.json")
    cliffs = Results()
    for num_sms in range(16, 132, 2):
        cliffs.add(cell(op="gemm_cliffs", num_sms=num_sms, us=1e4 / num_sms))
    cliffs.save(tmp_path / "cliffs.json")
    ran = CliRunner().invoke(command, ["--results", str(tmp_path), "--out", str(tmp_path / "out")])
    assert ran.exit_code == 0, ran.output
    written = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert set(written) == {"gemm-m64.png", "gemm-m2048.png", "cliffs.png"}
    assert all(data.startswith(b"\x89PNG") for data in written.values())


@pytest.mark.slow
def test_the_same_results_give_the_same_picture(tmp_path):
    results().save(tmp_path / "gemm.json")
    for _ in range(2):
        CliRunner().invoke(command, ["--results", str(tmp_path), "--out", str(tmp_path / "a")])
        pictures = [(tmp_path / "a" / "gemm-m64.png").read_bytes()]
    CliRunner().invoke(command, ["--results", str(tmp_path), "--out", str(tmp_path / "b")])
    assert pictures == [(tmp_path / "b" / "gemm-m64.png").read_bytes()]


@pytest.mark.parametrize("suite", PICTURES)
def test_nothing_measured_is_no_picture(suite, tmp_path):
    assert draw(suite, Results(), tmp_path) == []


def test_no_results_is_said(tmp_path):
    ran = CliRunner().invoke(command, ["--results", str(tmp_path)])
    assert ran.exit_code == 0
    assert "no results" in ran.output


def test_a_corrupt_file_is_an_error_with_a_remedy(tmp_path):
    (tmp_path / "gemm.json").write_text("{")
    ran = CliRunner().invoke(command, ["--results", str(tmp_path)])
    assert "--out" in str(ran.exception)


def test_the_better_partition_counts_and_the_ideal_is_the_floor():
    cells = [
        cell("cublas", tflops=300.0),
        cell("cublas", tflops=350.0, placement="default"),
        cell("cublas", us=None, tflops=None, num_sms=16),
        cell("smkern", tflops=400.0, fraction_of_ceiling=0.8),
    ]
    assert best(cells, "cublas") == {60: 350.0}
    assert ideal(cells) == {60: 500.0}
