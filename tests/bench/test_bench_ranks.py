"""The suite of several GPUs: what its summary makes of cells, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner

from smkern.bench.ranks.rows import (
    DECODE,
    GATHERED,
    PREFILL,
    RANDOM_STEPS,
    SERVED,
    SUMMED,
    summarize,
)
from smkern.bench.ranks.suite import SUBJECTS, command
from smkern.bench.suite import UnknownNameError, known_names
from smkern.bench.tables import ranks as tables


def timed(op: str, us: float, provider: str = "smkern", num_sms: int = 24, **case: Any) -> Any:
    return {"op": op, "case": case, "num_sms": num_sms, "provider": provider, "us": us}


def served(policy: str, value: float, p99: float, limit: float = 30, ranks: int = 2) -> Any:
    case = {"policy": policy, "limit_ms": limit, "ranks": ranks}
    return {"op": SERVED, "case": case, "provider": "smkern", "value": value, "tbt_p99_ms": p99}


def test_sums_against_their_limit_and_nccl() -> None:
    step = {"rows": 64, "hidden": 4096, "ranks": 2}
    found = summarize([
        timed(SUMMED, 10.0, **step), timed(SUMMED, 15.0, "nccl", **step),
        timed(SUMMED, 16.0, num_sms=16, **step), timed(SUMMED, 20.0, "nccl", 16, **step),
        timed(SUMMED, 99.0, rows=64, hidden=5120, ranks=2),  # nothing beside it, of another size
        timed(GATHERED, 40.0, rows=64, ranks=2), timed(GATHERED, 30.0, "nccl", rows=64, ranks=2),
    ])  # fmt: skip
    assert found["sum_512k_us"]["value"] == 16.0
    assert found["sum_512k_us"]["met"] is False
    assert (found["sum_over_nccl"]["value"], found["sum_over_nccl"]["cells"]) == (1.25, 2)
    assert found["gather_over_nccl"]["met"] is False


def test_parts_against_the_whole_model() -> None:
    cells = [
        timed(op, us, provider, num_sms, model="m", layers=4, ranks=ranks)
        for op, us, provider, num_sms, ranks in (
            (DECODE, 1000.0, "smkern", 24, 1), (DECODE, 550.0, "smkern", 24, 2),
            (DECODE, 700.0, "nccl", 24, 2), (DECODE, 500.0, "smkern", 132, 1),
            (DECODE, 310.0, "smkern", 132, 2), (PREFILL, 900.0, "smkern", 132, 1),
            (PREFILL, 500.0, "smkern", 132, 2),
        )
    ]  # fmt: skip
    found = summarize(cells)
    step = found["m_decode_step_over_one_gpu"]
    assert (step["value"], step["met"], step["cells"]) == (0.62, False, 2)
    assert step["worst"][0]["num_sms"] == 132
    assert found["m_prefill_over_one_gpu"]["value"] == 1.8


def test_gains_are_of_those_that_keep_the_limit() -> None:
    found = summarize([
        served("static_split", 15.0, 29.0), served("chunked", 10.0, 30.0),
        served("static_split", 30.0, 49.0, 50), served("chunked", 20.0, 51.0, 50),
        served("static_split", 8.0, 50.0, 51, ranks=1), served("chunked", 5.0, 50.0, 51, ranks=1),
    ])  # fmt: skip
    shared = found["multiplexed_over_chunked_30ms"]
    assert (shared["value"], shared["target"], shared["met"]) == (1.5, 1.6, False)
    assert found["multiplexed_over_chunked_50ms"]["value"] is None


def test_tables() -> None:
    case = {"rows": 64, "hidden": 4096, "ranks": 2}
    cells = [
        timed(SUMMED, 8.0, **case), timed(SUMMED, 12.0, "nccl", **case),
        timed(SUMMED, 9.0, num_sms=132, **case), timed(SUMMED, 7.0, "nccl", 132, **case),
    ]  # fmt: skip
    assert tables.sums_table(cells).splitlines()[-1] == (
        "| sum, residual, norm of 64 x 4096, 2 GPUs | 8.0 / 12.0 | **9.0 / 7.0** |"
    )
    about = {"model": "m", "layers": 4, "batch": 64, "context": 2048}
    found = tables.forwards_table([
        timed(DECODE, 1000.0, ranks=1, **about), timed(DECODE, 550.0, ranks=2, **about),
        timed(DECODE, 600.0, "nccl", ranks=2, **about),
    ])  # fmt: skip
    assert [line.split("|")[2].strip() for line in found.splitlines()[2:]] == [
        "1.000", "0.550", "0.600"
    ]  # fmt: skip
    one = served("chunked", 10.0, 30.0) | {"tbt_p50_ms": 28.0, "setting": 256}
    one["case"]["model"] = "m"
    assert "| m, 2 GPUs, 30 ms: `chunked`, 256 | 28.00 | 30.00 | 10.00 |" in tables.served_table(
        [one]
    )
    walked = {"op": RANDOM_STEPS, "case": {"shared": 0.3}, "switches": 1234, "errors": 0}
    assert "30% of decisions ask for shared SMs | 100,001 |" in tables.counts_table(
        [walked | {"value": 100_001}]
    )


def test_nothing_is_met_by_nothing() -> None:
    assert {row["met"] for row in summarize([]).values()} == {None}


def test_names_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert known_names("served,sums", SUBJECTS, "subject") == ("sums", "served")
    with pytest.raises(UnknownNameError, match="no subject is named 'sum'"):
        known_names("sum", SUBJECTS, "subject")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    said = CliRunner().invoke(command, ["--out", "nowhere.json"])
    assert said.exit_code == 1
    assert "torchrun --nproc-per-node 2" in str(said.exception)
