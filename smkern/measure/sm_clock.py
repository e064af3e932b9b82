"""The clock of the SMs while kernels run, by cycles over nanoseconds on an SM."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from smkern.kernels.driver import check, launch_kernel, load_function

READINGS = 1 << 10
"""Readings of the clock that are kept: the last so many."""
READ_EVERY_S = 0.5
SPIN_NS = 50_000
"""How long a reading takes: its warp may keep a CTA that wants all of an SM's memory waiting."""

_PTX = b"""
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


class OneThread:
    """A kernel of one thread that writes into an array which its first word counts.

    Args:
        ptx: Its code.
        name: Its name there.
        words: 64-bit words of the array.
        device: Index of the GPU.

    Attributes:
        out: The array, zeros at first.

    Raises:
        DeviceError: the driver refuses the kernel.
    """

    def __init__(self, ptx: bytes, name: str, words: int, device: int) -> None:
        self.out = torch.zeros(words, dtype=torch.int64, device=f"cuda:{device}")
        torch.cuda.synchronize(device)
        with torch.cuda.device(device):
            self._function = load_function(ptx, name, 0)
        self._at = ctypes.c_void_p(self.out.data_ptr())
        self._params = (ctypes.c_void_p * 1)(ctypes.addressof(self._at))

    def launch(self, stream: int) -> None:
        """Launch it; can be captured."""
        code = launch_kernel()(self._function, 1, 1, 1, 1, 1, 1, 0, stream, self._params, None)
        check(code, "cuLaunchKernel")


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
        device: Index of the GPU.
    """

    def __init__(self, stream: Any, device: int = 0) -> None:
        self._stream = stream
        self._kernel = OneThread(_PTX, "clock", 2 * (1 + READINGS), device)

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
    """A clock of what runs on a device; on a stream of its own, before others' work, where none is
    given."""
    if device.type == "cpu":
        return NoClock()
    index = device.index or 0
    return DeviceClock(torch.cuda.Stream(index, priority=-1) if stream is None else stream, index)


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
