"""`smkern replay --table`: times of one's own in place of the shipped ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from smkern.bench.replay.command import command
from smkern.errors import TableError
from smkern.latency.table import SHIPPED

TABLE = SHIPPED / "h200" / "qwen3-8b.json"
WORDS = ("--simulate", "--policy", "chunked:512", "--trace", "sharegpt-like", "--rate", "5",
         "--seconds", "2")  # fmt: skip


def invoke(*words: object) -> Result:
    return CliRunner().invoke(command, [*WORDS, *map(str, words)])


def changed(path: Path, change: dict[str, object], slower: float = 1.0) -> Path:
    """The shipped table with other provenance, and with all times so much longer."""
    data = json.loads(TABLE.read_text())
    data["meta"] |= change
    gemms = data["meta"]["gemms"]
    for name in ("layer_us", "head_us"):
        gemms[name] = [[slower * us for us in row] for row in gemms[name]]
    data["cells"] = [cell | {"us": slower * cell["us"]} for cell in data["cells"]]
    path.write_text(json.dumps(data))
    return path


def gaps_ms(out: Path) -> float:
    (cell,) = json.loads(out.read_text())["cells"]
    return float(cell["tbt_ms"]["p50"])


@pytest.mark.slow
def test_replays_take_the_times_of_a_table_of_ones_own(tmp_path: Path) -> None:
    slow = changed(tmp_path / "slow.json", {}, slower=2.0)
    outs = {}
    for name, words in (("shipped", []), ("same", ["--table", TABLE]), ("slow", ["--table", slow])):
        outs[name] = tmp_path / f"{name}.out"
        ran = invoke(*words, "--out", outs[name])
        assert ran.exit_code == 0, ran.output
    assert gaps_ms(outs["same"]) == gaps_ms(outs["shipped"])
    assert 1.7 < gaps_ms(outs["slow"]) / gaps_ms(outs["shipped"]) < 2.3
    again = invoke("--table", slow, "--out", outs["slow"])
    assert "within the limits" not in again.output, "its replay is there"
    for words in ([], ["--table", TABLE]):
        mixed = invoke(*words, "--out", outs["slow"])
        assert mixed.exit_code == 2
        assert "were timed by slow.json" in mixed.output
        assert "--out" in mixed.output
    assert "by the shipped table, not" in invoke("--table", slow, "--out", outs["shipped"]).output


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"gpu": "NVIDIA A100"}, "was measured on 'NVIDIA A100', and this is 'NVIDIA H200'"),
        ({"sizes": None}, "lacks the sizes of its model"),
    ],
)
def test_a_table_of_another_gpu_or_of_nothing_is_refused(
    change: dict[str, object], said: str, tmp_path: Path
) -> None:
    ran = invoke("--table", changed(tmp_path / "t.json", change))
    assert isinstance(ran.exception, TableError)
    assert said in str(ran.exception)


def test_a_table_of_another_model_is_refused_with_the_model_that_it_is_of() -> None:
    ran = invoke("--table", TABLE, "--model", "qwen3-14b")
    assert isinstance(ran.exception, TableError)
    assert "give --model qwen3-8b, or a table of qwen3-14b" in str(ran.exception)


def test_a_file_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    ran = invoke("--table", tmp_path / "none.json")
    assert ran.exit_code == 2
    assert "does not exist" in ran.output
