"""Ablations of replays: each says what it says, and is what it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from smkern.bench.replay import ablations
from smkern.bench.replay.ablations import ABLATIONS, Ablation, Scaled, command, measured, said
from smkern.bench.replay.measure import How
from smkern.bench.results import cell_key, load_results
from smkern.bench.tables import replay as tables
from smkern.latency import Size, TablePredictor
from smkern.models import SamplingParams
from smkern.replay import SimServer, Trace
from smkern.replay.trace import Arrival

STEP, PROMPTS = Size(batch=64, total_kv=64 * 2048), Size(layers=1)
SHORT = How(seconds=3.0, least=120)


@pytest.fixture(scope="module")
def table() -> TablePredictor:
    return TablePredictor.load("qwen3-8b")


def test_each_is_a_cell_of_its_own() -> None:
    assert len({cell_key(x.cell) for x in ABLATIONS}) == len(ABLATIONS) == len({*ABLATIONS})


@pytest.mark.parametrize(
    "ablation", [x for x in ABLATIONS if x.limit_ms], ids=lambda x: f"{x.question}, {x.variant}"
)
def test_each_policy_takes_its_settings(ablation: Ablation, table: TablePredictor) -> None:
    made: Any = ablation.make(table)
    assert made.order.__name__ == ablation.order


def test_a_predictor_that_is_off(table: TablePredictor) -> None:
    off, slow = Scaled(table, 0.8, 1.5), table.slowdown(STEP, 32, PROMPTS, 100)
    assert off.alone_us(STEP, 32) == 0.8 * table.alone_us(STEP, 32)
    assert off.slowdown(STEP, 32, PROMPTS, 100) - 1 == pytest.approx(1.5 * (slow - 1))
    assert slow > 1


def test_a_server_that_finds_no_blocks() -> None:
    trace = Trace("shared", tuple(Arrival(0.1 * n, 1024, 2, (7, 8)) for n in range(3)))
    wanted = SamplingParams(max_new_tokens=2, ignore_eos=True)
    server, policy = SimServer("qwen3-8b"), Ablation("", "").make
    for reuses, found in ((True, 2), (False, 0), (True, 2)):
        with Ablation("", "", reuses=reuses).conditions(server):
            session = server.open(policy(TablePredictor.load("qwen3-8b")))
        for n in range(3):
            session.mux.submit(session.prompt(trace, n), wanted, arrival_us=1e6 * n)
        ended = [x.completion for x in session.mux.run() if x.completion is not None]
        assert sum(x.cached_tokens > 0 for x in ended) == found


@pytest.mark.slow
def test_cells_and_their_table(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Ablation("q", "as it is", "chunked:512", trace="loogle-like", limit_ms=30.0)
    otherwise = replace(place, variant="off", off=1.2, spread=0.0)
    rate = replace(place, question="limits", variant="none", limit_ms=None, rate_rps=1.0)
    few = (place, otherwise, rate)
    cells = [measured(x, SHORT) for x in few]
    assert [x["case"] for x in cells] == [x.cell["case"] for x in few]
    assert cells[0]["goodput_rps"] > 0
    assert "goodput_rps" not in cells[2]
    monkeypatch.setattr(tables, "ABLATIONS", few)
    served = cells[2] | rate.served
    rows = tables.ablations_table([served, *reversed(cells)]).splitlines()[2:]
    assert rows[0] == f"| q | as it is | {cells[0]['goodput_rps']:.2f}/s | 1.00 |  |"
    assert rows[2] == f"| limits | none | {said(cells[2])} |  | {said(cells[2])} |"
    assert len({cell_key(x) for x in (*cells, served)}) == 4


@pytest.mark.slow
def test_a_run_goes_on_where_its_file_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    few = tuple(Ablation("q", str(n), f"chunked:{n}", trace="loogle-like") for n in (256, 512))
    path = tmp_path / "ablations.json"
    asked = ["--out", str(path), "--seconds", "2", "--least", "120", "--seeds", "1", "--resume"]
    for count in (1, 2):
        monkeypatch.setattr(ablations, "ABLATIONS", few[:count])
        ran = CliRunner().invoke(command, asked)
        assert ran.exit_code == 0, ran.output
        assert ran.output.count("/s\n") == 1
        assert len(load_results(path).cells) == count
