"""Bandwidth and FLOP rate of a GPU by SM count: measured here, shipped, or scaled from another GPU.

Importing this loads neither torch nor the driver.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from math import log
from pathlib import Path
from typing import Any, Literal

from smkern.atomic import LOCK_S, make_folder, read_whole, write_whole
from smkern.device import Confinement, DeviceInfo, device_info, gpu_folder, has_gpu
from smkern.errors import DeviceError, ProfileError
from smkern.strict_json import parse

Placement = Literal["spread", "default"]
Source = Literal["measured", "shipped", "scaled"]
Curve = Sequence[tuple[int, float]]

FORMAT = 1
SHIPPED = Path(__file__).parent / "profiles"
DEFAULT = "h200"
"""The shipped profile that a machine without a GPU plans for."""
MAX_RATE = 1e6
"""TB/s or TFLOP/s: above any GPU's."""
_REMEDY = "delete it, or measure again: smkern bench ceilings --save"


@dataclass(frozen=True, slots=True)
class Profile:
    """Bandwidth and FLOP rate of a GPU by SM count.

    Args:
        info: facts of this GPU, wherever the curves come from.
        curves: name to points (SMs, value), sorted: `bandwidth_tbps_<placement>_<alone or beside>`,
            `flops_tflops_<placement>_<alone or beside>`.
        provenance: driver, versions, date and command of the measurement.
        source: "measured" on this machine, "shipped" for exactly this GPU, or "scaled" from the
            nearest GPU with a shipped profile.
        measured_on: name of the GPU that the curves were measured on; this one by default.
    """

    info: DeviceInfo
    curves: Mapping[str, Curve]
    provenance: Mapping[str, str] = field(default_factory=dict)
    source: Source = "measured"
    measured_on: str = ""
    _known: dict[tuple[str, int, Placement, bool], float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Values of the curves that were asked for."""

    def __post_init__(self) -> None:
        if not self.measured_on:
            object.__setattr__(self, "measured_on", self.info.name)

    def bandwidth(
        self,
        num_sms: int,
        *,
        confined: Confinement = "mask",
        placement: Placement = "spread",
        beside: bool = False,
    ) -> float:
        """Read bandwidth of `num_sms` SMs, TB/s; never decreases as SMs are added.

        Args:
            num_sms: 1 to the device's SM count.
            confined: "grid" always uses the spread curve: a grid's CTAs land all over the device.
            placement: SMs spread over the GPCs (smkern's), or the driver's own groups.
            beside: while a matrix product runs on the complement.

        Raises:
            ProfileError: the device does not have that many SMs, or there is no such curve.
        """
        where = "spread" if confined == "grid" else placement
        return self._at("bandwidth_tbps", num_sms, where, beside)

    def flops(
        self, num_sms: int, *, placement: Placement = "spread", beside: bool = False
    ) -> float:
        """Dense bf16 rate of `num_sms` SMs, TFLOP/s: the tensor cores' peak, or what power allows.

        Args:
            num_sms: 1 to the device's SM count.
            placement: SMs spread over the GPCs (smkern's), or the driver's own groups.
            beside: while the complement reads memory.

        Raises:
            ProfileError: the device does not have that many SMs, or there is no such curve.
        """
        peak = 1e-6 * self.info.flops_per_clock * self.info.sm_clock_mhz * num_sms
        return min(peak, self._at("flops_tflops", num_sms, placement, beside))

    def _at(self, what: str, num_sms: int, placement: Placement, beside: bool) -> float:
        asked = what, num_sms, placement, beside
        found = self._known.get(asked)
        if found is None:
            found = self._known[asked] = self._read(*asked)
        return found

    def _read(self, what: str, num_sms: int, placement: Placement, beside: bool) -> float:
        total = self.info.num_sms
        if not 1 <= num_sms <= total:
            raise ProfileError(
                f"num_sms={num_sms} is outside this profile of {self.info.name}: take 1 to {total}"
            )
        when = "beside" if beside else "alone"
        for name in (f"{what}_{placement}_{when}", f"{what}_spread_{when}", f"{what}_spread_alone"):
            if self.curves.get(name):
                return _interpolate(self.curves[name], num_sms)
        raise ProfileError(
            f"the profile of {self.info.name} has no curve {what}_{placement}_{when}; "
            "measure it: smkern bench ceilings --save"
        )


def _interpolate(curve: Curve, num_sms: float) -> float:
    """Linear between points, through the origin before the first, constant after the last.

    A point below an earlier one (an unlucky choice of SMs) is raised to the earlier one.
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


def scaled(info: DeviceInfo, known: Profile) -> Profile:
    """Estimated ceilings of a GPU that was not measured, from those of another.

    A single SM's bandwidth scales with its clock; all SMs together reach at most the known GPU's
    share of memory bandwidth. Matrix products scale with clock and FLOPs per clock: the same share
    of the SMs reaches the same share of the peak, as the power limit is unknown. Where memory
    bandwidth is not reported, bandwidth per SM is taken from the known GPU.

    Args:
        info: the GPU's facts.
        known: the profile to scale.

    Returns:
        Curves with a point for each of 1 to `info.num_sms` SMs.
    """
    theirs = known.info
    sms = info.num_sms / theirs.num_sms
    clock = info.sm_clock_mhz / theirs.sm_clock_mhz
    # both are known, or the same bandwidth per SM
    told = info.memory_tbps and theirs.memory_tbps
    memory = info.memory_tbps / theirs.memory_tbps if told else sms
    dense = sms * clock * info.flops_per_clock / theirs.flops_per_clock

    def at(name: str, curve: Curve, n: int) -> float:
        if name.startswith("bandwidth"):
            return memory * _interpolate(curve, n * clock / memory)
        return dense * _interpolate(curve, n / sms)

    counts = range(1, info.num_sms + 1)
    curves = {
        name: tuple((n, at(name, curve, n)) for n in counts) for name, curve in known.curves.items()
    }
    return Profile(info, curves, known.provenance, "scaled", theirs.name)


def load_profile(which: str | int | None = None) -> Profile:
    """The profile of a GPU of this machine, or a shipped one.

    Args:
        which: GPU index, the name of a shipped profile ("h200") or of this machine's GPU
            (`gpu_folder`), or None: the current GPU where there is one, else the shipped H200.

    Raises:
        ProfileError: no such profile, it is corrupt, or it belongs to another GPU.
        DeviceError: this machine has GPUs, but none with that index.

    Example:
        >>> import smkern
        >>> smkern.load_profile("h200").source
        'shipped'
    """
    if isinstance(which, str):
        path = SHIPPED / f"{which}.json"
        if not path.exists() and has_gpu() and gpu_folder(device_info().name) == which:
            return profile_for(device_info())
        return _read(path, "shipped")
    try:
        info = device_info(which)
    except DeviceError:
        if which is not None and has_gpu():
            raise
        return _read(SHIPPED / f"{DEFAULT}.json", "shipped")
    return profile_for(info)


def profile_for(info: DeviceInfo) -> Profile:
    """The profile of a GPU with these facts, which need not be present; its `info` is `info`.

    The user's own measurement comes first, then the profile shipped for exactly this GPU (name,
    capability and SMs), then the nearest shipped one, scaled.

    Raises:
        ProfileError: the user's own profile is corrupt, or belongs to another GPU or driver.
    """
    own = cache_file(info)
    if own.exists():
        return _of_this(_read(own, "measured"), info, own)
    near = nearest(info)[0]
    if _identity(near.info) == _identity(info):
        return replace(near, info=info)
    return scaled(info, near)


def nearest(info: DeviceInfo) -> list[Profile]:
    """The shipped profiles: this GPU's first, if there is one, then of those most like it."""
    shipped = [_read(path, "shipped") for path in sorted(SHIPPED.glob("*.json"))]
    return sorted(shipped, key=lambda known: _distance(info, known.info))


def _identity(info: DeviceInfo) -> tuple[str, int, tuple[int, int]]:
    return info.name, info.num_sms, info.capability


def _distance(info: DeviceInfo, known: DeviceInfo) -> tuple[bool, bool, bool, float, bool]:
    """Another name or architecture is farther than any difference in SMs, or in memory for each."""
    is_other = _identity(info) != _identity(known)
    far = abs(log(info.num_sms / known.num_sms))
    if info.memory_tbps and known.memory_tbps:
        far += abs(log(info.memory_tbps / info.num_sms / known.memory_tbps * known.num_sms))
    is_default = gpu_folder(known.name) == DEFAULT
    differs = is_other, info.name != known.name, info.capability != known.capability
    return (*differs, far, not is_default)


def _of_this(profile: Profile, info: DeviceInfo, path: Path) -> Profile:
    found = profile.info
    if (*_identity(found), found.driver) != (*_identity(info), info.driver):
        raise ProfileError(
            f"{path} was measured on {found.name!r} ({found.num_sms} SMs, driver {found.driver}), "
            f"and this is {info.name!r} ({info.num_sms} SMs, driver {info.driver}): {_REMEDY}"
        )
    return replace(profile, info=info)


def cache_file(info: DeviceInfo) -> Path:
    """Path of the user's own profile for this GPU, driver and software stack.

    The SM count is part of it: under an MPS active-thread percentage a GPU shows fewer SMs.
    """
    stack = [f"{name}-{package_version(name)}" for name in ("torch", "triton")]
    parts = [f"driver-{info.driver}", *stack]
    rest = "_".join("".join(c if c.isalnum() or c in ".-" else "-" for c in p) for p in parts)
    return _cache() / f"{_stem(info)}_{rest}.json"


def outdated(info: DeviceInfo) -> list[Path]:
    """The user's profiles of a GPU from another driver or stack, which are not used."""
    found = sorted(_cache().glob(f"{_stem(info)}_*.json"))
    return [path for path in found if path != cache_file(info)]


def _stem(info: DeviceInfo) -> str:
    return f"{gpu_folder(info.name)}_{info.num_sms}-sms"


def _cache() -> Path:
    from platformdirs import user_cache_path

    return user_cache_path("smkern") / "profiles"


def package_version(name: str) -> str:
    """The version of an installed package; "absent" where it is not."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"


def save_profile(profile: Profile, path: Path | None = None) -> Path:
    """Write a measured profile atomically to `path` or the user's cache; returns the path.

    Raises:
        ProfileError: the profile is scaled, and would be read back as measured.
    """
    from filelock import FileLock

    if profile.source == "scaled":
        raise ProfileError(
            f"this profile of {profile.info.name} is scaled from {profile.measured_on}'s and "
            "cannot be saved as measured; measure this GPU: smkern bench ceilings --save"
        )
    path = path or cache_file(profile.info)
    make_folder(path.parent)
    text = {
        "format": FORMAT,
        "info": asdict(profile.info),
        "provenance": dict(sorted(profile.provenance.items())),
        "curves": {name: [list(p) for p in sorted(c)] for name, c in profile.curves.items()},
    }
    with FileLock(f"{path}.lock", timeout=LOCK_S):
        write_whole(path, json.dumps(text, indent=1, sort_keys=True) + "\n")
    return path


def _read(path: Path, source: Source) -> Profile:
    try:
        text: dict[str, Any] = parse(read_whole(path))
        if text["format"] != FORMAT:
            raise ProfileError(f"{path} has format {text['format']}, not {FORMAT}: {_REMEDY}")
        info = text["info"]
        info["capability"] = tuple(info["capability"])
        curves = {
            name: tuple(sorted((int(sms), float(value)) for sms, value in points))
            for name, points in text["curves"].items()
        }
        for name, points in curves.items():
            if not points or not all(sms > 0 and 0 < value < MAX_RATE for sms, value in points):
                raise ValueError(f"{name} is empty, or has SMs or rates of 0 or less")
        return Profile(DeviceInfo(**info), curves, text["provenance"], source)
    except FileNotFoundError:
        known = ", ".join(sorted(p.stem for p in SHIPPED.glob("*.json")))
        raise ProfileError(
            f"no profile {path.name}; shipped are: {known}. A machine with another GPU has that "
            "one's too, scaled from these until it is measured: smkern bench ceilings --save"
        ) from None
    except OSError as error:
        raise ProfileError(f"{path} cannot be read ({error.strerror}): {_REMEDY}") from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, ProfileError):
            raise
        raise ProfileError(f"{path} is corrupt ({error!r}): {_REMEDY}") from error
