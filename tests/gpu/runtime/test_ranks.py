"""Serving over two GPUs, each of them split: tokens, and ranks that fail; in processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from smkern.bench.ranks.rows import RANDOM_STEPS, TOKENS, counted, summarize
from smkern.bench.results import open_results
from smkern.device import device_info
from smkern.latency.model_gemms import budgets_of
from smkern.latency.work import padded_rows
from smkern.measure.compiling import compile_forwards
from smkern.measure.provenance import collect_meta
from smkern.models import Shard
from smkern.models.step import batch_buckets
from tests.gpu.models.support import assert_likely
from tests.gpu.runtime import ranks_case
from tests.models.peers import make_peer
from tests.processes import on_processes
from tests.runtime.ranks import case

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs of one host")

LIMIT_S = float(os.environ.get("SMKERN_RANKS_LIMIT_S", "120"))
REQUESTS = int(os.environ.get("SMKERN_RANKS_REQUESTS", "48"))
START_S = 30.0
"""What a model, its graphs and the end may take of it."""
LAUNCHES = int(os.environ.get("SMKERN_RANKS_LAUNCHES", "5000"))
"""With `SMKERN_RESULTS` the rows `token_mismatches` and `random_steps` of `ranks.json`, of 2,000
requests and of 100,000 launches, are measured here."""
STALL_S = 8.0
"""How long ranks wait for each other where one is to fail."""


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    """The GEMMs of a part, side by side: a rank compiles one after another."""
    config = Shard(0, 2).config(ranks_case.whole(1))
    small = Shard(0, 2).config(ranks_case.SMALL)
    total, rungs = device_info().num_sms, ranks_case.RUNGS
    decode = budgets_of(total, [total, *rungs])
    prefill = budgets_of(total, [total, *(total - n for n in rungs)])
    most = ranks_case.MAX_RUNNING
    steps = [(rows, rows) for rows in batch_buckets(most)]
    prompts = [(rows, 4) for rows in sorted({padded_rows(n) for n in range(1, 273)})]
    forwards = [(steps, decode), (prompts, prefill)]
    compile_forwards(config, forwards, batch_invariant=True, ranks=2)
    compile_forwards(small, forwards, ranks=2)


@pytest.mark.parametrize(("sums", "seed"), [("kernels", 2), ("nccl", 3)])
def test_tokens_are_those_of_each_request_alone(sums: str, seed: int) -> None:
    """Random splits, lengths, preemptions, cancellations and look-ahead, bit for bit."""
    first, second = on_processes(2, ranks_case.serve, 4, REQUESTS, seed, sums, limit_s=LIMIT_S)
    assert (first.error, second.error) == ("", "")
    found = dict(first.result)
    assert found.pop("truth") == second.result["truth"]
    print(sums, found)
    about = {"model": "qwen3-8b", "layers": 4, "requests": REQUESTS, "sums": sums, "seed": seed}
    value = found["mismatches"] + len(found["failed"])
    record(counted(2, TOKENS, about, value, "tokens", **found))
    assert not found["failed"]
    assert found["mismatches"] == 0, found["wrong"]
    assert found["tokens"] > 200
    assert found["switches"] > 10


@pytest.mark.parametrize(("free", "seed"), [(0.0, 5), (0.3, 6)])
def test_no_schedule_hangs(free: float, seed: int) -> None:
    """Random splits, with `free` also by a policy that wants sides to share SMs: they never do."""
    first, second = on_processes(
        2, ranks_case.walk, LAUNCHES, free, seed, LIMIT_S - START_S, limit_s=LIMIT_S
    )
    print(free, first)
    assert (first.error, second.error) == ("", "")
    found = first.result
    about = {"model": "small", "shared": free, "seed": seed}
    record(counted(2, RANDOM_STEPS, about, found["launches"], "launches", **found))
    assert found["launches"] >= LAUNCHES
    assert found["errors"] == 0
    assert found["switches"] > LAUNCHES / 1000


def test_an_llm_under_torchrun(tmp_path: Path) -> None:
    """Rank 0 generates from a checkpoint's parts what the whole in fp32 finds likely."""
    torch.manual_seed(13)
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512}
    peer = make_peer("qwen3", device="cuda", **sizes)
    with peer.running_in(torch.bfloat16):
        peer.model.save_pretrained(tmp_path)
    first, second = on_processes(2, case.generate, 2, str(tmp_path), "cuda", limit_s=LIMIT_S)
    assert (first.error, second.error) == ("", "")
    tokens, said = first.result
    assert tokens[0] == tokens[1]
    assert [len(x) for x in tokens[0]] == [case.PARAMS.max_new_tokens] * len(case.PROMPTS)
    assert_likely(peer, case.PROMPTS, tokens[0])
    assert "it leads" in said
    assert "rank 1: requests are rank 0's" in second.result


def record(cell: dict[str, Any]) -> None:
    """Put a cell into the results file that was asked for, if any."""
    if "SMKERN_RESULTS" not in os.environ:
        return
    path = Path(os.environ["SMKERN_RESULTS"])
    results = open_results(path, resume=True, meta=collect_meta())
    results.add(cell)
    results.summary = summarize(results.cells)
    results.save(path)


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
