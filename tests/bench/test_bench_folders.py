"""Where results lie: under the name of the chip that was measured, and under no other's."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from smkern.bench.results import (
    COMMITTED,
    FOLDER,
    Results,
    ResultsError,
    load_results,
    open_results,
    results_folder,
)
from smkern.bench.suite import file_options
from smkern.cli import SUITES, cli
from smkern.device import gpu_folder
from tests import gpus
from tests.bench.synthetic import cell

FILES = sorted(FOLDER.glob("*/*.json"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: "/".join(path.parts[-2:]))
def test_a_committed_file_lies_in_its_gpus_folder(path: Path) -> None:
    gpu = load_results(path).meta["gpu"]
    assert path.parent.name == gpu_folder(gpu)


def test_what_is_shown_without_a_gpu_is_committed() -> None:
    assert (FOLDER / COMMITTED / "gemm.json") in FILES


def suites_with_results() -> list[str]:
    """Suites that measure: their --out is a file, and not asked for."""
    bench = cli.get_command(click.Context(cli), "bench")
    found = []
    for name in SUITES:
        for option in bench.get_command(click.Context(bench), name).params:
            if option.name == "out" and "<this GPU>" in str(option.show_default):
                found.append(name)
    return found


def test_every_suite_that_measures_asks_the_device() -> None:
    measured = {
        "gemm", "fp8", "attention", "ops", "model", "runtime", "ceilings", "partitions",
        "cliffs", "batch-invariant", "host", "untuned", "replay", "replay-ablations",
        "replay-confirm", "server", "engines", "ranks", "cutlass", "power", "layouts",
    }  # fmt: skip
    assert set(suites_with_results()) == measured


@pytest.mark.parametrize("info", [gpus.H200, *gpus.FOREIGN], ids=gpus.by_name)
@pytest.mark.parametrize("suite", suites_with_results())
def test_the_default_file_is_named_by_the_device(suite, info, monkeypatch) -> None:
    gpus.install(monkeypatch, info)
    bench = cli.get_command(click.Context(cli), "bench")
    command = bench.get_command(click.Context(bench), suite)
    asked = [
        word for param in command.params if param.required for word in (param.opts[0], __file__)
    ]
    context = command.make_context(suite, asked)
    out = context.params["out"]
    assert out.parts[:3] == ("bench", "results", gpu_folder(info.name))
    assert out.stem == suite.replace("-", "_")
    assert (out.parent.name == "h200") == (info is gpus.H200)


def test_of_two_gpus_the_current_one_names_the_folder(monkeypatch) -> None:
    gpus.install(monkeypatch, gpus.A100, gpus.H200)
    assert results_folder().name == "a100-sxm4-80gb"
    monkeypatch.setattr("torch.cuda.current_device", lambda: 1)
    assert results_folder().name == "h200"


def test_without_a_gpu_the_folder_is_nobodys(monkeypatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert results_folder().name == "unknown"


@pytest.mark.parametrize(
    "suite",
    sorted(
        {*suites_with_results()}
        - {"replay", "replay-ablations", "replay-confirm", "ranks", "server"}
    ),
)
def test_without_a_gpu_a_suite_says_so_and_makes_no_file(suite, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    ran = CliRunner().invoke(cli, ["bench", suite, "--out", str(tmp_path / "x.json")])
    assert ran.exit_code == 1
    assert "torch sees no GPU" in f"{ran.output}{ran.exception}"
    assert list(tmp_path.iterdir()) == []


def test_help_names_no_gpu() -> None:
    @click.command()
    @file_options("gemm", quick="few")
    def command(**_: object) -> None: ...

    text = " ".join(command.get_help(click.Context(command)).split())
    assert "bench/results/<this GPU>/gemm.json" in text


@pytest.mark.parametrize("resume", [False, True])
def test_another_gpus_file_is_neither_added_to_nor_overwritten(tmp_path, resume) -> None:
    path = tmp_path / "gemm.json"
    results = Results(meta={"gpu": "NVIDIA H200"})
    results.add(cell())
    results.save(path)
    before = path.read_bytes()
    with pytest.raises(ResultsError, match=r"gemm\.json.*'NVIDIA H200' and of 'NVIDIA H20'.*--out"):
        open_results(path, resume=resume, meta={"gpu": "NVIDIA H20"})
    assert path.read_bytes() == before


def test_files_of_two_gpus_are_not_merged() -> None:
    with pytest.raises(ResultsError, match="keep a file for each GPU"):
        Results(meta={"gpu": "NVIDIA H200"}).merge(Results(meta={"gpu": "NVIDIA B200"}))
