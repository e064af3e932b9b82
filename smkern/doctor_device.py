"""`smkern doctor`'s findings that need no launch: a GPU's facts, ceilings, rungs and tables."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import smkern
from smkern.device import Budget, DeviceInfo
from smkern.errors import SmkernError
from smkern.partition.plan import plan_ladder
from smkern.profile import Profile, nearest, outdated, package_version

Status = Literal["ok", "note", "absent", "failed"]
MEASURE = "smkern bench ceilings --save"
TUNE = "smkern autotune --model <name>"
CHECK = f"{TUNE} --check says whether they still hold"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    section: str
    name: str
    status: Status
    detail: str


def device_findings(info: DeviceInfo, index: int | None) -> Iterator[Finding]:
    """One finding each: facts, driver, ceilings, default ladder, what this architecture lacks.

    Args:
        info: facts of the GPU.
        index: GPU index; None: the current GPU.
    """
    yield Finding("GPU", "facts", "ok", facts(info))
    yield Finding("GPU", "driver", "ok", f"{info.driver}, CUDA {info.cuda}")
    for section, name, check in (
        ("GPU", "ceilings", lambda: ceilings(index)),
        ("GPU", "ladder", lambda: ("note", str(plan_ladder(info)))),
        ("Kernels", f"on {_sm(info.capability)}", lambda: kernels(info)),
    ):
        yield tried(section, name, check)


def tried(section: str, name: str, check: Callable[[], tuple[Status, str]]) -> Finding:
    """The check's finding, or its error as one: a broken part must not hide the others."""
    try:
        return Finding(section, name, *check())
    except Exception as error:  # noqa: BLE001
        return Finding(section, name, "failed", f"{type(error).__name__}: {error}")


def facts(info: DeviceInfo) -> str:
    """The device's facts, and those that it does not report."""
    memory = f"{info.memory_bytes / 1e9:.0f} GB at "
    if info.memory_tbps:
        memory += f"{info.memory_tbps:.2f} TB/s in theory"
        memory += ", this slice's share of the chip's" if info.is_slice else ""
    else:
        memory += "a rate that neither the driver nor NVML tells"
    rate = f"{info.flops_per_clock:,} bf16 FLOPs per SM and clock"
    if info.known_as != info.capability:
        rate += f" ({_sm(info.known_as)}'s: {_sm(info.capability)}'s is not known)"
    sms = f"{info.num_sms} SMs in steps of {info.sm_granularity} (at least {info.min_sms})"
    return (
        f"{info.name}: {_sm(info.capability)}, {sms}, {info.sm_clock_mhz} MHz, {rate}, {memory}, "
        f"{info.l2_bytes / 2**20:.0f} MiB of L2"
    )


def ceilings(index: int | None) -> tuple[Status, str]:
    """The source of the profile that dispatch uses, and its ceilings on all SMs."""
    profile = smkern.load_profile(index)
    total = profile.info.num_sms
    text = (
        f"{profile.bandwidth(total):.2f} TB/s, {profile.flops(total):.0f} TFLOP/s on all {total} "
        "SMs"
    )
    if outdated(profile.info) and profile.source != "measured":
        text += " (one measured here with another driver, torch or Triton is not used)"
    if profile.source == "scaled":
        return "note", f"scaled from {profile.measured_on}'s: {text}; measure them: {MEASURE}"
    where = "on this machine" if profile.source == "measured" else "by smkern's authors"
    return "ok", f"{profile.source}, measured {where} on {profile.measured_on}: {text}"


def kernels(info: DeviceInfo) -> tuple[Status, str]:
    """Which kernels run on this architecture, and which do not."""
    if info.capability < (8, 0):
        return "absent", "smkern's kernels need sm_80 or later; CPU tensors run the reference"
    if info.capability[0] == 11:
        return "absent", "Triton 3.6 compiles nothing for sm_110; CPU tensors run the reference"
    from smkern.tuning import constraints
    from smkern.tuning.attention.constraints import served_by
    from smkern.tuning.attention.shapes import AttentionProblem, AttentionShape
    from smkern.tuning.config import GemmConfig, GemmProblem

    budget = Budget(info.num_sms, "mask")
    gemm = [
        kernel
        for kernel in constraints.AVAILABLE
        if constraints.runs_on_device(
            GemmProblem(64, 4096, 4096), GemmConfig(kernel, 128, 128, 64), budget, info.capability
        )
    ]
    shape = AttentionShape(1, 32, 8, 128, 16, 1, 4096, 1, 4096)
    attention = served_by(AttentionProblem(shape), budget, info.capability)
    missing = [f"{kernel} GEMM" for kernel in constraints.AVAILABLE if kernel not in gemm]
    missing += [] if attention == "cuda" else ["CUDA attention"]
    runs = f"GEMM by {', '.join(gemm)}; attention by {attention}"
    if info.capability[0] == 10:
        missing.append("e4m3 GEMMs that are faster than bf16's")
    if not missing:
        return "ok", f"{runs}; nothing is missing"
    return "note", f"{runs}; missing here: {', '.join(missing)}"


def table_findings(info: DeviceInfo) -> Iterator[Finding]:
    """One finding per table of a GPU (shipped and the user's own), for the cost model and for the
    latency tables."""
    from smkern.tuning.cells import shipped_path, user_path
    from smkern.tuning.families import FAMILIES

    gpu, profile = info.name, Profile(info, {})  # what is legal follows from the facts alone
    here = package_version("triton")
    for name, path_of in (("shipped", shipped_path), ("your own", user_path)):
        counts: dict[str, int] = {}
        dates: list[str] = []
        tuned_with: set[str] = set()
        models = ""
        for family in FAMILIES:
            try:
                found = family.cells_of(path_of(gpu, family.name), profile)
            except SmkernError as error:
                yield Finding("Tuned tables", f"{name}, {family.name}", "failed", str(error))
                continue
            if found.cells:
                counts[family.name] = len(found.cells)
                dates.append(str(found.meta.get("date", "?"))[:10])
                tuned_with.add(str(found.meta.get("triton", "?")))
            if family.name == "gemm":
                part = {(key.n, key.k) for key in found.cells if key.num_sms < info.num_sms}
                models = ", ".join(_models_of(part))
        if counts:
            cells = ", ".join(f"{family} {count:,}" for family, count in counts.items())
            detail = f"{cells} cells for {gpu} ({models or 'no whole model'}), up to {max(dates)}"
            if other := sorted(tuned_with - {here}):
                detail += f"; tuned with Triton {', '.join(other)}, this is {here}: {CHECK}"
            yield Finding("Tuned tables", name, "note" if other else "ok", detail)
        else:
            remedy = "" if name == "shipped" else f"; to tune: {TUNE}"
            detail = f"none for {gpu}{remedy}"
            yield Finding("Tuned tables", name, "absent", detail)
    yield tried("Tuned tables", "cost model", partial(_cost_model, info))
    yield tried("Tuned tables", "step times", partial(_latency_tables, info))


def _cost_model(info: DeviceInfo) -> tuple[Status, str]:
    """Where the constants of the GEMMs' cost model were fitted."""
    from smkern.tuning.cost_constants import DEFAULTS, load_constants

    gpu = info.name
    if load_constants(gpu) is not DEFAULTS:
        return "ok", f"constants fitted on {gpu}"
    is_near = load_constants(gpu, info.capability) is not DEFAULTS
    near = "those of an H200" if is_near else "defaults"
    return "note", f"constants are {near}: none were fitted on {gpu}"


def _latency_tables(info: DeviceInfo) -> tuple[Status, str]:
    """Which ones say how long launches take there, and whether they still hold."""
    from smkern.latency.stamp import kernels_hash
    from smkern.latency.table import read_timings, shipped, shipped_path

    gpu, measure = info.name, "measure: smkern profile --model <name>"
    if not (models := shipped(gpu)):
        near = nearest(info)[0].info.name
        return "note", f"none for {gpu}: predicted from {near}'s by its ceilings, or {measure}"
    tables = {model: read_timings(shipped_path(model, gpu)) for model in models}
    stale = [
        model
        for model, (cells, sizes) in tables.items()
        if cells.meta.get("kernels") not in (None, kernels_hash(gpu, sizes))
    ]
    detail = f"{', '.join(models)} for {gpu}; other models predicted from these"
    if stale:
        others = "; of other kernels or tables (smkern autotune's included) than these: "
        detail += f"{others}{', '.join(stale)}, {measure}"
    return "note" if stale else "ok", detail


def cache_findings() -> Iterator[Finding]:
    """One finding each for smkern's and Triton's cache folders; both can be deleted any time."""
    from platformdirs import user_cache_path

    home = Path(os.environ.get("TRITON_HOME") or os.path.expanduser("~"))
    triton = os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache"
    for name, folder in (("smkern", user_cache_path("smkern")), ("triton", Path(triton))):
        yield tried("Caches", name, partial(_held, folder))


def _held(folder: Path) -> tuple[Status, str]:
    sizes = []
    for place, _, names in os.walk(folder):  # leaves out folders that cannot be listed
        for name in names:
            with suppress(OSError):  # compilers beside this remove their temporary files
                found = os.stat(Path(place) / name)
                if stat.S_ISREG(found.st_mode):
                    sizes.append(found.st_size)
    held = f"{len(sizes):,} files, {sum(sizes) / 1e6:.1f} MB" if sizes else "nothing yet"
    return "note", f"{folder}: {held}"


def _models_of(weights: set[tuple[int, int]]) -> Iterator[str]:
    """The model presets with all layers' GEMMs among these (n, k)."""
    from smkern.latency.cost import Load, kernels_of
    from smkern.models.presets import presets

    for name, config in presets().items():
        layers = kernels_of(config, Load(1, 0, 1, 1), l2_bytes=0)
        products = {(k.product.n, k.product.k) for k in layers if k.product is not None}
        if config.quantization is None and products and products <= weights:
            yield name


def _sm(capability: tuple[int, int]) -> str:
    return f"sm_{capability[0]}{capability[1]}"
