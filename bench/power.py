"""SM clock, board power and energy while the device is busy, by NVML, else by nvidia-smi."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

Reading = tuple[float | None, float | None]
"""(SM clock in MHz, board power in W)"""

Joules = Callable[[], float]
"""What a GPU has drawn since its driver was loaded."""

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


@dataclass(slots=True)
class Watts:
    """The power between the first and the last step of a counter of energy.

    The counter moves every 40 to 130 ms, and NVML's own power is a mean over a second on Hopper:
    the energy between two steps, over the time between them, is exact however short it is.

    Args:
        counter: The counter; None: there is none.
        now: Seconds of a clock.
    """

    counter: Joules | None
    now: Callable[[], float] = time.monotonic
    _steps: list[tuple[float, float]] = field(default_factory=list)
    _last: float | None = None

    def start(self) -> None:
        """Forget what was seen."""
        self._steps.clear()
        self._last = None

    def tick(self) -> None:
        """Look at the counter; call it often."""
        if self.counter is None:
            return
        joules = self.counter()
        if self._last is not None and joules != self._last:
            self._steps.append((self.now(), joules))
        self._last = joules

    @property
    def watts(self) -> float | None:
        """Mean power since the first step that was seen; None: fewer than two were."""
        if len(self._steps) < 2:
            return None
        (begin_s, before), (end_s, after) = self._steps[0], self._steps[-1]
        return (after - before) / (end_s - begin_s)


def energy_counter(device: int) -> Joules | None:
    """NVML's counter of a device's energy; None where there is none."""
    import torch

    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    with suppress(Exception):  # NVML has an error class a reason; any of them means: do without
        pynvml, handle = _nvml(uuid)

        def read() -> float:
            return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3

        read()
        return read
    return None


def _nvml(uuid: str) -> tuple[Any, Any]:
    import pynvml

    pynvml.nvmlInit()
    return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)


def _nvml_reader(uuid: str) -> Callable[[], Reading]:
    pynvml, handle = _nvml(uuid)

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
