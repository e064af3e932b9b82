"""Ranks as processes over gloo: the same sums, and errors that all of them raise."""

from __future__ import annotations

import atexit
import os
import socket
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from smkern.errors import ArgumentError, RankError
from smkern.models import Decoder, TensorParallel, Weights, preset, tensor_parallel
from tests.models.rank_case import compare
from tests.models.session import Session
from tests.processes import environment, free_port, on_processes


@pytest.fixture(scope="module")
def told() -> list[dict[str, Any]]:
    """What each of two processes told."""
    found = on_processes(2, compare)
    assert [outcome.error for outcome in found] == ["", ""]
    return [outcome.result for outcome in found]


def test_processes_compute_what_one_does(told: list[dict[str, Any]]) -> None:
    config = preset("qwen3-8b").replace(
        num_layers=2, hidden_size=64, num_q_heads=4, num_kv_heads=2,
        intermediate_size=96, vocab_size=64, dtype=torch.float32, max_position=64,
    )  # fmt: skip
    with torch.inference_mode():
        session = Session.make(Decoder(config, Weights.random(config)), 2, 64)
        alone = [session.logits([[1, 2, 3], [4]]), session.logits([[5], [6]], ragged=False)]
    assert told[0]["logits"] == told[1]["logits"]
    torch.testing.assert_close(
        torch.tensor(told[0]["logits"]), torch.stack(alone), rtol=1e-4, atol=1e-5
    )
    assert [found["everyone"] for found in told] == [[10, 11]] * 2


@pytest.mark.parametrize(
    ("what", "named"),
    [("layers", "config is"), ("mode", "batch_invariant is True"), ("norms", "hash of the norms")],
)
def test_ranks_that_differ_are_told_on_all(told, what, named) -> None:
    for found in told:
        assert str(found[what]).startswith("RankError: "), found[what]
        assert named in str(found[what])
        assert "on rank 1" in str(found[what])


def test_what_raises_on_one_rank_raises_on_all(told: list[dict[str, Any]]) -> None:
    assert str(told[1]["part"]).startswith("ConfigError: weights of Shard(rank=0, size=1)")
    assert str(told[0]["part"]).startswith("RankError: rank 1 failed at making its decoder (Config")


def test_a_run_that_lost_a_rank_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, never, left = threading.Event(), threading.Event(), []

    def hangs() -> None:
        begun.set()
        never.wait(60)

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", hangs)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(atexit, "register", left.append)
    TensorParallel(0, 2).close(abort=True)
    assert begun.wait(60)
    assert left == [tensor_parallel._leave]
    never.set()


def test_without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in environment(0, 1, 0):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ArgumentError, match=r"tp=2 .*torchrun --nproc-per-node 2"):
        TensorParallel.from_env(2, "cpu")
    for name, value in environment(0, 4, 1).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ArgumentError, match="tp=2 in a run of 4 processes"):
        TensorParallel.from_env(2, "cpu")


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        for name, value in environment(0, 1, port).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(RankError, match=f"joining 1 processes at 127.0.0.1:{port}.*MASTER_PO"):
            TensorParallel.from_env(1, "cpu", timeout_s=2)


def test_without_nccl_or_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment(0, 1, free_port()).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NCCL_CGA_CLUSTER_SIZE", "to be put back")
    monkeypatch.delenv("NCCL_CGA_CLUSTER_SIZE")
    try:
        monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
        with pytest.raises(RankError, match="without NCCL"):
            TensorParallel.from_env(1, "cuda")
        monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        with pytest.raises(RankError, match="LOCAL_RANK=0 and 0 GPUs"):
            TensorParallel.from_env(1, "cuda")
        assert os.environ["NCCL_CGA_CLUSTER_SIZE"] == "0"  # else none of its kernels is confined
    finally:
        dist.destroy_process_group()
