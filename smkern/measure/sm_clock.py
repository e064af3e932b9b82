"""The clock of the SMs while kernels run, by cycles over nanoseconds on an SM."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from smkern.errors import DeviceError

SPIN_NS = 100_000
"""How long a probe counts: the nanosecond timer may advance by a microsecond at a time."""

_PTX = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry probe(.param .u64 at)
{
    .reg .pred %again;
    .reg .b64 %out, %begin, %now, %from, %to, %spent;
    ld.param.u64 %out, [at];
    mov.u64 %begin, %globaltimer;
    mov.u64 %from, %clock64;
SPIN:
    mov.u64 %now, %globaltimer;
    sub.u64 %spent, %now, %begin;
    setp.lt.u64 %again, %spent, LIMIT;
    @%again bra SPIN;
    mov.u64 %to, %clock64;
    sub.u64 %to, %to, %from;
    st.global.u64 [%out], %spent;
    st.global.u64 [%out+8], %to;
    ret;
}
\0""".replace(b"LIMIT", str(SPIN_NS).encode())


class SmClock:
    """One thread that counts cycles for a tenth of a millisecond, beside whatever runs.

    All SMs have one clock; NVML tells it late and in steps.

    Args:
        device: Index of the GPU.

    Raises:
        DeviceError: the driver refuses the probe.
    """

    def __init__(self, device: int = 0) -> None:
        from cuda.bindings import driver

        self._cuda: Any = driver
        self._out = torch.zeros(2, dtype=torch.int64, device=f"cuda:{device}")
        self._stream = torch.cuda.Stream(device, priority=-1)
        torch.cuda.synchronize(device)
        code, self._module = driver.cuModuleLoadData(_PTX)
        self._check(code, "cuModuleLoadData")
        code, self._function = driver.cuModuleGetFunction(self._module, b"probe")
        self._check(code, "cuModuleGetFunction")

    def start(self) -> None:
        """Launch a probe; it ends by itself."""
        args = ((self._out.data_ptr(),), (ctypes.c_void_p,))
        raw = self._stream.cuda_stream
        code = self._cuda.cuLaunchKernel(self._function, 1, 1, 1, 1, 1, 1, 0, raw, args, 0)
        self._check(code[0], "cuLaunchKernel")

    def mhz(self) -> float | None:
        """What the last probe counted; waits for it. None: there was none."""
        self._stream.synchronize()
        spent, cycles = self._out.tolist()
        return 1e3 * cycles / spent if spent else None

    def _check(self, code: Any, call: str) -> None:
        if int(code):
            raise DeviceError(f"{call} of the clock's probe failed with {code!s}")
