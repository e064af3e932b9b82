"""The device's own clocks: moments of a stream, also inside a graph, and the SMs' frequency."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
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

READINGS = 1 << 10
"""Readings of the clock that are kept: the last so many."""
READ_EVERY_S = 0.5
SPIN_NS = 50_000
"""How long a reading takes: its warp may keep a CTA that wants all of an SM's memory waiting."""

_CLOCK = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry clock(.param .u64 at)
{
    .reg .pred %more;
    .reg .b32 %count;
    .reg .b64 %base, %slot, %tick, %ticks, %before, %begin, %now, %ns;
    ld.param.u64 %base, [at];
    mov.u64 %before, %globaltimer;
EDGE:
    mov.u64 %begin, %globaltimer;
    setp.eq.u64 %more, %begin, %before;
    @%more bra EDGE;
    mov.u64 %tick, %clock64;
SPIN:
    mov.u64 %now, %globaltimer;
    sub.u64 %ns, %now, %begin;
    setp.lt.u64 %more, %ns, SPIN_NS;
    @%more bra SPIN;
    mov.u64 %ticks, %clock64;
    sub.u64 %ticks, %ticks, %tick;
    atom.global.add.u32 %count, [%base], 1;
    and.b32 %count, %count, MASK;
    mul.wide.u32 %slot, %count, 16;
    add.u64 %slot, %base, %slot;
    st.global.u64 [%slot+16], %ticks;
    st.global.u64 [%slot+24], %ns;
    ret;
}
\0""".replace(b"MASK", str(READINGS - 1).encode()).replace(b"SPIN_NS", str(SPIN_NS).encode())


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


class _OneThread:
    """A kernel of one thread that writes into an array which its first word counts.

    Args:
        ptx: its code.
        name: its name there.
        words: 64-bit words of the array.
        device: index of the GPU.
    """

    def __init__(self, ptx: bytes, name: str, words: int, device: int) -> None:
        from cuda.bindings import driver

        self._cuda: Any = driver
        self._name = name
        self.out = torch.zeros(words, dtype=torch.int64, device=f"cuda:{device}")
        torch.cuda.synchronize(device)
        code, self._module = driver.cuModuleLoadData(ptx)
        self._check(code, "cuModuleLoadData")
        code, self._function = driver.cuModuleGetFunction(self._module, name.encode())
        self._check(code, "cuModuleGetFunction")

    def launch(self, stream: int) -> None:
        args = ((self.out.data_ptr(),), (ctypes.c_void_p,))
        code = self._cuda.cuLaunchKernel(self._function, 1, 1, 1, 1, 1, 1, 0, stream, args, 0)
        self._check(code[0], "cuLaunchKernel")

    def _check(self, code: Any, call: str) -> None:
        if int(code):
            raise DeviceError(f"{call} of the {self._name} failed with {code!s}")


class DeviceStamps:
    """Moments by a kernel of one thread: 2 us of a stream each.

    Args:
        device: index of the GPU.
    """

    def __init__(self, device: int = 0) -> None:
        self._device = device
        self._kernel = _OneThread(_PTX, "stamp", 1 + SLOTS, device)

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


class Clock(Protocol):
    """Readings of the clock of SMs that are busy with something else."""

    def read(self) -> None:
        """Take a reading; returns without waiting."""
        ...

    def mhz(self) -> float | None:
        """The median of the readings since the last call; waits for them. None: there are none."""
        ...


class DeviceClock:
    """SM clock by `%clock64` over `%globaltimer`, from one step of that timer, which may be 1 us,
    to another: one warp for 50 us.

    NVML reports what the chip asks for, at times 40% above what its SMs run at.

    Args:
        stream: Where it reads, a partition's stream for instance; nothing waits for it.
        device: index of the GPU.
    """

    def __init__(self, stream: Any, device: int = 0) -> None:
        self._stream = stream
        self._kernel = _OneThread(_CLOCK, "clock", 2 * (1 + READINGS), device)

    def read(self) -> None:
        self._kernel.launch(self._stream.cuda_stream)

    def mhz(self) -> float | None:
        self._stream.synchronize()
        count, _, *numbers = self._kernel.out.tolist()
        pairs = zip(numbers[0::2], numbers[1::2], strict=True)
        found = [1e3 * ticks / ns for ticks, ns in pairs if ns]
        self._kernel.out.zero_()
        torch.cuda.current_stream(self._kernel.out.device).synchronize()
        return round(statistics.median(found), 1) if count else None


class NoClock:
    """A host has no SMs."""

    def read(self) -> None:
        return

    def mhz(self) -> None:
        return None


def clock_on(device: torch.device, stream: Any = None) -> Clock:
    """A clock of what runs on a device; on a stream of its own where none is given."""
    if device.type == "cpu":
        return NoClock()
    index = device.index or 0
    return DeviceClock(torch.cuda.Stream(index) if stream is None else stream, index)


def ticking(clock: Clock, settle_s: float = 0.0) -> Callable[[], None]:
    """What reads a clock now and then, from a moment on, when it is called again and again."""
    due = time.monotonic() + settle_s

    def tick() -> None:
        nonlocal due
        now = time.monotonic()
        if now >= due:
            clock.read()
            due = now + READ_EVERY_S

    return tick
