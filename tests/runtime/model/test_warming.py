"""What runs before a runtime serves, and where."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from smkern.device import Budget
from smkern.latency.work import padded_rows
from smkern.models import Decoder, Weights, preset
from smkern.models.step import batch_bucket, batch_buckets
from smkern.ops import AttentionCalls, SwigluCalls
from smkern.ops.gemm.warmup import GemmCalls
from smkern.ops.warming import Target, Within
from smkern.runtime.host_device import HostDevice
from smkern.runtime.model import warming
from smkern.runtime.model.executor import ModelExecutor
from smkern.runtime.model.warming import warm_prompts
from tests.models.generation import tiny
from tests.runtime.alone import pool_of

MAX_PREFILL, MAX_RUNNING = 5, 40


class Recorder:
    """A slot's forwards, which tell where their parts ran."""

    max_prefill = MAX_PREFILL

    def __init__(self, device: WhereDevice, slot: int) -> None:
        self.device, self.slot = device, slot

    def layer(self, tokens: int) -> None:
        self.device.ran[self.device.where, self.slot, "layer"].add(tokens)

    def head(self, batch: int) -> None:
        self.device.ran[self.device.where, self.slot, "head"].add(batch)


class WhereDevice(HostDevice):
    """Keeps the lane and the SMs of what runs."""

    def __init__(self) -> None:
        super().__init__(rungs=(16, 32))
        self.ran = defaultdict(set)

    def launch(self, lane, place, work):
        self.where = lane, place.num_sms
        return super().launch(lane, place, work)


def test_no_number_of_last_rows_is_new_where_it_is_served():
    device = WhereDevice()
    forwards = [Recorder(device, slot) for slot in (0, 1)]
    warm_prompts(device, 100, MAX_RUNNING, forwards)
    sides = [("prefill", device.num_sms - rung) for rung in device.rungs]
    whole = device.num_sms
    assert {where for where, _, _ in device.ran} == {*sides, ("prefill", whole), ("decode", whole)}
    for (lane, num_sms), slot, part in device.ran:
        ran = device.ran[(lane, num_sms), slot, part]
        if part == "layer":
            assert ran == {16, 32, 64, 96, 128}
            continue
        mixed = lane == "decode" and slot == 0
        most = MAX_PREFILL + mixed * MAX_RUNNING
        assert ran == {batch_bucket(batch, most) for batch in range(1, most + 1)}


def test_rows_of_nobody_are_no_more_than_the_buffers_hold():
    assert batch_buckets(1) == [1]
    assert batch_buckets(45) == [1, 2, 4, 8, 16, 32, 45]


def test_kernels_are_warmed_where_what_launches_them_may_run(monkeypatch):
    """Prompts never run on decode's side of a split, nor steps of decode graphs on prefill's."""
    asked = {}
    monkeypatch.setattr(warming, "device_info", lambda: SimpleNamespace(num_sms=132))
    monkeypatch.setattr(warming, "warmup", lambda **given: asked.update(given))
    splits = [SimpleNamespace(decode=f"decode {n}", prefill=f"prefill {n}") for n in (16, 32)]
    config = preset("qwen3-8b")
    warming.warm_kernels(
        config, splits, page_size=16, max_running=40, max_prefill=5, max_tokens=100
    )
    assert asked["budgets"] == [132, "prefill 16", "prefill 32"]
    within = [each for each in asked["calls"] if isinstance(each, Within)]
    assert all(each.budgets == ["decode 16", "decode 32"] for each in within)
    steps = [each.calls for each in within]
    forwards = asked["calls"][len(within) :]
    assert [type(each) for each in steps] == [type(each) for each in forwards]
    assert isinstance(forwards[0], AttentionCalls), "its kernels compile longest"
    for calls, rows, longest in ((steps, {40}, 1), (forwards, {45, 140}, 100)):
        products = (each for each in calls if isinstance(each, GemmCalls | SwigluCalls))
        assert {each.max_m for each in products} == rows
        attention = next(each for each in calls if isinstance(each, AttentionCalls))
        assert attention.max_q_len == longest


def test_calls_in_budgets_of_their_own():
    class Calls:
        def work(self, target):
            return target

    target = Target(0, 132, [Budget(132, "mask", True)], [True])
    partition = SimpleNamespace(num_sms=32, confined="mask", clusters=False)
    assert Within(Calls(), [partition]).work(target).budgets == [Budget(32, "mask", False)]
    assert Within(Calls(), []).work(target).budgets == []


@pytest.mark.parametrize(("max_tokens", "max_running"), [(100, 40), (1000, 3), (1, 1)])
def test_the_largest_forwards_have_rows_that_were_warmed(max_tokens: int, max_running: int):
    config = tiny()
    decoder = Decoder(config, Weights.random(config, 3))
    executor = ModelExecutor(
        decoder, pool_of(config, 8, reuse=False), max_running=max_running, max_prefill=2,
        max_tokens=max_tokens,
    )  # fmt: skip
    for slot, rows in zip(executor._slots, (max_tokens + max_running, max_tokens), strict=True):
        assert slot.activations.max_tokens == padded_rows(rows)
        assert slot.token_ids.numel() == padded_rows(max_tokens)
    step = executor._inputs.padded(padded_rows(max_tokens + max_running), 64)
    assert step.num_tokens == padded_rows(max_tokens + max_running)


@pytest.mark.parametrize(("max_tokens", "max_prefill"), [(64, 4), (2, 4), (1, 1)])
def test_an_executor_warms_up_and_keeps_nothing_of_it(max_tokens, max_prefill):
    config = tiny()
    pool = pool_of(config, 8, reuse=False)
    decoder = Decoder(config, Weights.random(config, 3))
    sizes = {"max_running": 3, "max_prefill": max_prefill, "max_tokens": max_tokens}
    executor = ModelExecutor(decoder, pool, **sizes)
    before = pool.storage.clone()
    executor.warm()
    assert torch.equal(pool.storage, before)
    assert bool(executor._state.finished.all())
