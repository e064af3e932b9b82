"""GPUs that this machine has not, as facts of them, and how to have smkern believe in some."""

from __future__ import annotations

from dataclasses import replace

import pytest

from smkern import device
from smkern.device import DeviceInfo
from smkern.errors import DeviceError


def _gpu(
    name: str, num_sms: int, capability: tuple[int, int], clock_mhz: int, gib: int, l2_mib: int,
    tbps: float,
) -> DeviceInfo:  # fmt: skip
    step = 2 if capability >= (9, 0) else 4
    return DeviceInfo(
        name, num_sms, capability, step, step, l2_mib << 20, clock_mhz, gib << 30,
        "580.159.04", "13.0", tbps,
    )  # fmt: skip


H200 = _gpu("NVIDIA H200", 132, (9, 0), 1980, 140, 60, 4.814)
H100 = _gpu("NVIDIA H100 80GB HBM3", 132, (9, 0), 1980, 80, 50, 3.352)
H100_PCIE = _gpu("NVIDIA H100 PCIe", 114, (9, 0), 1755, 80, 50, 2.039)
H20 = _gpu("NVIDIA H20", 78, (9, 0), 1980, 96, 60, 4.023)
A100 = _gpu("NVIDIA A100-SXM4-80GB", 108, (8, 0), 1410, 80, 40, 2.039)
L40S = _gpu("NVIDIA L40S", 142, (8, 9), 2520, 45, 96, 0.864)
B200 = _gpu("NVIDIA B200", 148, (10, 0), 1965, 178, 126, 7.992)
SLICE = _gpu("NVIDIA H200 MIG 1g.18gb", 16, (9, 0), 1980, 16, 8, 0.602)
TINY_SLICE = _gpu("NVIDIA A100-SXM4-40GB MIG 1g.5gb", 14, (8, 0), 1410, 5, 5, 0.194)
UNKNOWN = replace(
    _gpu("Some GPU of 2030", 200, (13, 1), 2500, 256, 200, 0.0), driver="unknown", cuda="unknown"
)


FOREIGN = (H100_PCIE, H20, A100, L40S, B200, SLICE, TINY_SLICE, UNKNOWN)
"""All that nothing is shipped for."""
PARTS = (replace(H200, num_sms=114), replace(H200, num_sms=100), replace(H100, num_sms=66))
"""Measured GPUs of which a process sees fewer SMs: by an MPS active-thread percentage."""


def nearest(info: DeviceInfo) -> DeviceInfo:
    """The measured GPU whose ceilings are scaled for one of `FOREIGN`: with about as much memory
    bandwidth an SM, where that is known."""
    return H100 if info in (H100_PCIE, A100, L40S, TINY_SLICE) else H200


def by_name(info: DeviceInfo) -> str:
    """The id of a test's parameter."""
    return device.gpu_folder(info.name)


def by_sms(info: DeviceInfo) -> str:
    """The same where names are alike."""
    return f"{by_name(info)}-{info.num_sms}"


def install(monkeypatch: pytest.MonkeyPatch, *gpus: DeviceInfo) -> None:
    """Have this machine be one with these GPUs, the first of them torch's current one."""

    def facts(index: int) -> DeviceInfo:
        if not 0 <= index < len(gpus):
            raise DeviceError(f"no GPU {index}: this machine has 0 to {len(gpus) - 1}")
        return gpus[index]

    monkeypatch.setattr(device, "_has_driver", lambda: True)
    monkeypatch.setattr(device, "_facts", facts)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(gpus))
