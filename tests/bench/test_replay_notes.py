"""`smkern replay --out`: what a file says of its replays, and refuses to mix with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from smkern.bench.replay.cases import Case
from smkern.bench.replay.command import command
from smkern.bench.results import Results
from smkern.errors import ArgumentError


def invoke(*words: object) -> Result:
    return CliRunner().invoke(command, [str(word) for word in words])


@pytest.mark.slow
def test_replays_of_other_settings_have_a_file_of_their_own(tmp_path: Path) -> None:
    words = ("--simulate", "--policy", "chunked:512", "--trace", "sharegpt-like", "--seconds", "2",
             "--out", tmp_path / "r.json")  # fmt: skip
    rates = (*words, "--rate", "5")
    assert invoke(*rates).exit_code == 0
    for other, said in (
        (("--seconds", "3"), "its rates are of seconds 2.0, not of seconds 3.0"),
        (("--arrivals", "recorded"), "arrivals poisson, not of arrivals recorded"),
        (("--overlong", "truncate"), "overlong drop"),
        (("--rungs", "32"), "rungs [], not of rungs [32]"),
        (("--no-drain",), "drain True, not of drain False"),
    ):
        refused = invoke(*rates, *other)
        assert refused.exit_code == 2, refused.output
        assert said in " ".join(refused.output.split())
        assert "name another file with --out" in refused.output
    assert invoke(*rates, "--seed", "1", "--rate", "6").exit_code == 0, "they are known by these"
    goodputs = (*words, "--tbt-ms", "0.5", "--goodput")
    assert invoke(*goodputs, "--arrivals", "recorded", "--seed", "1").exit_code == 0
    refused = invoke(*goodputs, "--arrivals", "recorded")
    assert "its goodputs are of seeds [1], not of seeds [0]" in " ".join(refused.output.split())
    assert invoke(*goodputs, "--arrivals", "recorded", "--seed", "1").exit_code == 0


@pytest.mark.slow
def test_a_trace_of_the_same_name_is_not_answered_with_the_others_replays(tmp_path: Path) -> None:
    days = []
    for folder, tokens in (("a", 500), ("b", 900)):
        days.append(tmp_path / folder / "day.csv")
        days[-1].parent.mkdir()
        rows = [f"2024-05-10 00:00:{n:02},{tokens},5" for n in range(20)]
        days[-1].write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    words = ("--simulate", "--policy", "chunked:512", "--rate", "5", "--seconds", "2")
    both = invoke(*words, "--trace", f"{days[0]},{days[1]}")
    assert isinstance(both.exception, ArgumentError)
    assert "are both called 'day'" in str(both.exception)
    words += ("--out", tmp_path / "r.json", "--trace")
    assert invoke(*words, days[0]).exit_code == 0
    assert invoke(*words, days[0], "--order", "slack").exit_code == 0
    refused = invoke(*words, days[1])
    assert refused.exit_code == 2
    assert "its replays of day are not of" in refused.output
    assert invoke(*words, "sharegpt-like").exit_code == 0, "another trace may be added"
    assert invoke(*words, days[1]).exit_code == 2
    assert invoke(*words, tmp_path / "c" / "day.csv").exit_code == 2


def test_a_file_that_says_nothing_of_its_settings_is_not_added_to(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    results = Results(meta={"gpu": "NVIDIA H200"})
    results.add(Case("qwen3-8b", "sharegpt-like", 30.0, "fcfs", "chunked").cell(rate_rps=5.0))
    results.save(path)
    refused = invoke("--simulate", "--rate", "5", "--out", path)
    assert refused.exit_code == 2
    assert "its rates are of seconds unknown" in " ".join(refused.output.split())
