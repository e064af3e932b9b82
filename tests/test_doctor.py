"""The doctor without a GPU, and before a fake one that works or does not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from rich.console import Console

import smkern
from smkern import doctor
from smkern.device import DeviceInfo
from smkern.doctor import Finding, Report
from smkern.errors import ConfinementError, DeviceError
from tests.gpus import H200


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
def _no_user_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


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
        sides = FakePartition(decode, False, outside), FakePartition(132 - decode, True)
        made.extend(sides)
        split = SimpleNamespace(decode=sides[0], prefill=sides[1])
        try:
            yield SimpleNamespace(split=lambda *, decode: split)
        finally:
            for side in sides:
                side.closed = True

    monkeypatch.setattr(smkern, "device_info", lambda index=None: H200, raising=False)
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


def test_with_gpu_every_backend_is_verified_on_both_sides(fake_gpu: SimpleNamespace) -> None:
    found = by_name(doctor.examine())
    for name in doctor.PARTITION_BACKENDS:
        assert found[name].status == "ok"
        assert "asked 16, got 16 + 116 SMs" in found[name].detail
        assert "clusters launch on: prefill" in found[name].detail
    assert [partition.verified for partition in fake_gpu.made] == [1] * 6
    assert found["TMA kernels"].status == "ok"


def test_a_partition_that_leaks_fails_alone(fake_gpu: SimpleNamespace) -> None:
    fake_gpu.outside_on = "grid"
    report = doctor.examine()
    failed = [finding for finding in report.findings if finding.status == "failed"]
    assert [finding.name for finding in failed] == ["grid (no mask)"]
    assert "ConfinementError: a CTA ran on SM 131" in failed[0].detail
    assert CliRunner().invoke(doctor.command).exit_code == 1


@pytest.mark.usefixtures("no_gpu")
def test_a_corrupt_table_of_ones_own_is_found_out(tmp_path: Path) -> None:
    from smkern.tuning.table import user_path

    path = user_path("NVIDIA H200")
    assert path.is_relative_to(tmp_path)
    path.parent.mkdir(parents=True)
    path.write_text('{"format": "smkern-table", "cells": [')
    found = by_name(doctor.examine())["your own"]
    assert found.status == "failed"
    assert "half-written" in found.detail


def test_what_a_check_says_is_not_markup() -> None:
    out = StringIO()
    console = Console(file=out, width=120)
    report = Report((Finding("GPU", "device", "ok", "[80, 132] SMs"),), ("see [this]",))
    doctor.render(report, console)
    assert "[80, 132] SMs" in out.getvalue()
    assert "see [this]" in out.getvalue()
