"""The grid backend: a budget without a mask, for devices or drivers without green contexts."""

from __future__ import annotations

from smkern.device import Budget, DeviceInfo
from smkern.partition.partition import Origin, Partition
from smkern.partition.streams import stream_budgets


def make_pair(decode_sms: int, origin: Origin, info: DeviceInfo) -> tuple[Partition, Partition]:
    """Two streams on which smkern's kernels launch at most so many CTAs; no mask confines them."""
    return (_make(decode_sms, origin, info), _make(info.num_sms - decode_sms, origin, info))


def _nothing() -> None:
    return None


def _make(num_sms: int, origin: Origin, info: DeviceInfo) -> Partition:
    import torch

    from smkern.partition.driver import cuda_driver

    driver = cuda_driver(origin.device)
    raw_stream = driver.create_stream()
    stream = torch.cuda.ExternalStream(raw_stream, device=torch.device("cuda", origin.device))
    budget = Budget(num_sms, "grid", clusters=info.capability >= (9, 0))
    stream_budgets(origin.device).add(raw_stream, budget)
    # as with green, closing leaves the stream alive: its handle must not be reused
    return Partition(origin, num_sms, budget, (), stream, driver.smids, release=_nothing)
