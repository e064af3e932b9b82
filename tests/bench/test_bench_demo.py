"""The demo without a GPU: everything that can run does, and the rest is named."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import smkern
from smkern.bench import demo
from smkern.bench.results import Results


@pytest.fixture
def console() -> Console:
    return Console(file=StringIO(), width=140)


def printed(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_plan_has_a_row_for_every_m_and_budget(console: Console) -> None:
    table = demo.plan_table(smkern.load_profile(), ms=(64, 2048))
    assert table.row_count == 2 * len(demo.BUDGETS)
    console.print(table)
    assert "as planned for an NVIDIA H200" in printed(console)


def test_interpreted_kernel_reports_every_budget() -> None:
    lines = demo.interpret().splitlines()
    assert len(lines) == 8
    assert all("against fp64" in line for line in lines)


def test_what_could_not_run_is_named(
    console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "COMMITTED", tmp_path / "gemm.json")
    monkeypatch.setattr(demo, "interpret", lambda: "interpreted")
    demo.demo_without_gpu(console, tmp_path)
    text = printed(console)
    assert "What could not run here:" in text
    assert all(line in " ".join(text.split()) for line in demo.COULD_NOT_RUN)
    assert "there is no gemm.json yet" in text


def test_committed_results_are_drawn(
    console: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = Results(meta={"gpu": "NVIDIA H200"})
    for num_sms in (16, 32):
        results.add(gemm_cell(num_sms, "smkern", 100.0))
    results.save(tmp_path / "gemm.json")
    monkeypatch.setattr(demo, "COMMITTED", tmp_path / "gemm.json")
    monkeypatch.setattr(demo, "interpret", lambda: "interpreted")
    demo.demo_without_gpu(console, tmp_path)
    assert (tmp_path / "gemm-m64.png").stat().st_size > 10_000


def test_rates_show_cublas_in_its_better_partition(console: Console) -> None:
    results = Results()
    results.add(gemm_cell(16, "smkern", 120.0))
    results.add(gemm_cell(16, "cublas", 100.0, placement="spread"))
    results.add(gemm_cell(16, "cublas", 110.0, placement="default"))
    console.print(demo.rates_table(results))
    assert [cell for cell in printed(console).splitlines()[-1].split() if cell] == [
        "64", "16", "120", "110", "1.09",
    ]  # fmt: skip


def gemm_cell(
    num_sms: int, provider: str, tflops: float, placement: str = "spread"
) -> dict[str, object]:
    return {
        "op": "gemm",
        "case": {"m": 64, "n": 6144, "k": 4096, "dtype": "bf16"},
        "num_sms": num_sms,
        "group_sms": num_sms,
        "mode": "green",
        "placement": placement,
        "provider": provider,
        "us": 10.0,
        "tflops": tflops,
        "fraction_of_ceiling": 0.8,
    }
