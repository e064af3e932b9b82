"""What HTTP costs: the suite on a tiny model on CPU tensors, with its processes."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from smkern.bench import server
from smkern.bench.http_streams import Seen
from smkern.bench.rows import cost_cell
from smkern.bench.server_soak import soak
from smkern.bench.soak_streams import Soaked, is_right, samples, wrong_metrics
from smkern.bench.tables.markdown import NOT_MEASURED
from smkern.bench.tables.server import server_table, soak_table
from smkern.errors import OutOfPagesError
from smkern.server.model import EngineOptions
from tests.bench.doubles import run_suite
from tests.models.generation import tiny


def test_gaps_count_while_all_streams_run() -> None:
    seen = Seen([[0.0, 1.0, 2.0, 3.5], [0.5, 1.5, 2.25]])
    # from 0.5, when the second began, to 2.25, when it ended
    assert seen.gaps_ms() == [1000.0, 1000.0, 750.0]


def test_the_row_is_http_over_in_process() -> None:
    cells = [
        {"case": {"name": "tbt_p50", "way": way}, "value": value}
        for way, value in (("in_process", 10.0), ("http", 10.2))
    ]
    row = server.summarize(cells)["http_over_in_process"]
    assert (row["value"], row["target"], row["met"]) == (1.02, 1.03, True)
    assert server.summarize(cells[:1])["http_over_in_process"]["value"] is None


@pytest.mark.parametrize("options", [[], ["--soak-s", "1"]])
def test_pages_that_do_not_fit_name_the_options_to_lower(options, monkeypatch, tmp_path):
    def full(*given: object, **more: object) -> None:
        raise OutOfPagesError("lower num_pages")

    monkeypatch.setattr(server, "measure", full)
    monkeypatch.setattr(server, "soak", full)
    ran = CliRunner().invoke(server.command, ["--out", str(tmp_path / "x.json"), *options])
    assert "the pages of --streams 64 do not fit: lower it" in str(ran.exception)


def test_a_resumed_file_may_have_a_soak(monkeypatch, tmp_path) -> None:
    timed = cost_cell("server", "tbt_p50", 10.0, "ms", way="http")
    monkeypatch.setattr(server, "measure", lambda *given, **more: [timed])
    monkeypatch.setattr(server, "soak", lambda *given, **more: cost_cell("server", "soak", 0.0, ""))
    run_suite(server.command, tmp_path / "x.json", "--soak-s", "1")
    said = run_suite(server.command, tmp_path / "x.json", "--resume")
    assert [line.split()[:2] for line in said.splitlines()] == [
        ["soak", "0.0"],
        ["http", "tbt_p50"],
    ]


def test_lost_tokens_are_no_result() -> None:
    with pytest.raises(server.LostError, match=r"streams of \[2, 3\] tokens, where 3"):
        server._checked(Seen([[0.0, 1.0, 2.0], [0.0, 1.0]]), 3)


@pytest.mark.slow
def test_both_ways_serve_all_tokens() -> None:
    options = EngineOptions(
        tiny(), policy="chunked:64", device="cpu", rungs=(), max_running=4, num_pages=64,
        max_tokens=64,
    )  # fmt: skip
    cells = server.measure(options, "tiny", streams=4, prompt=20, tokens=30, rounds=1)
    found = {(cell["case"]["name"], cell["case"]["way"]): cell["value"] for cell in cells}
    assert {*found} == {
        ("tbt_p50", "in_process"), ("tbt_p99", "in_process"), ("tbt_p50", "http"),
        ("tbt_p99", "http"), ("server_cpu", "http"), ("tokens_per_event", "http"),
    }  # fmt: skip
    assert 1 <= found["tokens_per_event", "http"] <= 30
    assert all(value >= 0 for value in found.values())


def test_the_table_has_a_row_a_way() -> None:
    about = {"model": "m", "streams": 64}
    cells = [
        {"case": {"name": name, "way": way, **about}, "value": value}
        for name, way, value in (
            ("tbt_p50", "in_process", 10.0), ("tbt_p99", "in_process", 11.5),
            ("tbt_p50", "http", 10.123), ("tbt_p99", "http", 12.0), ("server_cpu", "http", 0.25),
            ("tokens_per_event", "http", 1.0),
        )
    ]  # fmt: skip
    assert server_table(cells).splitlines()[2:] == [
        "| m, 64 streams: a loop in the engine's process | 10.00 | 11.50 |  |  |",
        "| m, 64 streams: `smkern serve` | 10.12 | 12.00 | 0.25 | 1.00 |",
    ]
    assert soak_table(cells) == NOT_MEASURED


def test_a_soak_has_a_row() -> None:
    cell = {
        "case": {"name": "soak", "model": "m", "streams": 256}, "value": 0.0, "took_s": 600.4,
        "requests": 50_000, "hangups": 5_000, "tokens": 4_000_000, "wrong_metrics": {"a": [1, 2]},
        "server_rss_mib": [54.8, 55.2], "engine_rss_mib": [1046.1, 1059.9],
    }  # fmt: skip
    (row,) = soak_table([cell]).splitlines()[2:]
    assert row == (
        "| m, 256 streams | 600 | 50,000 | 5,000 | 4,000,000 | 0 | 1 | 55 to 55 | 1046 to 1060 |"
    )


@pytest.mark.parametrize(
    ("tokens", "wanted", "is_it"),
    [
        ([1, 2, 3], None, True),
        ([1, 2], None, False),
        ([1, 2, 3, 4], None, False),
        ([1, 2], 2, True),
        ([1], 2, False),
        ([1, 2, 3, 4, 5], 2, True),
        ([2, 1], 2, False),
    ],
)
def test_tokens_are_the_reply_or_its_beginning(tokens, wanted, is_it) -> None:
    assert is_right(tokens, [1, 2, 3], wanted) is is_it


def test_metrics_are_held_against_what_the_client_counted() -> None:
    names = [
        "smkern_requests_total", 'smkern_finished_total{reason="cancelled"}',
        'smkern_finished_total{reason="length"}', "smkern_http_hangups_total",
        'smkern_http_responses_total{path="/v1/completions",status="200"}',
    ]  # fmt: skip
    text = "\n".join(
        f"{name} {value}" for name, value in zip(names, (24, 2, 22, 2, 20), strict=True)
    )
    before = samples("smkern_requests_total 4\n" + 'smkern_finished_total{reason="length"} 4')
    seen = Soaked(requests=20, hangups=2, metrics=samples(f"# HELP x y\n{text}\n"))
    assert wrong_metrics(seen, before) == {}
    seen.metrics["smkern_http_choices"] = 1.0
    assert wrong_metrics(seen, before) == {"smkern_http_choices": [1.0, 0]}


@pytest.mark.slow
def test_streams_that_hang_up_leave_nothing() -> None:
    options = EngineOptions(
        tiny(), policy="chunked:64", device="cpu", rungs=(), max_running=8, num_pages=1024,
        max_tokens=64,
    )  # fmt: skip
    cell = soak(options, "tiny", streams=12, seconds=1.5)
    assert (cell["value"], cell["wrong_metrics"], cell["is_idle"]) == (0, {}, True)
    assert cell["requests"] > 12
    assert cell["hangups"] >= 2
    assert cell["held_pages"] == [0, 0]
    assert server.summarize([cell])["soak_wrong_requests"]["met"]
    assert server_table([cell]) == NOT_MEASURED
    assert len(soak_table([cell]).splitlines()) == 3
