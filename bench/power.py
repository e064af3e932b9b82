"""SM clock, board power and energy while the device is busy, by NVML."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from smkern.device import nvml_of

Reading = tuple[float | None, float | None]
"""(SM clock in MHz, board power in W)"""

Joules = Callable[[], float]
"""What a GPU has drawn since its driver was loaded."""


@dataclass(slots=True)
class PowerMeter:
    """Call it while kernels run; `last` is what it read."""

    read: Callable[[], Reading]
    last: Reading = (None, None)

    def __call__(self) -> None:
        self.last = self.read()


def power_meter(device: int = 0) -> PowerMeter:
    """A meter of one device; without NVML it reads nothing."""
    with suppress(Exception):  # NVML has an error class a reason; any of them means: do without
        nvml, handle = nvml_of(device)

        def read() -> Reading:
            clock = nvml.device_get_clock_info(handle, nvml.ClockType.CLOCK_SM)
            return float(clock), nvml.device_get_power_usage(handle) / 1e3

        read()
        return PowerMeter(read)
    return PowerMeter(lambda: (None, None))


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
    with suppress(Exception):  # as above
        nvml, handle = nvml_of(device)

        def read() -> float:
            return float(nvml.device_get_total_energy_consumption(handle)) / 1e3

        read()
        return read
    return None
