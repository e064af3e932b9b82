"""SM clock and board power while the device is busy, by NVML, else by nvidia-smi."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field

Reading = tuple[float | None, float | None]
"""(SM clock in MHz, board power in W)"""

_SMI_EVERY_S = 2.0
"""nvidia-smi takes about 0.1 s a call, so it is asked rarely."""


@dataclass(slots=True)
class PowerMeter:
    """Call it while kernels run; `last` is what it read."""

    read: Callable[[], Reading]
    last: Reading = (None, None)

    def __call__(self) -> None:
        self.last = self.read()


def power_meter(device: int = 0) -> PowerMeter:
    """A meter of one device: NVML where `pynvml` is there, else nvidia-smi, else nothing."""
    import torch

    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    try:
        read = _nvml_reader(uuid)
        read()
    except Exception:  # noqa: BLE001  NVML has an error class a reason; any of them means: do without
        read = _Smi(uuid)
    return PowerMeter(read)


def _nvml_reader(uuid: str) -> Callable[[], Reading]:
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)

    def read() -> Reading:
        clock = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
        return float(clock), pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3

    return read


@dataclass(slots=True)
class _Smi:
    uuid: str
    asked_s: float = field(default=float("-inf"))
    last: Reading = (None, None)

    def __call__(self) -> Reading:
        if time.monotonic() - self.asked_s >= _SMI_EVERY_S:
            self.last = self._ask()
            self.asked_s = time.monotonic()
        return self.last

    def _ask(self) -> Reading:
        query = ["--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
        try:
            output = subprocess.run(
                ["nvidia-smi", "-i", self.uuid, *query],
                capture_output=True,
                text=True,
                timeout=5,
                check=True,
            ).stdout
            clock, watts = (float(figure) for figure in output.strip().split(","))
        except (OSError, subprocess.SubprocessError, ValueError):
            return None, None
        return clock, watts
