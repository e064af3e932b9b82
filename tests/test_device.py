"""Facts of a GPU: what the driver and NVML tell, what follows from them, and what nobody tells."""

from ctypes import CDLL
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import smkern
from smkern import device
from smkern.device import ASSUMED_CLOCK_MHZ, Chip, DeviceInfo, device_info, gpu_folder, torch_device
from smkern.errors import DeviceError
from smkern.kv import KvPool, KvSizes
from smkern.models import ActivationBuffers, Weights, preset
from smkern.ops import Rope
from smkern.partition import budget_of_stream, current_budget
from tests import gpus

H200 = {"CLOCK_RATE": 1_980_000, "MEMORY_CLOCK_RATE": 3_201_000, "GLOBAL_MEMORY_BUS_WIDTH": 6016}
GIB = 1 << 30


@pytest.fixture
def facts(monkeypatch):
    """facts(name, sms, capability, memory, driver's attributes, NVML's): a device's facts."""

    def of(name, num_sms, capability, memory, told, nvml=None) -> DeviceInfo:
        major, minor = capability
        found = SimpleNamespace(
            name=name, multi_processor_count=num_sms, major=major, minor=minor,
            L2_cache_size=60 << 20, total_memory=memory, uuid="8c17da9a",
        )  # fmt: skip

        def by_nvml(uuid: str) -> Chip:
            assert nvml is not None, "NVML is asked although the driver tells all"
            assert uuid == "8c17da9a"
            return nvml

        monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
        monkeypatch.setattr("torch.cuda.get_device_properties", lambda index: found)
        monkeypatch.setattr(device, "_attribute", lambda attribute, index: told.get(attribute, 0))
        monkeypatch.setattr(device, "_chip_by_nvml", by_nvml)
        return device._facts.__wrapped__(0)

    return of


def test_the_driver_tells_all_of_a_whole_gpu(facts):
    found = facts("NVIDIA H200", 132, (9, 0), 140 * GIB, H200)
    assert (found.sm_clock_mhz, found.memory_tbps) == (1980, 4.814)
    assert (found.name, found.num_sms, found.capability) == ("NVIDIA H200", 132, (9, 0))
    assert not found.is_slice


@pytest.mark.parametrize("missing", H200)
def test_nvml_tells_what_the_driver_does_not(facts, missing):
    told = {name: value for name, value in H200.items() if name != missing}
    nvml = Chip(1_980_000, 3_201_000, 6016, 141 * GIB)
    assert facts("NVIDIA H200", 132, (9, 0), 140 * GIB, told, nvml) == facts(
        "NVIDIA H200", 132, (9, 0), 140 * GIB, H200
    )


def test_what_neither_tells_is_unknown_and_a_clock_is_assumed(facts):
    found = facts("Some GPU", 40, (9, 0), 8 * GIB, {}, Chip())
    assert (found.sm_clock_mhz, found.memory_tbps) == (ASSUMED_CLOCK_MHZ, 0.0)


@pytest.mark.parametrize(("gib", "eighths"), [(16.2, 1), (33, 2), (66, 4), (139, 8), (2, 1)])
def test_a_slice_has_its_share_of_the_memorys_bandwidth(facts, gib, eighths):
    """The driver tells it the clock and the bus of the whole chip."""
    nvml = Chip(1_980_000, 3_201_000, 6016, int(140.4 * GIB))
    found = facts("NVIDIA H200 MIG 1g.18gb", 16, (9, 0), int(gib * GIB), H200, nvml)
    assert found.is_slice
    assert found.memory_tbps == pytest.approx(4.814 * eighths / 8, abs=1e-3)


def test_a_slice_whose_chip_nobody_tells_has_no_bandwidth(facts):
    found = facts("NVIDIA H200 MIG 1g.18gb", 16, (9, 0), 16 * GIB, H200, Chip())
    assert (found.memory_tbps, found.sm_clock_mhz) == (0.0, 1980)


def test_without_nvml_or_a_driver_nothing_is_told():
    assert device._chip_by_nvml("8c17da9a") == Chip()
    assert device._attribute("NO_SUCH_ATTRIBUTE", 0) == 0


@pytest.mark.parametrize(
    ("info", "flops"),
    [
        (gpus.H200, 4096),
        (gpus.H100_PCIE, 4096),
        (gpus.H20, 1024),
        (gpus.A100, 2048),
        (gpus.L40S, 1024),
        (gpus.B200, 8192),
        (gpus.SLICE, 4096),
        (gpus._gpu("NVIDIA A10", 72, (8, 6), 1695, 24, 6, 0.6), 1024),
        (gpus._gpu("NVIDIA GeForce RTX 3090", 82, (8, 6), 1695, 24, 6, 0.936), 512),
        (gpus._gpu("NVIDIA GeForce RTX 4090", 128, (8, 9), 2520, 24, 72, 1.008), 512),
        (gpus._gpu("NVIDIA GeForce RTX 5090", 170, (12, 0), 2407, 32, 96, 1.792), 512),
        (gpus._gpu("NVIDIA B300", 148, (10, 3), 1920, 270, 126, 8.0), 8192),
        (gpus.UNKNOWN, 8192),
        (gpus._gpu("Tesla V100", 80, (7, 0), 1530, 32, 6, 0.9), 1024),
    ],
    ids=lambda value: gpus.by_name(value) if isinstance(value, DeviceInfo) else "",
)
def test_flops_of_an_sm_and_clock(info, flops):
    assert info.flops_per_clock == flops


@pytest.mark.parametrize(
    ("capability", "known"),
    [
        ((9, 0), (9, 0)),
        ((8, 7), (8, 6)),
        ((10, 3), (10, 0)),
        ((11, 0), (10, 0)),
        ((13, 1), (10, 0)),
    ],
)
def test_an_unknown_capability_says_whose_rate_it_takes(capability, known):
    assert gpus._gpu("x", 1, capability, 1, 1, 1, 1.0).known_as == known


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("NVIDIA H200", "h200"),
        ("h200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("NVIDIA H200 MIG 1g.18gb", "h200-mig-1g.18gb"),
        ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090"),
        ("../../etc/passwd", "etc-passwd"),
        ("", "unknown"),
        (" NVIDIA ", "unknown"),
    ],
)
def test_a_gpus_folder(name, folder):
    assert gpu_folder(name) == folder


@given(st.text("NVIDIAnvidia H200./\\-_\t\n\0é漢"))
def test_a_gpus_folder_is_one_and_its_own_name(name):
    folder = gpu_folder(name)
    assert folder not in ("", ".", "..")
    assert not set(folder) & set("/\\ ")
    assert gpu_folder(folder) == folder


@pytest.mark.parametrize("index", ["cuda:0", 0.0, torch.device("cuda", 0), torch.tensor(0)])
def test_what_is_no_index_of_a_gpu_is_named(monkeypatch, index):
    gpus.install(monkeypatch, gpus.H200)
    with pytest.raises(DeviceError, match="is no GPU's index: give a whole number from 0 to 0"):
        device_info(index)
    with pytest.raises(DeviceError, match="is no GPU's index"):
        smkern.ladder([16], device=index)


@pytest.mark.parametrize("index", [-1, 1, 99])
def test_a_gpu_that_is_not_there(monkeypatch, index):
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(DeviceError, match=f"no GPU {index}: this machine has 0 to 0"):
        device_info(index)


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


SIZES = KvSizes(1, num_kv_heads=1, head_dim=64)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Weights.random(preset("qwen3-8b"), device="cuda"),
        lambda: Weights.from_tensors(preset("qwen3-8b"), {}, device="cuda:0"),
        lambda: ActivationBuffers(preset("qwen3-8b"), max_tokens=4, device=torch.device("cuda")),
        lambda: KvPool(SIZES, num_pages=8),
        lambda: Rope(64).table(8, "cuda"),
        lambda: smkern.LLM("qwen3-8b", device="cuda"),
        lambda: smkern.CudaDevice(),
        lambda: smkern.ladder(),
        lambda: smkern.split(decode=32, backend="grid"),
        smkern.current_num_sms,
        current_budget,
        lambda: budget_of_stream(0, 0),
        lambda: smkern.warmup(["gemm"], shapes=[(64, 64)]),
        device_info,
        lambda: torch_device("cuda"),
    ],
)
def test_whoever_takes_a_device_says_that_there_is_no_gpu(no_gpu, make):
    with pytest.raises(DeviceError, match=r"no GPU.*CPU tensors|no GPU.*explain_gemm"):
        make()


def test_a_device_for_tensors(monkeypatch, no_gpu):
    assert torch_device() == torch_device("cpu") == torch.device("cpu")
    with pytest.raises(DeviceError, match='device=\'gpu\': give "cpu", "cuda" or'):
        torch_device("gpu")
    gpus.install(monkeypatch, gpus.H200, gpus.A100)
    assert torch_device() == torch_device("cuda") == torch.device("cuda:0")
    assert torch_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(DeviceError, match="no GPU 2: this machine has 0 to 1"):
        torch_device("cuda:2")


@pytest.mark.parametrize("library", [None, "libcuda.so.none"])
def test_without_a_driver_torch_is_not_asked(monkeypatch, library):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(device, "CDLL", lambda _: CDLL(library))
    monkeypatch.setattr(device, "_has_driver", device._has_driver.__wrapped__)
    assert device.has_gpu() is (library is None)


def test_without_a_gpu_the_error_says_what_runs_anyway(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(DeviceError, match="CPU tensors"):
        device_info()
