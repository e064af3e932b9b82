"""The tables of the README and of the results page come from results files, deterministically."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from smkern.bench import readme
from smkern.bench.readme import ReadmeError, blocks_of, fill
from smkern.bench.results import COMMITTED, FOLDER, Results, load_results
from smkern.bench.tables import gemm, operators, overview
from smkern.bench.tables.markdown import NOT_MEASURED, pivot
from tests.bench.synthetic import Cell, cell

pytestmark = pytest.mark.slow

META = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "torch": "2.11",
    "triton": "3.6",
    "smkern_commit": "abc",
    "date": "2026-01-02T03:04:05Z",
}


def compared(m: int, num_sms: int, ratio: float, provider: str = "smkern", **more: Any) -> Cell:
    return cell(provider, m, num_sms, vs_cublas=ratio, config="tma 128x128", **more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = Results(meta=META)
    for made in (
        compared(8, 16, 1.0),
        compared(8, 32, 1.44),
        compared(512, 16, 0.9, vs_cublas_again=0.96),
        compared(512, 16, 1.2, provider="smkern:triton"),
    ):
        results.add(made)
    row = {"value": 1.2, "target": 1.12, "met": True, "cells": 3}
    worst = {"value": 0.9, "target": 0.97, "met": False}
    results.summary = {
        "geomean_vs_cublas": {"smkern": row},
        "worst_vs_cublas": {"smkern": worst},
        "informal": {"value": 3.0},
        "unasked": {"value": 2.0, "target": None, "met": None},
        "unknown": {"value": None, "target": 2.0, "met": None},
        "over-late": {"value": None, "target": None, "met": None, "missed": {"peer": 15.6}},
    }
    path = tmp_path_factory.mktemp("results")
    results.save(path / "gemm.json")
    return path


@pytest.fixture(scope="module")
def blocks(folder: Path) -> dict[str, str]:
    return blocks_of(folder)


@pytest.fixture(scope="module")
def committed() -> dict[str, str]:
    return blocks_of(FOLDER / COMMITTED)


def text_of(names: list[str]) -> str:
    return "# x\n" + "".join(f"<!-- {name} -->\nold\n<!-- /{name} -->\ntext\n" for name in names)


def test_fill_replaces_content_and_keeps_the_rest() -> None:
    blocks = {"a": "new\n", "b": r"\1 | x", "c": ""}
    (first, second) = fill([text_of(["a", "b"]), text_of(["c"])], blocks)
    assert first == (
        "# x\n<!-- a -->\n\nnew\n\n<!-- /a -->\ntext\n<!-- b -->\n\n\\1 | x\n\n<!-- /b -->\ntext\n"
    )
    assert fill([first, second], blocks) == [first, second]


@pytest.mark.parametrize(
    ("pages", "count"),
    [([], 0), (["<!-- a -->\n"], 0), ([text_of(["a", "a"])], 2), ([text_of(["a"])] * 2, 2)],
)
def test_a_block_must_be_there_once(pages: list[str], count: int) -> None:
    with pytest.raises(ReadmeError, match=f"block 'a' is {count} times"):
        fill(pages, {"a": "new"})


def test_an_unknown_block_is_refused() -> None:
    with pytest.raises(ReadmeError, match="block 'b' is 1 times on the pages, and unknown"):
        fill([text_of(["a", "b"])], {"a": "new"})


def test_a_pivot_keeps_rows_in_order_and_sorts_columns() -> None:
    entries = [("y", 16, "1"), ("x", 8, "2"), ("y", 8, "3"), ("y", 16, "4")]
    assert pivot("row \\ SMs", entries).splitlines() == [
        "| row \\ SMs | 8 | 16 |",
        "| --- | ---: | ---: |",
        "| y | 3 | 4 |",
        "| x | 2 |  |",
    ]
    assert pivot("row", []) == NOT_MEASURED


def test_gemm_table_has_rows_of_m_and_columns_of_budgets(blocks: dict[str, str]) -> None:
    table = blocks["gemm-table"]
    assert "as dispatched, over cuBLAS**: geomean 1.114 over 3 cells, worst 0.96" in table
    assert "| M \\ SMs | 16 | 32 |" in table
    assert "| 8 | 1.00 | 1.44 |" in table
    assert "| 512 | 0.96 |  |" in table
    assert "our own kernels only, over cuBLAS**: geomean 1.200" in table


def test_rates_take_the_better_cublas() -> None:
    cells = [
        cell("smkern", 2048, 60, tflops=390.4),
        cell("cublas", 2048, 60, tflops=300.0),
        cell("cublas", 2048, 60, tflops=328.0, placement="default"),
        cell("smkern", 2048, 132, tflops=780.0),
        cell("smkern", 8, 60, tflops=1.0),
    ]
    table = gemm.rates_table(cells)
    assert table.splitlines()[2:] == [
        "| 2048 x 6144 x 4096, smkern | 390 | 780 |",
        "| 2048 x 6144 x 4096, cuBLAS | 328 |  |",
    ]


def test_bandwidth_is_of_reads_alone() -> None:
    read = {"op": "read", "case": {}, "num_sms": 16, "provider": "smkern", "tbps": 3.2}
    cells = [
        read,
        read | {"num_sms": 8, "tbps": 1.78},
        read | {"provider": "driver", "tbps": 2.51},
        read | {"provider": "random-0", "tbps": 2.60},
        read | {"provider": "id-order", "tbps": 3.10},
        read | {"case": {"beside": "gemm"}, "tbps": 9.0},
        read | {"op": "host", "tbps": 9.0},
    ]
    assert operators.bandwidth_table(cells).splitlines()[2:] == [
        "| smkern | 1.78 | 3.20 |",
        "| the driver's own groups of 8 |  | 2.51 |",
        "| best of the other orders tried |  | 3.10 |",
    ]


def test_a_losing_cell_is_named_with_both_measurements(blocks: dict[str, str]) -> None:
    losing = blocks["gemm-losing"]
    line = "| 512 x 6144 x 4096 | 16 | `smkern` | 0.97 | 0.900 | 0.960 | `tma 128x128` |"
    assert line in losing
    assert "1.44" not in losing


def test_targets_are_rows_that_have_one(blocks: dict[str, str]) -> None:
    targets = blocks["targets"]
    assert "| gemm: geomean_vs_cublas smkern | 1.2 | 1.12 | met |" in targets
    assert "| gemm: unasked | 2 |  |  |" in targets
    assert "| gemm: unknown |  | 2 | not measured |" in targets
    assert "| gemm: over-late |  |  | the peer missed it |" in targets
    assert "informal" not in targets


def test_a_row_of_gpus_is_of_the_gpu_that_heads_it() -> None:
    mine = FOLDER / "h100-80gb-hbm3"
    table = readme.BLOCKS["gpus"](mine, readme._suites(mine))
    h100, h200 = (
        overview.target_rows(load_results(FOLDER / gpu / "gemm.json").summary)
        for gpu in ("h100-80gb-hbm3", "h200")
    )
    name = "model_over_tuned"
    assert table.startswith("| what | H100 80GB HBM3 | H200 |\n")
    assert f"| gemm: {name} | {h100[name]['value']:.4g} | {h200[name]['value']:.4g} |" in table


def test_suites_count_their_misses(blocks: dict[str, str]) -> None:
    row = blocks["suites"].splitlines()[2]
    assert row.startswith("| [`gemm`](bench/results/README.md#gemm) | 1.20x cuBLAS in geomean")
    assert row.endswith("| 1 | 1 | 1 |"), "a value that has no target is none of these"


def test_the_headline_has_a_loss(committed: dict[str, str]) -> None:
    lines = committed["headline"].splitlines()
    assert len(lines) == 3
    assert "A loss" in lines[2]
    slower = "splits are slower for qwen3-8b at 12 ms (0.82x, in the median step), "
    assert slower + "qwen3-32b at 35 ms (0.48x)" in lines[2]
    assert "no split" not in lines[2]


def test_a_limit_that_no_split_keeps_is_a_loss() -> None:
    suites = readme._suites(FOLDER / COMMITTED)
    names = ("steady", "mux_over_aggregated_35ms")  # a gain, and what it is of

    def is_of_splits(cell: Cell) -> bool:
        case = cell["case"]
        return (case.get("model"), case["name"]) in [("qwen3-32b", name) for name in names]

    suites["runtime"].drop(is_of_splits)
    loss = overview.headline(suites).splitlines()[2]
    assert "no split keeps qwen3-32b at 35 ms (chunks: 3.9 prompt tokens/ms)" in loss


def test_headlines_are_of_rows_that_the_suites_have(committed: dict[str, str]) -> None:
    assert "nan" not in committed["suites"]
    assert len(committed["suites"].splitlines()) == 2 + len(overview.HEADLINES)


def test_without_results_every_block_says_so(tmp_path: Path) -> None:
    assert set(blocks_of(tmp_path).values()) == {NOT_MEASURED}


def test_the_pages_have_every_block(blocks: dict[str, str]) -> None:
    pages = fill([page.read_text() for page in readme.PAGES], blocks)
    assert sum(page.count("<!-- ") for page in pages) == 2 * len(blocks)


def test_the_pages_are_what_the_committed_results_say(
    committed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readme, "blocks_of", {FOLDER / COMMITTED: committed}.__getitem__)
    result = CliRunner().invoke(readme.command, ["--check"])
    assert result.exit_code == 0, result.output


def test_command_writes_once_then_is_up_to_date(
    folder: Path, blocks: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readme, "blocks_of", {folder: blocks}.__getitem__)
    first, *others = blocks
    pages = [tmp_path / "README.md", tmp_path / "results.md"]
    pages[0].write_text(text_of([first]))
    pages[1].write_text(text_of(others))
    arguments = [f"--page={page}" for page in pages] + ["--results", str(folder)]
    assert CliRunner().invoke(readme.command, [*arguments, "--check"]).exit_code == 1
    assert "2 of 2 pages rewritten" in CliRunner().invoke(readme.command, arguments).output
    assert "up to date" in CliRunner().invoke(readme.command, [*arguments, "--check"]).output
