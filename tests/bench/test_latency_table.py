"""Tables for the predictor, from results files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from smkern.bench.latency_table import command, committed, timings_of, write_tables
from smkern.bench.results import COMMITTED, FOLDER, load_results
from smkern.latency import Chunk, Size, TablePredictor
from smkern.latency.table import SHIPPED, Timing, latency_file, read_timings

META = {
    "gpu": "NVIDIA H200", "num_sms": 132, "driver": "1", "torch": "2", "triton": "3",
    "smkern_commit": "abc", "date": "2026-11-21", "command": "smkern bench model",
}  # fmt: skip


def cell(op: str, num_sms: int, us: float | None = 10.0, **case: Any) -> dict[str, Any]:
    about = {"model": "qwen3-8b", "batch": 64, "beside": None, "overlap": True} | case
    mode = "full" if num_sms == 132 else "green"
    return {
        "op": op, "case": about, "num_sms": num_sms, "mode": mode, "placement": "spread",
        "provider": "smkern", "us": us,
    }  # fmt: skip


STEP = cell("decode_step", 16, context=2048)
PROMPT = cell("prefill", 116, batch=2, tokens=4096, beside="decode 64x2048") | {"beside_sms": 16}

READ = {
    "a decode step": (STEP, Timing("decode", 16, 64, 2048)),
    "beside a prompt": (
        cell("decode_step", 16, context=2048, beside="prefill 1x8192"),
        Timing("decode", 16, 64, 2048, beside_sms=116),
    ),
    "prompts": (
        cell("prefill", 132, batch=2, tokens=4096),
        Timing("prefill", 132, prompts=2, tokens=4096),
    ),
    "beside decode": (
        PROMPT,
        Timing("prefill", 116, prompts=2, tokens=4096, beside_sms=16, beside_batch=64),
    ),
    "a mixed step": (
        cell("mixed_step", 132, context=2048, tokens=512, cached=1024),
        Timing("mixed", 132, 64, 2048, prompts=1, tokens=512, cached=1024),
    ),
}


@pytest.mark.parametrize("name", READ)
def test_cells(name: str) -> None:
    given, wanted = READ[name]
    assert timings_of([given], 132) == {"qwen3-8b": {wanted: 10.0}}


FORWARD: dict[str, Any] = {
    "op": "runtime", "case": {"model": "qwen3-8b", "name": "mixed_forward", "rows": 320},
    "provider": "smkern", "value": 16.6, "unit": "ms", "chunk": 256,
    "by_start_ms": {"0": 15.4, "1920": 17.0, "3840": 17.6},
}  # fmt: skip


def test_a_forward_of_the_runtime_suite_counts_in_the_middle_of_its_prompt() -> None:
    wanted = Timing("mixed", 132, 64, 2048, prompts=1, tokens=256, cached=1920)
    assert timings_of([FORWARD], 132) == {"qwen3-8b": {wanted: 17_000.0}}


def test_a_steady_split_is_a_step_alone_and_both_sides() -> None:
    cell: dict[str, Any] = {
        "op": "runtime", "case": {"model": "qwen3-8b", "name": "steady", "rung": 24},
        "provider": "smkern", "alone_ms": 14.0, "tbt_p50_ms": 21.0, "tokens_per_ms": 32.0,
    }  # fmt: skip
    prompt = Timing("prefill", 108, prompts=1, tokens=4096, beside_sms=24, beside_batch=64,
                    beside_context=2048)  # fmt: skip
    assert timings_of([cell], 132) == {
        "qwen3-8b": {
            Timing("decode", 24, 64, 2048): 14_000.0,
            Timing("decode", 24, 64, 2048, beside_sms=108, beside_tokens=4096): 21_000.0,
            prompt: 128_000.0,
        }
    }


@pytest.mark.parametrize("model", ["qwen3-8b", "qwen3-32b"])
def test_the_shipped_table_knows_the_committed_steady_state(model: str) -> None:
    """Of both sides, on every rung that was measured: within 3%."""
    predictor = TablePredictor.load(model)
    layers = predictor.sizes.num_layers
    step = Size(num_layers=layers, batch=64, total_kv=64 * 2048)
    prompt = Size((Chunk(4096),), layers, layers, head=True)
    cells = [
        cell
        for cell in load_results(FOLDER / COMMITTED / "runtime.json").cells
        if cell["case"]["name"] == "steady" and cell["provider"] == "smkern"
        and cell["case"]["model"] == model
    ]  # fmt: skip
    assert len(cells) >= 16
    for cell in cells:
        rung = cell["case"]["rung"]
        other = 132 - rung
        slower = predictor.slowdown(step, rung, prompt, other)
        assert slower * predictor.alone_us(step, rung) == pytest.approx(
            1e3 * cell["tbt_p50_ms"], rel=0.03
        )
        slower = predictor.slowdown(prompt, other, step, rung)
        assert slower * predictor.alone_us(prompt, other) == pytest.approx(
            1e3 * 4096 / cell["tokens_per_ms"], rel=0.03
        )


@pytest.mark.parametrize(
    "passed_over",
    [
        FORWARD | {"provider": "stock"},
        FORWARD | {"case": FORWARD["case"] | {"name": "paced"}},
        cell("decode_kernel", 16, context=2048),
        cell("decode_step", 16, context=2048, overlap=False),
        cell("decode_step", 16, None, context=2048),
        STEP | {"error": "out of memory"},
        STEP | {"placement": "default"},
        STEP | {"provider": "torch"},
    ],
)
def test_cells_that_do_not_count(passed_over: dict[str, Any]) -> None:
    assert timings_of([passed_over], 132) == {}


def test_measured_again_replaces_and_the_others_stay(tmp_path: Path) -> None:
    from smkern.bench.results import Results

    first = Results(meta=dict(META))
    first.add(STEP)
    first.add(PROMPT)
    (path,) = write_tables(first, tmp_path)
    second = Results(meta=META | {"date": "later"})
    second.add(STEP | {"us": 9.0})
    assert write_tables(second, tmp_path) == [path]
    cells, sizes = read_timings(path)
    assert cells.cells[Timing("decode", 16, 64, 2048)] == 9.0
    assert len(cells.cells) == 2
    assert sizes.num_layers == 36
    assert cells.meta["date"] == "later"


def test_shipped_tables_are_those_of_the_committed_results() -> None:
    wanted: dict[str, dict[Timing, float]] = {}
    for path in committed():
        results = load_results(path)
        for model, timings in timings_of(results.cells, results.meta["num_sms"]).items():
            wanted.setdefault(model, {}).update(timings)
    for model, timings in wanted.items():
        table = latency_file(SHIPPED / "h200" / f"{model}.json").load("NVIDIA H200")
        for timing, us in timings.items():
            remedy = "figures were measured again: smkern bench latency-table"
            assert table.cells.get(timing) == pytest.approx(us, abs=0.01), remedy


def test_command(tmp_path: Path) -> None:
    path = tmp_path / "out"
    done = CliRunner().invoke(command, ["--out", str(path)], catch_exceptions=False)
    assert done.exit_code == 0
    assert str(path / "h200" / "qwen3-8b.json") in done.output


def test_where_tables_go_is_said() -> None:
    done = CliRunner().invoke(command)
    assert done.exit_code == 2
    assert "Missing option '--out'" in done.output


def test_a_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text("{}")
    done = CliRunner().invoke(command, [str(path), "--out", str(tmp_path)])
    assert done.exit_code == 1
    assert "has no 'meta'" in done.output
