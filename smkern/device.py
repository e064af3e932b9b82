"""Facts of one GPU, from the driver and NVML alone; measured rates are in `smkern.profile`.

Importing this loads neither torch nor the driver.
"""

from __future__ import annotations

import re
from ctypes import CDLL
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from smkern.errors import BudgetError, DeviceError
from smkern.limits import as_index, shown

if TYPE_CHECKING:
    import torch

Confinement = Literal["mask", "grid"]

ASSUMED_CLOCK_MHZ = 1500
"""SM clock assumed where neither the driver nor NVML reports one: models divide by it."""
NEWEST_KNOWN = (10, 0)
"""The newest data-centre GPU whose rate is known; newer ones are treated like it."""
SLOWEST_KNOWN = (8, 6)
_FLOPS_PER_CLOCK = {
    (8, 0): 2048,
    SLOWEST_KNOWN: 1024,
    (8, 9): 1024,
    (9, 0): 4096,
    NEWEST_KNOWN: 8192,
    (12, 0): 1024,
}
"""Dense bf16 FLOPs per SM and clock, summed in fp32, from NVIDIA's architecture papers."""
_H20 = re.compile(r"\bH20\b")
_H20_FLOPS_PER_CLOCK = 1024
"""H20: an sm_90 with tensor cores at a quarter of the rate, 148 TFLOP/s on 78 SMs."""


@dataclass(frozen=True, slots=True, order=True)
class Budget:
    """How many SMs a launch may use, what keeps it there, and whether clusters can launch.

    "mask": the hardware keeps the stream's work on these SMs (a green partition, or the whole
    device), so several CTAs may share an SM. "grid": only the number of CTAs keeps the budget.
    """

    num_sms: int
    confined: Confinement = "grid"
    clusters: bool = True

    def most_ctas(self, ctas_per_sm: int) -> int:
        """The most CTAs of a launch: `ctas_per_sm` per SM under a mask, else one per SM."""
        return self.num_sms * (ctas_per_sm if self.confined == "mask" else 1)


def check_budget(budget: Budget) -> None:
    """Raise BudgetError for a budget below one SM."""
    if budget.num_sms < 1:
        raise BudgetError(f"num_sms is {budget.num_sms}; give at least 1")


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """Facts of one GPU.

    Attributes:
        name: name reported by the driver; for a MIG slice it contains "MIG" and the profile.
        num_sms: SMs of the GPU or the MIG slice.
        capability: compute capability, (major, minor).
        sm_granularity: step in which partitions grow, SMs.
        min_sms: smallest partition, SMs.
        l2_bytes: size of the L2 cache, bytes.
        sm_clock_mhz: maximum SM clock, MHz; `ASSUMED_CLOCK_MHZ` where it is not reported.
        memory_bytes: memory that can be allocated, bytes.
        driver: driver version.
        cuda: CUDA version that torch was built for.
        memory_tbps: theoretical memory bandwidth, TB/s, for a MIG slice its share; 0.0 where
            neither the driver nor NVML reports it.
    """

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
    memory_tbps: float = 0.0

    @property
    def sm(self) -> int:
        """The capability as kernels are named by it: 90 and the like."""
        major, minor = self.capability
        return 10 * major + minor

    @property
    def flops_per_clock(self) -> int:
        """Dense bf16 FLOPs per SM and clock, summed in fp32.

        The capability decides, with two exceptions: a GeForce of sm_86, sm_89 or sm_120 sums in
        fp32 at half the rate of the data-centre and professional parts, and an H20's tensor cores
        run at a quarter of sm_90's rate. An unknown capability is treated like `known_as`.
        """
        if _H20.search(self.name):
            return _H20_FLOPS_PER_CLOCK
        rate = _FLOPS_PER_CLOCK[self.known_as]
        return rate // 2 if "GeForce" in self.name else rate

    @property
    def known_as(self) -> tuple[int, int]:
        """The capability whose rate `flops_per_clock` uses: the GPU's own where that is known.

        Otherwise the next lower one with the same major number, otherwise the newest known
        data-centre one. GPUs before sm_80, which have no bf16, are treated like the slowest known.
        """
        lower = [known for known in _FLOPS_PER_CLOCK if known <= self.capability]
        if not lower:
            return SLOWEST_KNOWN
        found = max(lower)
        return found if found[0] == self.capability[0] else NEWEST_KNOWN

    @property
    def is_slice(self) -> bool:
        """Whether this is a MIG slice of a GPU."""
        return _is_slice(self.name)


def _is_slice(name: str) -> bool:
    return "MIG" in name.split()


def gpu_folder(name: str) -> str:
    """The folder or file name for a GPU's profiles, tables, results and timings.

    Lower case, without "nvidia", runs of anything but letters, digits and points as one hyphen:
    "NVIDIA H200" is `h200`, "NVIDIA H100 80GB HBM3" `h100-80gb-hbm3`. Idempotent.
    """
    words = re.findall(r"[a-z0-9.]+", name.lower())
    return "-".join(word for word in words if word != "nvidia" and word.strip(".")) or "unknown"


def has_gpu() -> bool:
    """Whether torch sees a GPU here; it is not loaded to ask where there is no driver."""
    if not _has_driver():
        return False
    import torch

    return torch.cuda.is_available()


@cache
def _has_driver() -> bool:
    try:
        CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def device_info(index: int | None = None) -> DeviceInfo:
    """Facts of a GPU of this machine.

    Args:
        index: GPU index; torch's current GPU by default.

    Raises:
        DeviceError: no GPU, no driver, or no GPU with that index.
    """
    return _facts(_gpu(index))


def torch_device(device: torch.device | str | None = None) -> torch.device:
    """A device for tensors, checked to exist; a GPU always has its index.

    Args:
        device: as torch takes it ("cpu", "cuda", "cuda:1"); by default the current GPU, or the CPU
            where there is none.

    Raises:
        DeviceError: torch does not see the GPU, or this is not the name of a device.
    """
    import torch

    if device is None:
        device = "cuda" if has_gpu() else "cpu"
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise DeviceError(
            f'device={shown(device)}: give "cpu", "cuda" or "cuda:<index>"'
        ) from error
    return torch.device("cuda", _gpu(place.index)) if place.type == "cuda" else place


def _gpu(index: int | None) -> int:
    """The index of an existing GPU; torch's current one by default."""
    import torch

    if not has_gpu():
        raise DeviceError(
            "torch sees no GPU: partitions and kernels need one (sm_80 or later, driver 550 or "
            "later for green contexts). Without one operators take CPU tensors, pools and models "
            'device="cpu", and policies are simulated'
        )
    if index is None:
        return torch.cuda.current_device()
    count = torch.cuda.device_count()
    try:
        index = as_index(index)
    except TypeError:
        raise DeviceError(
            f"{shown(index)} is no GPU's index: give a whole number from 0 to {count - 1}"
        ) from None
    if not 0 <= index < count:
        raise DeviceError(f"no GPU {index}: this machine has 0 to {count - 1}")
    return index


_ATTRIBUTES = ("CLOCK_RATE", "MEMORY_CLOCK_RATE", "GLOBAL_MEMORY_BUS_WIDTH")


@dataclass(frozen=True, slots=True)
class Chip:
    """Clocks, bus and memory of a whole chip, even for a MIG slice of it; 0 where not reported.

    The first three are the driver's `_ATTRIBUTES`; only NVML reports `memory_bytes`.
    """

    sm_clock_khz: int = 0
    memory_clock_khz: int = 0
    bus_bits: int = 0
    memory_bytes: int = 0

    def completed(self, is_slice: bool, uuid: str) -> Chip:
        """With gaps filled in from NVML; a slice also needs its chip's memory size."""
        if not is_slice and self.sm_clock_khz and self.memory_clock_khz and self.bus_bits:
            return self
        other = _chip_by_nvml(uuid)
        return Chip(*(mine or its for mine, its in zip(astuple(self), astuple(other), strict=True)))


@cache
def _facts(index: int) -> DeviceInfo:
    import torch

    facts = torch.cuda.get_device_properties(index)
    major, minor = facts.major, facts.minor
    step = 2 if major >= 9 else 4 if (major, minor) >= (8, 0) else 2
    told = Chip(*(_attribute(name, index) for name in _ATTRIBUTES))
    chip = told.completed(_is_slice(facts.name), str(getattr(facts, "uuid", "")))
    return DeviceInfo(
        name=facts.name,
        num_sms=facts.multi_processor_count,
        capability=(major, minor),
        sm_granularity=step,
        min_sms=step,
        l2_bytes=facts.L2_cache_size,
        sm_clock_mhz=chip.sm_clock_khz // 1000 or ASSUMED_CLOCK_MHZ,
        memory_bytes=facts.total_memory,
        driver=driver_version(),
        cuda=torch.version.cuda or "unknown",
        memory_tbps=_memory_tbps(chip, facts.name, facts.total_memory),
    )


def _attribute(name: str, index: int) -> int:
    """A device attribute from the driver; 0 where it is not reported."""
    try:
        from cuda.bindings import driver

        attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        code, value = driver.cuDeviceGetAttribute(attribute, index)
    except (ImportError, AttributeError, RuntimeError):
        return 0
    return int(value) if int(code) == 0 else 0


def nvml_of(index: int) -> tuple[Any, Any]:
    """NVML, and its handle of a torch device that is no slice; raises whatever NVML raises."""
    import torch
    from cuda.bindings import nvml

    nvml.init_v2()
    uuid = torch.cuda.get_device_properties(index).uuid
    return nvml, nvml.device_get_handle_by_uuid(f"GPU-{uuid}")


def _chip_by_nvml(uuid: str) -> Chip:
    """The chip of a device or of a MIG slice; all zeros without NVML."""
    try:
        from cuda.bindings import nvml

        nvml.init_v2()
        try:
            handle = nvml.device_get_handle_by_uuid(f"GPU-{uuid}")
        except nvml.NvmlError:
            part = nvml.device_get_handle_by_uuid(f"MIG-{uuid}")
            handle = nvml.device_get_device_handle_from_mig_device_handle(part)
        clocks = nvml.ClockType
        return Chip(
            1000 * nvml.device_get_max_clock_info(handle, clocks.CLOCK_SM),
            1000 * nvml.device_get_max_clock_info(handle, clocks.CLOCK_MEM),
            nvml.device_get_memory_bus_width(handle),
            nvml.device_get_memory_info_v2(handle).total,
        )
    except Exception:  # noqa: BLE001  NVML has many error classes; all mean: no data
        return Chip()


def _memory_tbps(chip: Chip, name: str, memory_bytes: int) -> float:
    """Two transfers per clock over the whole bus; a slice gets its share, in eighths of the memory.

    For a slice the driver reports the clock and the bus of the whole chip.
    """
    tbps = 2 * chip.memory_clock_khz * chip.bus_bits / 8 / 1e9
    if _is_slice(name):
        if not chip.memory_bytes:
            return 0.0
        tbps *= max(1, round(8 * memory_bytes / chip.memory_bytes)) / 8
    return round(tbps, 3)


def driver_version() -> str:
    """The driver's version, as its kernel module reports it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    words = text.split("\n")[0].split()
    numbers = [word for word in words if word.count(".") >= 1 and word[0].isdigit()]
    return numbers[0] if numbers else "unknown"
