"""The driver's green-context calls on one device, by cuda.bindings; tests fake them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from smkern.errors import DeviceError

IGNORE_COSCHEDULING = 1
"""Split flag: groups of 2 SMs instead of 8 on sm_90; kernels with clusters may not launch there."""
_NON_BLOCKING = 1
_DEFAULT_STREAM = 1
_PRIORITY = 0
_REMEDY = (
    "green contexts need driver 550 (CUDA 12.4) or later; without them use backend='grid', which "
    "keeps a budget by limiting the grid"
)


@dataclass(frozen=True, slots=True)
class GreenContext:
    """A created context: its handle, its stream and the SMs that the driver granted."""

    handle: Any
    stream: int
    num_sms: int


class CudaDriver:
    """The real driver. Torch's primary context stays current throughout."""

    def __init__(self, device: int) -> None:
        import torch

        torch.cuda.init()
        torch.zeros(1, device=torch.device("cuda", device))
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise DeviceError(
                f"cuda-bindings is missing ({error}): pip install cuda-bindings"
            ) from error
        self.device = device
        self._cuda = driver
        self.handle = self.call("cuDeviceGet", device)
        self.sm = driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM

    def call(self, name: str, *args: Any) -> Any:
        """A driver call's result; `DeviceError` with its name, code and the remedy."""
        try:
            code, *values = getattr(self._cuda, name)(*args)
        except (RuntimeError, AttributeError) as error:
            raise DeviceError(f"{name} is not in this driver ({error}): {_REMEDY}") from error
        if int(code):
            raise DeviceError(f"{name} failed with {code!s}: {_REMEDY}")
        return values[0] if len(values) == 1 else tuple(values)

    def split(self, min_sms: int, flags: int) -> tuple[list[Any], Any]:
        """The device's SMs in groups of `min_sms`, as many as fit, and the remainder or None."""
        whole = self.call("cuDeviceGetDevResource", self.handle, self.sm)
        groups, count, rest = self.call(
            "cuDevSmResourceSplitByCount", whole.sm.smCount // min_sms, whole, flags, min_sms
        )
        return list(groups[: int(count)]), rest if rest.sm.smCount else None

    def create(self, groups: Sequence[Any]) -> GreenContext:
        """A green context of groups of one split, with one non-blocking stream."""
        description = self.call("cuDevResourceGenerateDesc", list(groups), len(groups))
        handle = self.call("cuGreenCtxCreate", description, self.handle, _DEFAULT_STREAM)
        stream = self.call("cuGreenCtxStreamCreate", handle, _NON_BLOCKING, _PRIORITY)
        granted = self.call("cuGreenCtxGetDevResource", handle, self.sm)
        return GreenContext(handle, int(stream), int(granted.sm.smCount))

    def create_stream(self) -> int:
        """A non-blocking stream without a green context, whose handle is never handed out again.

        Torch hands out streams round-robin from a pool of 32, so others' work would share a budget.
        """
        import torch

        with torch.cuda.device(self.device):
            return int(self.call("cuStreamCreate", _NON_BLOCKING))

    def detach(self, context: GreenContext) -> None:
        """Destroy a context whose work has finished, leaving its stream detached.

        Launches on the stream then fail with a clear error, and its handle is not reused for
        another stream. (Destroying the stream later fails, as its context is gone.)
        """
        self.call("cuGreenCtxDestroy", context.handle)

    def destroy_stream(self, context: GreenContext) -> None:
        """Destroy a context's stream, before the context."""
        self.call("cuStreamDestroy", context.stream)

    def smids(self, stream: int, num_ctas: int) -> list[int]:
        """The SM of each of `num_ctas` probe CTAs launched on `stream`; waits for them."""
        from smkern.partition.probe import probe_of

        return probe_of(self.device).run(stream, num_ctas)

    def clusters(self, stream: int) -> bool | None:
        """Whether clusters of two CTAs can run on a stream; None if the driver cannot tell."""
        from smkern.partition.probe import probe_of

        return probe_of(self.device).clusters(stream)

    def stream_num_sms(self, stream: int) -> int | None:
        """SM count of a stream's green context; None if it has none."""
        handle = self.call("cuStreamGetGreenCtx", stream)
        if not int(handle):
            return None
        return int(self.call("cuGreenCtxGetDevResource", handle, self.sm).sm.smCount)


@cache
def cuda_driver(device: int) -> CudaDriver:
    """The driver of a device, made once."""
    return CudaDriver(device)
