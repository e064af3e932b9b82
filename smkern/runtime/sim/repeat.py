"""The times of decode steps that are alike, on a simulated device that does nothing else."""

from __future__ import annotations

from dataclasses import replace

from smkern.latency import Size
from smkern.runtime.sim.device import SimDevice


def repeat(device: SimDevice, most: int, until_us: float) -> list[float]:
    """Let decode steps, the only work there is, end one after another, each followed by a launch
    like the last with a key a row more: in the times that `wait` and `launch` give.

    Args:
        device: The device.
        most: Steps that may end.
        until_us: Only those that end before this are let.

    Returns:
        When each ended. What is queued then are so many later steps, in the place of those that
        were.
    """
    items = list(device._lanes["decode"])
    assert 1 <= len(items) <= 2, items
    assert device.predictor is not None
    if device._faults or device.has_failed or not device._begin(items[0]):
        return []
    size, num_sms, cost = items[-1].size, items[-1].place.num_sms, device._decode_launch_us
    assert size is not None
    keys, now, done = size.total_kv, device._now, items[0].done_us
    ends: list[float] = []
    alone = [item.alone_us for item in items]
    while len(ends) < most and (end := now + (alone[0] - done)) < until_us:
        if len(alone) == 2 and cost >= alone[1]:
            break  # it would be over before the host has launched the next
        keys += size.batch
        later = Size((), size.layers, size.num_layers, False, size.batch, keys)
        alone = [*alone[1:], device.predictor.alone_us(later, num_sms) + device.decode_gap_us]
        now = end + cost
        # while the host launches, the one behind runs, if there is one
        done = now - end if len(alone) == 2 else 0.0
        ends.append(end)
    if not ends:
        return ends
    for item, us in zip(items, alone, strict=True):
        assert item.size is not None
        item.size = replace(item.size, total_kv=item.size.total_kv + len(ends) * size.batch)
        item.alone_us = item.launched_us = us
        item.done_us, item.event.began_us = 0.0, None
        item.event.number += len(ends)
    if len(items) == 2:
        items[0].done_us, items[0].event.began_us = done, ends[-1]
    device._now = now
    device.launches += len(ends)
    return ends
