"""The demo without a GPU: everything that can run does, and the rest is named."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

import smkern
from smkern.bench.results import Results
from smkern.errors import DeviceError, SmkernError
from smkern.examples import demo, gemm_budgets, partitions, policies
from tests.bench.synthetic import cell

pytestmark = pytest.mark.slow


@pytest.fixture
def console() -> Console:
    return Console(file=StringIO(), width=140)


def printed(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_plan_has_a_row_for_every_m_and_budget(console: Console) -> None:
    table = gemm_budgets.plan_table(smkern.load_profile(), ms=(64, 2048))
    assert table.row_count == 2 * len(gemm_budgets.BUDGETS)
    console.print(table)
    assert "as planned for an NVIDIA H200" in printed(console)


@pytest.mark.parametrize("code", [0, 1])
def test_the_interpreted_kernel_is_a_process_of_its_own(monkeypatch, code: int) -> None:
    """What it reports is `tests/interpreter/test_gemm_budgets.py`'s."""
    script = f"import os, sys; print(os.environ['TRITON_INTERPRET'], 'said '); sys.exit({code})"
    run = subprocess.run

    def instead(command: list[str], **options: Any) -> Any:
        assert command[1:] == ["-m", "smkern.examples.interpreted_gemm"]
        return run([command[0], "-c", script], **options)

    monkeypatch.setattr(subprocess, "run", instead)
    if code == 0:
        assert demo.interpret() == "1 said"
        return
    with pytest.raises(SmkernError, match="GEMM exited with 1:\n1 said"):
        demo.interpret()


def test_what_could_not_run_is_named(console, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(demo, "COMMITTED", tmp_path / "gemm.json")
    demo.show_committed(console, tmp_path)
    text = printed(console)
    assert "What could not run here:" in text
    assert all(line in " ".join(text.split()) for line in demo.COULD_NOT_RUN)
    assert "in the checkout alone" in text


def test_committed_results_are_drawn(console, tmp_path, monkeypatch) -> None:
    results = Results(meta={"gpu": "NVIDIA H200"})
    for num_sms in (16, 32):
        results.add(cell(m=64, num_sms=num_sms))
    results.save(tmp_path / "gemm.json")
    monkeypatch.setattr(demo, "COMMITTED", tmp_path / "gemm.json")
    demo.show_committed(console, tmp_path)
    assert (tmp_path / "gemm-m64.png").stat().st_size > 10_000


def test_rates_show_cublas_in_its_better_partition(console: Console) -> None:
    results = Results()
    for provider, placement, tflops in (
        ("smkern", "spread", 120.0),
        ("cublas", "spread", 100.0),
        ("cublas", "default", 110.0),
        ("wrong-budget", "spread", 60.0),
    ):
        results.add(cell(provider, 64, 16, placement=placement, tflops=tflops))
    console.print(gemm_budgets.rates_table(results))
    last_row = printed(console).splitlines()[-1].split()
    assert last_row == ["64", "16", "120", "110", "60", "1.09"]


class FakePartition:
    def __init__(self, num_sms: int) -> None:
        self.num_sms = num_sms
        self.verified = 0

    def verify(self) -> None:
        self.verified += 1

    def __enter__(self) -> FakePartition:
        return self

    def __exit__(self, *error: object) -> None: ...


def test_with_gpu_partitions_then_rates_then_the_picture(console, tmp_path, monkeypatch) -> None:
    splits = {
        rung: SimpleNamespace(decode=FakePartition(rung), prefill=FakePartition(132 - rung))
        for rung in (8, 16, 32, 64, 124)
    }

    @contextmanager
    def ladder() -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(rungs=tuple(splits), split=lambda *, decode: splits[decode])

    def run(suite: Any, groups: Any, results: Results, output: Any, *, again: bool) -> int:
        for group in groups:
            for provider in ("smkern", "cublas", "wrong-budget"):
                results.add(cell(provider, group.case.m, group.num_sms))
        return 0

    monkeypatch.setattr(smkern, "ladder", ladder, raising=False)
    monkeypatch.setattr("smkern.bench.frame.GroupSuite.run", run)
    partitions.show(console)
    gemm_budgets.show(console, tmp_path, 132)
    text = printed(console)
    assert "decode  16 SMs, prefill 116 SMs: every CTA stayed inside" in text
    assert [splits[n].decode.verified for n in (16, 32, 64)] == [1, 1, 1]
    assert "smkern / cuBLAS" in text
    assert all((tmp_path / f"gemm-m{m}.png").exists() for m in gemm_budgets.MS)


@pytest.mark.parametrize("gpu", [None, "NVIDIA H200"])
def test_the_command_shows_part_after_part(gpu, tmp_path, monkeypatch) -> None:
    seen: list[Any] = []

    def device_info() -> Any:
        if gpu is None:
            raise DeviceError("none")
        return SimpleNamespace(name=gpu, num_sms=132)

    monkeypatch.setattr(smkern, "device_info", device_info, raising=False)
    monkeypatch.setattr(demo.doctor, "examine", lambda: SimpleNamespace(failed=False))
    monkeypatch.setattr(demo.doctor, "render", lambda report, console: None)
    monkeypatch.setattr(policies, "show", lambda console, out, name: seen.append(name))
    monkeypatch.setattr(partitions, "show", lambda console: seen.append("partitions"))
    monkeypatch.setattr(gemm_budgets, "show", lambda console, out, sms: seen.append(sms))
    monkeypatch.setattr(demo, "interpret", lambda: seen.append("interpreted"))
    monkeypatch.setattr(demo, "show_committed", lambda console, out: seen.append("committed"))
    done = CliRunner().invoke(demo.command, ["--out", str(tmp_path / "new")])
    assert done.exit_code == 0, done.output
    assert seen == ([None, "interpreted", "committed"] if gpu is None else [gpu, "partitions", 132])
    assert f"1/{4 if gpu is None else 3}: every policy on a trace" in done.output, (
        "progress is shown"
    )


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "demo"
    done = CliRunner().invoke(demo.command, ["--out", str(out)])
    assert done.exit_code == 2
    text = " ".join(done.output.replace("\u2502", " ").split())
    assert f"{out} cannot be written (Not a directory): give a path in a folder" in text
