"""Moments of a stream on the device's own clock, also inside a graph."""

from __future__ import annotations

import ctypes
import time
from typing import Any, Protocol

import torch

from smkern.errors import DeviceError

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

    def __init__(self, device: int = 0) -> None:
        from cuda.bindings import driver

        self._cuda: Any = driver
        self._device = device
        self._out = torch.zeros(1 + SLOTS, dtype=torch.int64, device=f"cuda:{device}")
        torch.cuda.synchronize(device)
        code, self._module = driver.cuModuleLoadData(_PTX)
        self._check(code, "cuModuleLoadData")
        code, self._function = driver.cuModuleGetFunction(self._module, b"stamp")
        self._check(code, "cuModuleGetFunction")

    def mark(self) -> None:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        args = ((self._out.data_ptr(),), (ctypes.c_void_p,))
        code = self._cuda.cuLaunchKernel(self._function, 1, 1, 1, 1, 1, 1, 0, stream, args, 0)
        self._check(code[0], "cuLaunchKernel")

    def clear(self) -> None:
        torch.cuda.synchronize(self._device)
        self._out.zero_()
        torch.cuda.synchronize(self._device)

    def us(self) -> list[float]:
        torch.cuda.synchronize(self._device)
        count, *moments = self._out.tolist()
        if count > SLOTS:
            first = count % SLOTS
            moments = moments[first:] + moments[:first]
        return [moment / 1e3 for moment in moments[: min(count, SLOTS)]]

    def _check(self, code: Any, call: str) -> None:
        if int(code):
            raise DeviceError(f"{call} of the stamp failed with {code!s}")


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
