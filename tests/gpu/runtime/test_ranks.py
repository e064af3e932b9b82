"""Serving over two GPUs, each of them split: tokens, and ranks that fail; in processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from smkern.bench.runtime.workload import budgets_of, step_rows
from smkern.device import device_info
from smkern.latency.work import padded_rows
from smkern.measure.forwards import compile_forwards
from smkern.models import Shard
from tests.gpu.runtime import ranks_case
from tests.processes import on_processes

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs of one host")

LIMIT_S = 120.0
STALL_S = 8.0
"""How long ranks wait for each other where one is to fail."""


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """The GEMMs of a part, side by side: a rank compiles one after another."""
    config = Shard(0, 2).config(ranks_case.whole(1))
    decode, prefill = budgets_of(ranks_case.RUNGS, device_info().num_sms)
    steps = [(rows, rows) for rows in step_rows(ranks_case.MAX_RUNNING)]
    prompts = [(rows, 4) for rows in sorted({padded_rows(n) for n in range(1, 273)})]
    forwards = [(steps, decode), (prompts, prefill)]
    compile_forwards(config, forwards, batch_invariant=True, ranks=2)


@pytest.mark.parametrize(("sums", "seed"), [("one kernel", 2), ("nccl", 3)])
def test_tokens_are_those_of_each_request_alone(sums: str, seed: int) -> None:
    """Random splits, lengths, preemptions, cancellations and look-ahead, bit for bit."""
    first, second = on_processes(2, ranks_case.serve, 4, 48, seed, sums, limit_s=LIMIT_S)
    assert (first.error, second.error) == ("", "")
    found = dict(first.result)
    assert found.pop("truth") == second.result["truth"]
    print(sums, found)
    assert not found["failed"]
    assert found["mismatches"] == 0, found["wrong"]
    assert found["tokens"] > 200
    assert found["switches"] > 10


@pytest.mark.parametrize(
    ("how", "who"), [("killed", 1), ("killed", 0), ("stopped", 1), ("no memory", 1)]
)
def test_a_rank_that_fails_is_named_on_the_other(how: str, who: int, tmp_path: Path) -> None:
    left = who if how == "stopped" else None
    found = on_processes(
        2, ranks_case.fail, who, how, STALL_S, str(tmp_path), left_behind=left, limit_s=LIMIT_S
    )
    other = found[1 - who]
    assert other.error == ""
    named = {"killed": "is gone", "stopped": "has", "no memory": "failed where"}[how]
    assert f"rank {who} {named}" in other.result, found
    took = [float((tmp_path / x).read_text()) for x in ("failed", f"told-{1 - who}")]
    print(how, who, other, f"named after {took[1] - took[0]:.2f} s")
    assert took[1] - took[0] < 2 * STALL_S
    assert other.status is not None, "its process is left"
    assert found[who].status == {"killed": -9, "stopped": None, "no memory": 0}[how]
