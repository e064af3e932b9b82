"""What runs before a runtime serves, and where."""

from __future__ import annotations

from collections import defaultdict

from smkern.models.step import batch_bucket
from smkern.runtime.host_device import HostDevice
from smkern.runtime.model.warming import last_rows, warm_prompts

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
    warm_prompts(device, 100, MAX_PREFILL + MAX_RUNNING, forwards)
    sides = [("prefill", device.num_sms - rung) for rung in device.rungs]
    whole = device.num_sms
    assert {where for where, _, _ in device.ran} == {*sides, ("prefill", whole), ("decode", whole)}
    for (lane, num_sms), slot, part in device.ran:
        ran = device.ran[(lane, num_sms), slot, part]
        if part == "layer":
            assert ran == {16, 32, 64, 96, 100}
            continue
        mixed = lane == "decode" and slot == 0
        most = MAX_PREFILL + mixed * MAX_RUNNING
        assert ran == {batch_bucket(batch, most) for batch in range(1, most + 1)}


def test_rows_of_nobody_are_no_more_than_the_buffers_hold():
    assert last_rows(1) == [1]
    assert last_rows(45) == [1, 2, 4, 8, 16, 32, 45]
