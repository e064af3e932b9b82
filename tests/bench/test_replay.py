"""The replay benchmark: its table of cases, what is tried next, its command, its pictures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from smkern.bench.plots.replay import limits_picture, pictures
from smkern.bench.replay import command as replay_command
from smkern.bench.replay.cases import (
    BESIDE,
    IN_TURNS,
    Case,
    checked_policies,
    checked_traces,
    requests_for,
    settings_of,
    sizes_of,
)
from smkern.bench.replay.grid import Grid, cases
from smkern.bench.replay.measure import BOUND, How, simulated, specs, with_bounds
from smkern.bench.replay.rows import summarize
from smkern.bench.replay.stock import ON_STOCK
from smkern.bench.results import Results, load_results
from smkern.bench.suite import UnknownNameError
from smkern.bench.tables import replay as tables
from smkern.errors import ArgumentError, TraceError
from smkern.policies import POLICIES
from smkern.replay import load_trace, policy_named

pytestmark = pytest.mark.slow

CASE = Case("qwen3-8b", "azure-code", 15.0, "fcfs", "chunked")


def test_the_table_begins_with_its_bounds() -> None:
    found = list(cases(["qwen3-8b"], ["azure-code"], [], ["fcfs", "slack"], ["chunked", "drift"]))
    assert [case.policy for case in found[:2]] == [BOUND] * 2
    assert [case.tbt_slo_ms for case in found[2::4]] == [10.0, 15.0, 30.0, 50.0]
    assert len(found) == len(set(found)) == 2 + 4 * 2 * 2


def test_settings_near_the_predictors() -> None:
    margins = [f"chunked:margin={margin}" for margin in IN_TURNS]
    assert settings_of("chunked", 256) == ["chunked", *margins] + [
        f"chunked:{n}" for n in (128, 256, 384, 512, 768, 1024)
    ]
    assert "chunked:8192" in settings_of("chunked")
    assert settings_of("chunked:512") == ["chunked:512"]
    assert settings_of("adaptive") == ["adaptive"]
    larger = settings_of("temporal", model="qwen3-30b-a3b")
    assert larger[-1] == "temporal:margin=0.12:max_prefill_tokens=4096"
    assert larger[: len(larger) // 2] == settings_of("temporal")
    assert settings_of("drift") == ["drift", *(f"drift:margin={margin}" for margin in BESIDE)]


def test_rungs_that_are_asked_for_are_the_fixed_splits_that_are_tried() -> None:
    ours = replace(CASE, policy="static_split")
    assert specs(ours, (24, 30)) == ["static_split:24", "static_split:30"]
    assert specs(ours) == settings_of("static_split")
    bound = replace(CASE, policy=BOUND, tbt_slo_ms=None)
    assert specs(bound, (24, 30))[1] == "static_split:24"
    assert Grid(Results(), [ours], How(rungs=(24, 30))).next() == (ours, "static_split:24")


@pytest.mark.parametrize("policy", POLICIES)
def test_every_setting_of_a_table_makes_a_policy(policy) -> None:
    predictor = simulated("qwen3-8b").predictor
    made = {
        repr(policy_named(spec, predictor, tbt_slo_ms=15.0)) for spec in settings_of(policy, 256)
    }
    assert len(made) == len(settings_of(policy, 256))


def test_long_outputs_want_longer_windows() -> None:
    trace = load_trace("openthoughts-like", requests=200)
    assert requests_for(trace, 10.0, 0.0) == 1200
    assert requests_for(trace, 10.0, 30.0) > 5000
    assert requests_for(trace, 0.1, 0.0) == 600


def test_a_larger_model_leaves_less_for_kv() -> None:
    assert sizes_of("qwen3-8b").kv_tokens == 700_000
    assert 150_000 < sizes_of("qwen3-32b").kv_tokens < 300_000


@pytest.mark.parametrize("check", [checked_policies, checked_traces])
def test_names_that_nobody_knows(check) -> None:
    with pytest.raises(UnknownNameError, match=r"best.*there are"):
        check(["best"])


def grid(*found: Case) -> Grid:
    return Grid(Results(), found, How())


def test_settings_follow_one_another_and_have_to_beat_the_best() -> None:
    table = grid(CASE)
    work = table.next()
    assert work == (CASE, "chunked")
    assert table.next() is None  # a case's settings are tried one by one
    assert table.hints(work) == {"near_rps": None, "least_rps": 0.0}
    table.add(work, CASE.cell() | {"goodput_rps": 12.0, "settings": "chunked"})
    second = table.next()
    assert second is not None
    assert second[1].startswith("chunked:")
    assert table.hints(second) == {"near_rps": 12.0, "least_rps": 12.0}
    table.add(second, None)
    (cell,) = table.results.cells
    assert (cell["goodput_rps"], cell["settings"]) == (12.0, "chunked")
    assert cell["tried"] == {"chunked": 12.0, second[1]: 0.0}
    assert table.left() == [CASE]


def test_a_failure_is_kept_and_another_setting_takes_its_place() -> None:
    table = grid(CASE)
    work = table.next()
    assert work is not None
    table.add(work, None, "ValueError: no")
    assert table.results.cells[0]["error"] == "ValueError: no"
    second = table.next()
    assert second is not None
    table.add(second, CASE.cell() | {"goodput_rps": 3.0})
    assert table.results.cells[0]["goodput_rps"] == 3.0
    assert table.results.cells[0]["tried"]["chunked"] == "ValueError: no"


def test_a_search_begins_at_a_related_goodput() -> None:
    other = [
        Case("qwen3-8b", "azure-code", 15.0, "slack", "drift"),
        Case("qwen3-8b", "azure-code", 30.0, "fcfs", "chunked"),
        Case("qwen3-8b", "azure-conversation", 15.0, "fcfs", "chunked"),
        Case("qwen3-8b", "azure-code", None, "fcfs", BOUND),
    ]
    table = grid(CASE)
    for number, case in enumerate(other, 1):
        table.results.add(case.cell() | {"goodput_rps": float(number)})
    work = table.next()
    assert work is not None
    assert table.hints(work)["near_rps"] == 1.0


def test_goodputs_have_the_bound_of_their_order() -> None:
    bound = Case("qwen3-8b", "azure-code", None, "fcfs", BOUND).cell() | {"goodput_rps": 20.0}
    mine = CASE.cell() | {"goodput_rps": 12.0}
    slack = Case("qwen3-8b", "azure-code", 15.0, "slack", "chunked").cell() | {"goodput_rps": 1.0}
    found = with_bounds([bound, mine, slack])
    assert [cell.get("bound") for cell in found] == [None, 20.0, None]


def invoke(*words: str) -> Result:
    return CliRunner().invoke(replay_command.command, [str(word) for word in words])


SMALL = ("--simulate", "--policy", "chunked,static_split:32", "--trace", "sharegpt-like")


def test_the_command_replays_at_rates_and_goes_on_where_it_ended(tmp_path: Path) -> None:
    out = tmp_path / "r.json"
    words = (*SMALL, "--rate", "10,20", "--seconds", "2", "--out", out)
    first = invoke(*words, "--plots", tmp_path)
    assert first.exit_code == 0, first.output
    assert "sharegpt-like 30 ms fcfs static_split:32 20/s" in first.output
    cells = json.loads(out.read_text())["cells"]
    assert [(x["provider"], x["case"]["rate_rps"]) for x in cells] == [
        ("chunked", 10.0), ("chunked", 20.0), ("static_split:32", 10.0), ("static_split:32", 20.0),
    ]  # fmt: skip
    for cell in cells:
        assert cell["op"] == "replay"
        assert cell["simulated"]
        assert 0 <= cell["slo_attainment"] <= 1
    names = {path.name for path in tmp_path.glob("*.png")}
    assert "replay-split.png" in names
    assert "replay-rates-qwen3-8b-sharegpt-like-30-fcfs-simulated.png" in names
    again = invoke(*words)
    assert "within the limits" not in again.output
    assert again.output.count("static_split:32") == 2  # its rows of the table


def test_replays_of_a_gpu_have_a_file_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "replays.json"
    words = (*SMALL, "--rate", "5", "--seconds", "2", "--out", str(path), "--sim-gpu")
    invoke(*words, "h100-80gb-hbm3")
    assert load_results(path).meta["gpu"] == "NVIDIA H100 80GB HBM3"
    failed = invoke(*words, "h200")
    assert "HBM3' and of 'NVIDIA H200' are no one file's" in str(failed.exception)
    failed = invoke(*words, "a100")
    said = "no profile a100.json; shipped are: h100-80gb-hbm3, h200. A machine with another GPU has"
    assert said in str(failed.exception)


def test_a_gpu_of_less_memory_holds_less() -> None:
    assert simulated("qwen3-8b", gpu="h100-80gb-hbm3").kv_tokens == 360_000
    assert sizes_of("qwen3-32b").kv_tokens == 220_000
    assert sizes_of("qwen3-32b", "NVIDIA H100 80GB HBM3").kv_tokens == 10_000


def test_the_command_stops_in_time_and_says_what_is_left(tmp_path: Path) -> None:
    result = invoke(*SMALL, "--rate", "5", "--seconds", "2", "--time-limit-s", "0")
    assert "2 replays left" in result.output


def test_a_limit_that_nothing_keeps_is_said_with_what_could() -> None:
    words = ("--simulate", "--policy", "chunked:512", "--trace", "sharegpt-like")
    result = invoke(*words, "--goodput", "--tbt-ms", "0.5", "--seconds", "1")
    assert result.exit_code == 0, result.output
    assert "keeps its limits at no rate: at" in result.output
    assert "give a longer limit" in result.output


def test_overlong_requests_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "two.jsonl"
    rows = [(9, [1]), (60_000, list(range(118)))] + [(9 + n, [1]) for n in range(30)]
    lines = [
        {"timestamp": n, "input_length": tokens, "output_length": 3, "hash_ids": blocks}
        for n, (tokens, blocks) in enumerate(rows)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    for overlong, what in (("drop", "dropped"), ("truncate", "cut")):
        words = ("--simulate", "--policy", "chunked", "--trace", path, "--rate", "5")
        result = invoke(*words, "--seconds", "2", "--overlong", overlong)
        assert f"1 requests longer than the context were {what}" in result.output, result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rate", "3", "--goodput"], "one of them"),
        ([], "one of them"),
        (["--rate", "fast"], "not a list of numbers"),
        (["--rate", "-1"], "above 0"),
        (["--rate", "1e300"], "at most 1,000,000"),
        (["--rate", "3", "--seconds", "nan"], "nan: give a finite number above 0"),
        (["--rate", "3", "--seconds", "0"], "0: give a finite number above 0"),
        (["--goodput", "--seconds", "-1"], "-1: give a finite number above 0"),
        (["--goodput", "--seconds", "inf"], "inf: give a finite number above 0"),
    ],
)
def test_options_that_cannot_be(words: list[str], said: str) -> None:
    result = invoke(*SMALL, *words)
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--policy", "best"], UnknownNameError),
        (["--policy", ""], UnknownNameError),
        (["--trace", ""], UnknownNameError),
        (["--policy", "stock_chunked"], UnknownNameError),
        (["--policy", "chunked,oracle"], UnknownNameError),
        (["--order", "last"], UnknownNameError),
        (["--trace", "none.csv"], TraceError),
        (["--policy", "chunked:size=3"], ArgumentError),
    ],
)
def test_names_that_are_none(words: list[str], error: type[Exception]) -> None:
    result = invoke(*SMALL, "--rate", "3", *words)
    assert isinstance(result.exception, error)


def test_a_limit_that_no_trace_is_long_enough_for_is_refused() -> None:
    result = invoke("--simulate", "--goodput", "--policy", "chunked", "--tbt-ms", "1e9")
    assert isinstance(result.exception, ArgumentError)
    assert "at most 1,000,000 are replayed" in str(result.exception)


def test_a_picture_a_model_of_goodput_over_the_limit() -> None:
    results = Results()
    for limit, order, rate in ((15.0, "fcfs", 3.0), (15.0, "slack", 5.0), (30.0, "fcfs", 6.0)):
        case = Case("qwen3-8b", "azure-code", limit, order, "chunked")
        results.add(case.cell() | {"goodput_rps": rate})
    results.add(Case("qwen3-8b", "azure-code", None, "fcfs", BOUND).cell() | {"goodput_rps": 9.0})
    (picture,) = pictures(results)
    assert picture.name == "replay-goodput-qwen3-8b"
    assert [panel.title for panel in picture.panels] == ["azure-code"]


def at_rate(where: str, tbt: float, ttft: float, **about: object) -> dict[str, object]:
    case = Case("qwen3-8b", "azure-code", 15.0, "fcfs", "chunked").cell(
        rate_rps=3.0, seed=0, where=where
    )
    spread = {"p50": tbt, "p99": 2 * tbt}
    return case | {"n": 9, "tbt_ms": spread, "ttft_ms": {"p50": ttft, "p99": 9 * ttft}} | about


def full_table() -> list[dict[str, object]]:
    cells = [Case("qwen3-8b", "azure-code", None, "fcfs", BOUND).cell() | {"goodput_rps": 20.0}]
    for trace, order, policy, rate in (
        ("azure-code", "fcfs", "chunked", 10.0),
        ("azure-code", "slack", "chunked", 12.0),
        ("azure-code", "slack", "adaptive", 11.7),
        ("writing-like", "slack", "chunked", 4.0),
        ("writing-like", "slack", "adaptive", 5.0),
        ("writing-like", "slack", "drift", 4.5),
    ):
        case = Case("qwen3-8b", trace, 15.0, order, policy)
        cells.append(case.cell() | {"goodput_rps": rate})
    served = {"factor": 0.95, "simulated_goodput_rps": 3.2, "is_met": True, "is_expected": True}
    cells += [
        at_rate("simulated", 10.0, 100.0),
        at_rate("gpu", 8.0, 100.0, ttft_kept=1.0, worst_gap_ms={"p90": 41.5}, **served),
    ]
    return cells


def test_a_summary_by_hand() -> None:
    rows = summarize(full_table())
    assert rows["adaptive_vs_best"]["value"] == pytest.approx(11.7 / 12.0)
    assert rows["adaptive_vs_best"]["met"] is False
    assert rows["adaptive_vs_best"]["cells"] == 2
    # azure-code is no load on which a gain is asked for
    assert (rows["adaptive_over_chunked"]["value"], rows["adaptive_over_chunked"]["cells"]) == (
        1.25,
        1,
    )
    assert rows["goodput_confirmed"] == {"value": 1.0, "target": 1.0, "met": True, "cells": 1}
    assert rows["simulated_vs_real"]["value"] == pytest.approx(0.25)
    assert summarize([]) == {}


def test_tables() -> None:
    cells = full_table()
    first, *_, last = tables.goodput_table(cells).splitlines()
    assert first == (
        "| requests/s (order) | chunked | drift | adaptive | decode free | adaptive / best other |"
    )
    assert last == (
        "| qwen3-8b, writing-like, 15 ms | 4.00 (slack) | 4.50 (slack) | 5.00 (slack) |  | 1.11 |"
    )
    assert "| qwen3-8b, azure-code, 15 ms | 12.00 (slack) |  | 11.70 (slack) | 20.00 | 0.97 |" in (
        tables.goodput_table(cells)
    )
    assert "| qwen3-8b, writing-like, 15 ms |  | 1.25 |" in tables.orders_table(cells)
    assert "+25.0% | +25.0% | +0.0% | +0.0% |" in tables.real_table(cells)
    few = [dict(cell) for cell in cells]
    for cell in few:
        if "ttft_ms" in cell:
            cell["ttft_ms"] = cell["ttft_ms"] | {"p99": None}
    assert "+25.0% | +25.0% | +0.0% | - |" in tables.real_table(few)
    on_stock = [
        Case("qwen3-8b", "azure-code", 15.0, "slack", name).cell() | {"goodput_rps": 3.5}
        for name in ON_STOCK
    ]
    row = "| qwen3-8b, azure-code, 15 ms, slack | 3.50 | 3.50 | 12.00 | 11.70 |"
    assert row in tables.kernels_table([*cells, *on_stock])
    assert "Not measured yet" in tables.kernels_table(cells)
    assert "| 0.95 x 3.20 | kept | 16.0 | 41.5 | 100.00% | - |" in tables.confirmed_table(cells)


def test_chips_of_other_paces_are_a_table_of_their_own() -> None:
    told = list(
        cases(
            ["qwen3-8b"], ["azure-code"], [15.0], ["slack"], ["chunked:64", "adaptive"], (1.0, 1.06)
        )
    )
    assert [(case.policy, case.pace) for case in told] == [
        ("chunked:64", 1.0), ("adaptive", 1.0), ("chunked:64", 1.06), ("adaptive", 1.06),
    ]  # fmt: skip
    cells = [case.cell() | {"goodput_rps": 9.0 - n} for n, case in enumerate(told)]
    first, _, chunked, ours = tables.paces_table(cells).splitlines()
    assert first == "| requests/s at a pace of | 1.00 | 1.06 |"
    assert chunked == "| qwen3-8b, azure-code, 15 ms, slack, chunked:64 | 9.0 | 7.0 |"
    assert ours == "| qwen3-8b, azure-code, 15 ms, slack, adaptive | 8.0 | 6.0 |"
    both = [*full_table(), *cells]
    assert summarize(both) == summarize(full_table())
    assert tables.goodput_table(both) == tables.goodput_table(full_table())
    lines = [
        [len(panel.marks) for picture in limits_picture(found) for panel in picture.panels]
        for found in (both, full_table())
    ]
    assert lines[0] == lines[1] == [2, 3]
    assert not any("bound" in cell for cell in with_bounds(both) if "pace" in cell["case"])
    assert "Not measured yet" in tables.paces_table(full_table())
