"""The doctor without a GPU, and before a fake one that works or does not."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from shutil import rmtree
from types import SimpleNamespace

import pytest
import torch
import triton
from click.testing import CliRunner
from rich.console import Console

import smkern
from smkern import doctor, doctor_device
from smkern.device import DeviceInfo
from smkern.doctor import Finding, Report
from smkern.doctor_device import table_findings
from smkern.doctor_peers import peers
from smkern.errors import ConfinementError, DeviceError
from smkern.profile import Profile, cache_file, load_profile, save_profile
from smkern.tuning.cells import PROVENANCE, user_path
from smkern.tuning.config import Budget, GemmConfig, GemmProblem
from smkern.tuning.select import GEMM_FAMILY
from smkern.tuning.table import Cell, CellKey
from tests.gpus import A100, B200, FOREIGN, H100, H200, TINY_SLICE, install, nearest
from tests.gpus import by_name as named

pytestmark = pytest.mark.slow


@dataclass
class FakePartition:
    num_sms: int
    clusters: bool
    outside: bool = False
    verified: int = 0
    closed: bool = False

    def verify(self) -> None:
        self.verified += 1
        if self.outside:
            raise ConfinementError(f"a CTA ran on SM 131, outside the {self.num_sms} granted")

    def __enter__(self) -> FakePartition:
        return self

    def __exit__(self, *_: object) -> None: ...


@pytest.fixture(autouse=True)
def _no_user_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(index: int | None = None) -> DeviceInfo:
        raise DeviceError("no GPU: the driver was not found; install one to launch anything")

    monkeypatch.setattr(smkern, "device_info", absent, raising=False)


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    made: list[FakePartition] = []
    state = SimpleNamespace(made=made, outside_on=None)

    @contextmanager
    def ladder(
        decode_sms: list[int], *, device: int | None = None, **options: object
    ) -> Iterator[SimpleNamespace]:
        (decode,) = decode_sms
        outside = options.get("backend") == state.outside_on
        rest = smkern.device_info(device).num_sms - decode
        sides = FakePartition(decode, False, outside), FakePartition(rest, True)
        made.extend(sides)
        split = SimpleNamespace(decode=sides[0], prefill=sides[1])
        try:
            yield SimpleNamespace(split=lambda *, decode: split)
        finally:
            for side in sides:
                side.closed = True

    install(monkeypatch, H200)
    monkeypatch.setattr(smkern, "ladder", ladder, raising=False)
    monkeypatch.setattr(smkern, "current_num_sms", lambda device=None: 16, raising=False)
    monkeypatch.setattr(doctor, "_gemm", lambda info, device: "77x768x1024, relative error 2e-3")
    yield state
    assert all(partition.closed for partition in made)


def by_name(report: Report) -> dict[str, Finding]:
    return {finding.name: finding for finding in report.findings}


@pytest.mark.usefixtures("no_gpu")
def test_without_gpu_exits_0_and_says_what_runs() -> None:
    result = CliRunner().invoke(doctor.command)
    assert result.exit_code == 0, result.output
    assert "No usable GPU here. What runs anyway:" in result.output
    assert "Triton's interpreter" in result.output
    assert "the driver was not found" in " ".join(result.output.split())


@pytest.mark.usefixtures("no_gpu")
def test_without_gpu_operators_are_tried_on_cpu_tensors() -> None:
    found = by_name(doctor.examine())
    assert found["device"].status == "absent"
    assert found["gemm on CPU tensors"].status == "ok"


@pytest.mark.usefixtures("no_gpu")
def test_it_says_whether_cutlass_was_built(monkeypatch, tmp_path) -> None:
    for name in ("XDG_CACHE_HOME", "TRITON_CACHE_DIR"):  # not what this machine has
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setattr(doctor.cpp_build, "absent", lambda: "no nvcc on the PATH")
    assert by_name(doctor.examine())["nvidia-cutlass"].detail == "no nvcc on the PATH (not built)"
    monkeypatch.setattr(doctor.cpp_build, "built", lambda: "cutlass_gemm.so")
    assert "(built: cutlass_gemm.so)" in by_name(doctor.examine())["nvidia-cutlass"].detail


def test_with_gpu_every_backend_is_verified_on_both_sides(fake_gpu: SimpleNamespace) -> None:
    found = by_name(doctor.examine())
    for name in doctor.PARTITION_BACKENDS:
        assert found[name].status == "ok"
        assert "asked 16, got 16 + 116 SMs" in found[name].detail
        assert "clusters launch on: prefill" in found[name].detail
    assert [partition.verified for partition in fake_gpu.made] == [1] * 6
    assert found["on sm_90"].status == "ok"


def test_a_partition_that_leaks_fails_alone(fake_gpu: SimpleNamespace) -> None:
    fake_gpu.outside_on = "grid"
    report = doctor.examine()
    failed = [finding for finding in report.findings if finding.status == "failed"]
    assert [finding.name for finding in failed] == ["grid (no mask)"]
    assert "ConfinementError: a CTA ran on SM 131" in failed[0].detail
    assert CliRunner().invoke(doctor.command).exit_code == 1


@pytest.mark.usefixtures("no_gpu")
def test_a_corrupt_table_of_ones_own_is_found_out(tmp_path: Path) -> None:
    path = user_path("NVIDIA H200")
    assert path.is_relative_to(tmp_path)
    path.parent.mkdir(parents=True)
    path.write_text('{"format": "smkern-table", "cells": [')
    found = by_name(doctor.examine())["your own, gemm"]
    assert found.status == "failed"
    assert "half-written" in found.detail


@pytest.mark.usefixtures("no_gpu")
def test_a_table_of_ones_own_with_a_cell_that_cannot_run_is_found_out() -> None:
    key = CellKey.of(GemmProblem(64, 4096, 4096), Budget(32, "mask"))
    config = GemmConfig("ws", 64, 128, 64, num_stages=1)
    meta = dict.fromkeys(PROVENANCE, "x") | {"gpu": H200.name}
    GEMM_FAMILY.file(user_path(H200.name)).merge({key: Cell(config, 1.0, config, 1.0)}, meta)
    found = by_name(doctor.examine())["your own, gemm"]
    assert found.status == "failed"
    assert "it breaks has_stages" in found.detail


@pytest.mark.usefixtures("no_gpu")
def test_cache_folders_are_named_with_what_they_hold(tmp_path) -> None:
    (tmp_path / "kernels" / "abc").mkdir(parents=True)
    for name in ("one.cubin", "two.ptx"):
        (tmp_path / "kernels" / "abc" / name).write_bytes(bytes(100_000))
    found = [finding for finding in doctor.examine().findings if finding.section == "Caches"]
    assert [(one.name, one.detail) for one in found] == [
        ("smkern", f"{tmp_path / 'smkern'}: nothing yet"),
        ("triton", f"{tmp_path / 'kernels'}: 2 files, 0.2 MB"),
    ]


@pytest.mark.usefixtures("no_gpu")
def test_what_compilers_remove_meanwhile_is_left_out(tmp_path, monkeypatch) -> None:
    for name in ("abc", "tmp.pid_1"):
        (tmp_path / "kernels" / name).mkdir(parents=True)
        (tmp_path / "kernels" / name / "one.cubin").write_bytes(bytes(100_000))
    listed = os.scandir

    def removed(path=".") -> Iterator[os.DirEntry]:
        if str(path).endswith("tmp.pid_1"):
            rmtree(path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", removed)
    found = [one for one in doctor_device.cache_findings() if one.name == "triton"]
    assert [(one.status, one.detail) for one in found] == [
        ("note", f"{tmp_path / 'kernels'}: 1 files, 0.1 MB")
    ]


@pytest.mark.usefixtures("no_gpu")
def test_tritons_folder_follows_its_home(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR")
    monkeypatch.setenv("TRITON_HOME", str(tmp_path / "home"))
    found = [one.detail for one in doctor_device.cache_findings() if one.name == "triton"]
    assert found == [f"{triton.knobs.cache.dir}: nothing yet"]


@pytest.mark.usefixtures("no_gpu")
def test_constants_that_cannot_be_read_hide_nothing_else(tmp_path, monkeypatch) -> None:
    (tmp_path / "cost_model.json").write_text("{")
    monkeypatch.setattr(
        "smkern.tuning.cost_constants.shipped_path", lambda gpu, name: tmp_path / f"{name}.json"
    )
    gpu = replace(H200, name="NVIDIA H200 of this test")
    found = {one.name: one for one in table_findings(gpu)}
    assert found["cost model"].status == "failed"
    assert "holds no constants of the cost model" in found["cost model"].detail
    assert "step times" in found


def test_what_a_check_says_is_not_markup() -> None:
    out = StringIO()
    console = Console(file=out, width=120)
    report = Report((Finding("GPU", "device", "ok", "[80, 132] SMs"),), ("see [this]",))
    doctor.render(report, console)
    assert "[80, 132] SMs" in out.getvalue()
    assert "see [this]" in out.getvalue()


@pytest.mark.parametrize("info", [H200, H100, *FOREIGN], ids=named)
def test_every_gpu_is_examined_to_the_end(info, fake_gpu, monkeypatch) -> None:
    install(monkeypatch, info)
    report = doctor.examine()
    assert not report.failed
    found = by_name(report)
    assert f"{info.name}: sm_" in found["facts"].detail
    assert f"{info.num_sms} SMs in steps of {info.sm_granularity}" in found["facts"].detail
    assert f"on all {info.num_sms} SMs" in found["ceilings"].detail
    assert f"of the {info.num_sms} SMs of this {info.name}" in found["ladder"].detail
    assert "smkern autotune --model <name>" in found["your own"].detail
    if info in (H100, H200):
        assert found["ceilings"].status == found["shipped"].status == "ok"
        measured = f"shipped, measured by smkern's authors on {info.name}"
        assert measured in found["ceilings"].detail
        assert found["step times"].status == "ok"
        assert f"qwen3-8b-fp8 for {info.name}; other models predicted" in found["step times"].detail
        assert re.match(r"gemm [\d,]+, gemm_fp8 [\d,]+, attention \d", found["shipped"].detail)
    else:
        assert f"scaled from {nearest(info).name}'s" in found["ceilings"].detail
        assert "smkern bench ceilings --save" in found["ceilings"].detail
        assert found["shipped"].detail == f"none for {info.name}"
        predicted = f"predicted from {nearest(info).name}'s by its ceilings"
        assert predicted in found["step times"].detail


@pytest.mark.parametrize(
    ("info", "missing"),
    [
        (H100, "nothing is missing"),
        (A100, "missing here: ws GEMM, tma GEMM, CUDA attention"),
        (B200, "ws GEMM, CUDA attention, e4m3 GEMMs that are faster than bf16's"),
        (replace(B200, capability=(11, 0)), "Triton 3.6 compiles nothing for sm_110"),
    ],
    ids=lambda value: named(value) if isinstance(value, DeviceInfo) else "",
)
def test_what_an_architecture_lacks_is_named(info: DeviceInfo, missing: str) -> None:
    status, detail = doctor_device.kernels(info)
    assert missing in detail
    assert (status == "ok") == (info is H100)


def test_too_old_a_gpu_is_told_so() -> None:
    status, detail = doctor_device.kernels(replace(A100, capability=(7, 5)))
    assert (status, "sm_80 or later" in detail) == ("absent", True)


def test_a_slice_says_that_its_bandwidth_is_a_share() -> None:
    assert "this slice's share of the chip's" in doctor_device.facts(TINY_SLICE)


def test_what_nobody_tells_is_said() -> None:
    unknown = FOREIGN[-1]
    said = doctor_device.facts(unknown)
    assert "a rate that neither the driver nor NVML tells" in said
    assert "(sm_100's: sm_131's is not known)" in said


def test_the_gpu_asked_about_is_the_one_examined(fake_gpu, monkeypatch) -> None:
    install(monkeypatch, H200, A100)
    first, second = by_name(doctor.examine(0)), by_name(doctor.examine(1))
    assert "shipped, measured" in first["ceilings"].detail
    assert "on all 108 SMs" in second["ceilings"].detail
    assert f"none for {A100.name}" in second["shipped"].detail
    assert "on sm_80" in second
    ran = CliRunner().invoke(doctor.command, ["--device", "2"])
    assert ran.exit_code == 1
    assert "no GPU 2: this machine has 0 to 1" in " ".join(ran.output.split())


def test_another_gpus_profile_in_this_ones_place_fails_alone(fake_gpu, monkeypatch) -> None:
    install(monkeypatch, A100)
    save_profile(load_profile("h200"), cache_file(A100))
    report = doctor.examine()
    failed = [finding for finding in report.findings if finding.status == "failed"]
    assert [finding.name for finding in failed] == ["ceilings"]
    assert "was measured on 'NVIDIA H200'" in failed[0].detail


def test_a_measurement_with_another_driver_is_mentioned(fake_gpu, monkeypatch) -> None:
    install(monkeypatch, A100)
    older = replace(A100, driver="550.1")
    save_profile(Profile(older, {"bandwidth_tbps_spread_alone": ((108, 1.8),)}))
    assert "another driver, torch or Triton" in by_name(doctor.examine())["ceilings"].detail


def test_tables_are_named_by_the_models_they_are_whole_for():
    found = {finding.name: finding.detail for finding in table_findings(H200)}
    assert "llama-3.1-8b, qwen3-8b, qwen3-14b, qwen3-32b" in found["shipped"]
    assert "qwen2.5-7b" not in found["shipped"], "its weights are in no table"
    assert "fitted on NVIDIA H200" in found["cost model"]
    pcie = replace(H100, name="NVIDIA H100 PCIe")
    foreign = {finding.name: finding for finding in table_findings(pcie)}
    assert foreign["shipped"].status == "absent"
    assert "those of an H200" in foreign["cost model"].detail


def test_latency_tables_of_other_kernels_are_named(monkeypatch) -> None:
    monkeypatch.setattr("smkern.latency.stamp.kernels_hash", lambda gpu, sizes: "others")
    finding = next(found for found in table_findings(H100) if found.name == "step times")
    assert finding.status == "note"
    assert "of other kernels or tables" in finding.detail
    models = "qwen3-14b, qwen3-14b-fp8, qwen3-30b-a3b, qwen3-32b, qwen3-8b, qwen3-8b-fp8"
    assert f"than these: {models}, measure: smkern" in finding.detail


def test_tables_that_another_triton_was_tuned_with_are_mentioned(monkeypatch) -> None:
    def shipped() -> Finding:
        return next(finding for finding in table_findings(H200) if finding.name == "shipped")

    monkeypatch.setattr("smkern.doctor_device.package_version", lambda name: "3.6.0")
    assert (shipped().status, "Triton" in shipped().detail) == ("ok", False)
    monkeypatch.setattr("smkern.doctor_device.package_version", lambda name: "3.9.1")
    assert shipped().status == "note"
    assert "tuned with Triton 3.6.0, this is 3.9.1: smkern autotune" in shipped().detail


@pytest.mark.parametrize(
    ("count", "reached", "status", "text"),
    [(1, (), "note", "no other GPU"), (3, (1, 2), "ok", "2 of 2 other GPUs"),
     (3, (1,), "note", "1 of 2 other GPUs by peer access, links not known")],
)  # fmt: skip
def test_other_gpus_are_found(monkeypatch, count, reached, status, text) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda here, other: other in reached)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    found = peers(0)
    assert found[0] == status
    assert text in found[1]
