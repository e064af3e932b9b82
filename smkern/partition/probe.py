"""A kernel that records the SM of each of its CTAs: proof of where a stream's work runs."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from smkern.errors import DeviceError

SPIN_NS = 50_000
"""How long a CTA stays on its SM, so that every SM of a partition gets one."""

_PTX = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry record_smid(.param .u64 out)
{
    .reg .b32 %sm, %cta;
    .reg .b64 %base, %at, %start, %now;
    .reg .pred %early;
    ld.param.u64 %base, [out];
    mov.u32 %sm, %smid;
    mov.u32 %cta, %ctaid.x;
    mul.wide.u32 %at, %cta, 4;
    add.u64 %at, %base, %at;
    st.global.u32 [%at], %sm;
    mov.u64 %start, %globaltimer;
WAIT:
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %start;
    setp.lt.u64 %early, %now, SPIN;
    @%early bra WAIT;
    ret;
}
\0""".replace(b"SPIN", str(SPIN_NS).encode())


class Probe:
    """The loaded probe of one device, whatever device is torch's current one.

    The driver loads into the current context and launches only on streams of that context.
    """

    def __init__(self, device: int) -> None:
        from cuda.bindings import driver

        self.device = device
        self._cuda: Any = driver
        with torch.cuda.device(device):
            code, module = driver.cuModuleLoadData(_PTX)
        self._check(code, "cuModuleLoadData")
        code, self._function = driver.cuModuleGetFunction(module, b"record_smid")
        self._check(code, "cuModuleGetFunction")

    def _check(self, code: Any, call: str) -> None:
        if int(code):
            raise DeviceError(f"{call} of the %smid probe failed with {code!s}")

    def launch(self, stream: int, out: torch.Tensor) -> None:
        """Record the SM of CTA i in out[i], int32 on the device. Can be captured in a graph."""
        args = ((out.data_ptr(),), (ctypes.c_void_p,))
        code = self._cuda.cuLaunchKernel(
            self._function, out.numel(), 1, 1, 32, 1, 1, 0, stream, args, 0
        )
        self._check(code[0], "cuLaunchKernel")

    def output(self, num_ctas: int) -> torch.Tensor:
        """A buffer without SM ids, ready for use on every stream."""
        # pinned host memory: the device can write to it, and torch's allocator holds no block
        out = torch.full((num_ctas,), -1, dtype=torch.int32).pin_memory()
        torch.cuda.synchronize(self.device)
        return out

    def run(self, stream: int, num_ctas: int) -> list[int]:
        """The SM of each of `num_ctas` CTAs on `stream`."""
        with torch.cuda.device(self.device):
            out = self.output(num_ctas)
            self.launch(stream, out)
            self._check(self._cuda.cuStreamSynchronize(stream)[0], "cuStreamSynchronize")
        return out.tolist()

    def clusters(self, stream: int) -> bool | None:
        """Whether clusters of two CTAs fit a stream's partition; None if unknown."""
        cuda = self._cuda
        try:
            attribute = cuda.CUlaunchAttribute()
            attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            dims = attribute.value.clusterDim
            dims.x, dims.y, dims.z = 2, 1, 1
            config = cuda.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = 2, 1, 1
            config.blockDimX, config.blockDimY, config.blockDimZ = 32, 1, 1
            config.hStream = stream
            config.attrs = [attribute]
            config.numAttrs = 1
            with torch.cuda.device(self.device):
                code, count = cuda.cuOccupancyMaxActiveClusters(self._function, config)
        except (AttributeError, TypeError, RuntimeError):
            return None
        return None if int(code) else int(count) > 0


@cache
def probe_of(device: int) -> Probe:
    """The probe of a device, loaded once."""
    return Probe(device)
