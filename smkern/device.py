"""Facts of one GPU and its ceilings by SM count, also of a GPU that is absent.

Importing this loads neither torch nor the driver.
"""

from __future__ import annotations

import json
import os
import tempfile
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from smkern.errors import BudgetError, DeviceError, ProfileError

Confinement = Literal["mask", "grid"]
Placement = Literal["spread", "default"]
Curve = Sequence[tuple[int, float]]

FORMAT = 1
SHIPPED = Path(__file__).parent / "profiles"
DEFAULT = "h200"
"""The shipped profile that a machine without a GPU plans for."""


@dataclass(frozen=True, slots=True, order=True)
class Budget:
    """How many SMs a launch may use, what keeps it there, and whether clusters can launch.

    "mask": the hardware runs nothing of the stream elsewhere (a green partition, or the whole
    device), so several CTAs may share an SM. "grid": only the count of CTAs keeps the budget.
    """

    num_sms: int
    confined: Confinement = "grid"
    clusters: bool = True


def check_budget(budget: Budget) -> None:
    """Raise BudgetError for a budget below one SM."""
    if budget.num_sms < 1:
        raise BudgetError(f"num_sms is {budget.num_sms}; give at least 1")


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """Facts of one GPU. `sm_granularity`: the least step of a partition; `min_sms`: its least."""

    name: str
    num_sms: int
    capability: tuple[int, int]
    sm_granularity: int
    min_sms: int
    l2_bytes: int
    sm_clock_mhz: int
    memory_bytes: int
    driver: str = "unknown"
    cuda: str = "unknown"


@dataclass(frozen=True, slots=True)
class Profile:
    """What a GPU can do on some of its SMs.

    Args:
        info: the GPU.
        curves: name to measured points (SMs, value), sorted: `bandwidth_tbps_<placement>_<alone or
            beside>`, `flops_tflops_<placement>_<alone or beside>`.
        provenance: driver, versions, date and command of the measurement.
    """

    info: DeviceInfo
    curves: Mapping[str, Curve]
    provenance: Mapping[str, str] = field(default_factory=dict)

    def bandwidth(
        self,
        num_sms: int,
        *,
        confined: Confinement = "mask",
        placement: Placement = "spread",
        beside: bool = False,
    ) -> float:
        """Read bandwidth of `num_sms` SMs, TB/s: never less for more SMs.

        Args:
            num_sms: 1 to the device's.
            confined: a grid's CTAs land on SMs all over the device, as a spread partition's do.
            placement: SMs spread over the GPCs (smkern's), or the driver's own groups.
            beside: while a matrix product runs on the complement.
        """
        where = "spread" if confined == "grid" else placement
        return self._at("bandwidth_tbps", num_sms, where, beside)

    def flops(
        self, num_sms: int, *, placement: Placement = "spread", beside: bool = False
    ) -> float:
        """Dense bf16 rate of `num_sms` SMs, TFLOP/s: 4,096 a clock and SM, or what power allows."""
        peak = 4096e-6 * self.info.sm_clock_mhz * num_sms
        return min(peak, self._at("flops_tflops", num_sms, placement, beside))

    def _at(self, what: str, num_sms: int, placement: Placement, beside: bool) -> float:
        total = self.info.num_sms
        if not 1 <= num_sms <= total:
            raise ProfileError(
                f"a profile of {self.info.name} was asked about {num_sms} SMs; it has 1 to {total}"
            )
        when = "beside" if beside else "alone"
        for name in (f"{what}_{placement}_{when}", f"{what}_spread_{when}", f"{what}_spread_alone"):
            if self.curves.get(name):
                return _interpolate(self.curves[name], num_sms)
        raise ProfileError(
            f"the profile of {self.info.name} has no curve {what}_{placement}_{when}; "
            "measure it: smkern bench ceilings --save"
        )


def _interpolate(curve: Curve, num_sms: int) -> float:
    """Linear between points, through the origin before the first, level after the last.

    Points that fall below an earlier one (a bad choice of SMs) count as the earlier one.
    """
    best, points = 0.0, [(0, 0.0)]
    for sms, value in curve:
        best = max(best, value)
        points.append((sms, best))
    i = bisect_right([sms for sms, _ in points], num_sms)
    if i == len(points):
        return points[-1][1]
    (left, low), (right, high) = points[i - 1], points[i]
    return low + (high - low) * (num_sms - left) / (right - left)


def has_gpu() -> bool:
    """Whether torch sees a GPU here."""
    import torch

    return torch.cuda.is_available()


def device_info(index: int | None = None) -> DeviceInfo:
    """Facts of a GPU of this machine.

    Args:
        index: of the GPU; torch's current one by default.

    Raises:
        DeviceError: no GPU, no driver, or none of that index.
    """
    import torch

    if not has_gpu():
        raise DeviceError(
            "torch sees no GPU: partitions and kernels need one (sm_80 or later, driver 550 or "
            "later for green contexts). CPU tensors run the reference; plans use a shipped profile"
        )
    return _facts(torch.cuda.current_device() if index is None else index)


@cache
def _facts(index: int) -> DeviceInfo:
    import torch

    count = torch.cuda.device_count()
    if not 0 <= index < count:
        raise DeviceError(f"no GPU {index}: this machine has 0 to {count - 1}")
    facts = torch.cuda.get_device_properties(index)
    major, minor = facts.major, facts.minor
    step = 2 if major >= 9 else 4 if (major, minor) >= (8, 0) else 2
    return DeviceInfo(
        name=facts.name,
        num_sms=facts.multi_processor_count,
        capability=(major, minor),
        sm_granularity=step,
        min_sms=step,
        l2_bytes=facts.L2_cache_size,
        sm_clock_mhz=_clock_mhz(index),
        memory_bytes=facts.total_memory,
        driver=_driver_version(),
        cuda=torch.version.cuda or "unknown",
    )


def _clock_mhz(index: int) -> int:
    """The highest SM clock, MHz."""
    from cuda.bindings import driver

    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CLOCK_RATE
    code, khz = driver.cuDeviceGetAttribute(attribute, index)
    return int(khz) // 1000 if int(code) == 0 else 0


def _driver_version() -> str:
    """The driver's own version, as its kernel module tells it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    words = text.split("\n")[0].split()
    numbers = [word for word in words if word.count(".") >= 1 and word[0].isdigit()]
    return numbers[0] if numbers else "unknown"


def cache_file(info: DeviceInfo) -> Path:
    """Where this user's own profile of a GPU lies; it is one GPU's, driver's and stack's."""
    from platformdirs import user_cache_path

    stack = [f"{name}-{_version(name)}" for name in ("torch", "triton")]
    parts = [info.name, f"driver-{info.driver}", *stack]
    name = "_".join("".join(c if c.isalnum() or c in ".-" else "-" for c in p) for p in parts)
    return user_cache_path("smkern") / "profiles" / f"{name}.json"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"


def load_profile(which: str | int | None = None) -> Profile:
    """The profile of a GPU: this user's measured one, else the shipped one.

    Args:
        which: index of a GPU, the name of a shipped profile ("h200"), or None: the current GPU
            where there is one, else the shipped H200.

    Raises:
        ProfileError: no such profile, or a corrupt one.
        DeviceError: this machine has GPUs, but none of that index.
    """
    if isinstance(which, str):
        return _read(SHIPPED / f"{which}.json")
    try:
        info = device_info(which)
    except DeviceError:
        if which is not None and has_gpu():
            raise
        return _read(SHIPPED / f"{DEFAULT}.json")
    own = cache_file(info)
    if own.exists():
        return _read(own)
    shipped = SHIPPED / f"{_short_name(info.name)}.json"
    return _read(shipped if shipped.exists() else SHIPPED / f"{DEFAULT}.json")


def _short_name(name: str) -> str:
    return name.lower().replace("nvidia", "").strip().replace(" ", "-")


def save_profile(profile: Profile, path: Path | None = None) -> Path:
    """Write a profile, atomically, to `path` or to this user's cache; returns where."""
    from filelock import FileLock

    path = path or cache_file(profile.info)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = {
        "format": FORMAT,
        "info": asdict(profile.info),
        "provenance": dict(sorted(profile.provenance.items())),
        "curves": {name: [list(p) for p in sorted(c)] for name, c in profile.curves.items()},
    }
    with FileLock(f"{path}.lock"):
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(text, file, indent=1, sort_keys=True)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    return path


def _read(path: Path) -> Profile:
    remedy = "delete it, or measure again: smkern bench ceilings --save"
    try:
        text: dict[str, Any] = json.loads(path.read_text())
        if text["format"] != FORMAT:
            raise ProfileError(f"{path} has format {text['format']}, not {FORMAT}: {remedy}")
        info = text["info"]
        info["capability"] = tuple(info["capability"])
        curves = {
            name: tuple(sorted((int(sms), float(value)) for sms, value in points))
            for name, points in text["curves"].items()
        }
        return Profile(DeviceInfo(**info), curves, text["provenance"])
    except FileNotFoundError:
        known = ", ".join(sorted(p.stem for p in SHIPPED.glob("*.json")))
        raise ProfileError(f"no profile {path.name}; shipped are: {known}") from None
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        if isinstance(error, ProfileError):
            raise
        raise ProfileError(f"{path} is corrupt ({error!r}): {remedy}") from error
