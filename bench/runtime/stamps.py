"""Moments of a stream by the device's own timer, also inside a graph."""

from __future__ import annotations

import time
from typing import Protocol

import torch

from smkern.measure.sm_clock import OneThread

SLOTS = 1 << 14
"""Moments that are kept: the last so many."""

_PTX = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry stamp(.param .u64 at)
{
    .reg .b32 %count;
    .reg .b64 %base, %slot, %now;
    ld.param.u64 %base, [at];
    mov.u64 %now, %globaltimer;
    atom.global.add.u32 %count, [%base], 1;
    and.b32 %count, %count, MASK;
    mul.wide.u32 %slot, %count, 8;
    add.u64 %slot, %base, %slot;
    st.global.u64 [%slot+8], %now;
    ret;
}
\0""".replace(b"MASK", str(SLOTS - 1).encode())


class Stamps(Protocol):
    """A list of moments, added to by what runs on a stream."""

    def mark(self) -> None:
        """Add the moment at which the current stream gets here; can be captured."""
        ...

    def clear(self) -> None:
        """Forget all; nothing may run that marks."""
        ...

    def us(self) -> list[float]:
        """The moments in us, in order; waits for the device."""
        ...


class DeviceStamps:
    """Moments by a kernel of one thread: 2 us of a stream each.

    Args:
        device: index of the GPU.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._kernel = OneThread(_PTX, "stamp", 1 + SLOTS, device)

    def mark(self) -> None:
        self._kernel.launch(torch.cuda.current_stream(self._device).cuda_stream)

    def clear(self) -> None:
        torch.cuda.synchronize(self._device)
        self._kernel.out.zero_()
        torch.cuda.synchronize(self._device)

    def us(self) -> list[float]:
        torch.cuda.synchronize(self._device)
        count, *moments = self._kernel.out.tolist()
        if count > SLOTS:
            first = count % SLOTS
            moments = moments[first:] + moments[:first]
        return [moment / 1e3 for moment in moments[: min(count, SLOTS)]]


class HostStamps:
    """Moments of the host's clock, where work runs as it is launched."""

    def __init__(self) -> None:
        self._us: list[float] = []

    def mark(self) -> None:
        self._us.append(time.perf_counter_ns() / 1e3)

    def clear(self) -> None:
        self._us = []

    def us(self) -> list[float]:
        return list(self._us)


def stamps_on(device: torch.device) -> Stamps:
    """Stamps of work on a device."""
    return HostStamps() if device.type == "cpu" else DeviceStamps(device.index or 0)
