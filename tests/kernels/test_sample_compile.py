"""The sampler's kernel compiled for a device that is absent: no spills, two CTAs an SM."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from smkern.kernels.cuda_source import source_folder
from smkern.kernels.sample import CANDIDATES, SampleVariant, shared_bytes
from smkern.tuning.rules import shared_limit
from smkern.tuning.sample import MAX_VOCAB, RESIDENT_WARPS, WARPS, SampleProblem

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on the PATH")


def test_two_ctas_fit_an_sm():
    assert 2 * (shared_bytes(SampleProblem(1, MAX_VOCAB, "fp32")) + 4096) <= shared_limit((9, 0))


def test_the_kernels_numbers_are_ours():
    text = (source_folder() / "sample_select.cuh").read_text()
    assert f"kCandidates = {CANDIDATES};" in text
    text = (source_folder() / "sample.cuh").read_text()
    assert "1u << kIdBits" in text
    assert f"kIdBits = {MAX_VOCAB.bit_length() - 1};" in text


@needs_nvcc
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("aligned", [True, False])
@pytest.mark.parametrize("warps", WARPS)
def test_it_compiles_without_spills(dtype, aligned, warps, tmp_path):
    variant = SampleVariant(dtype, aligned, warps, 90)
    command = ["nvcc", "-arch=sm_90a", "-cubin", "-Xptxas", "-v",
               *(f"-D{define}" for define in variant.defines), str(source_folder() / "sample.cu"),
               "-o", str(tmp_path / "sample.cubin")]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=240)
    report = done.stdout + done.stderr
    assert set(re.findall(r"(\d+) bytes spill", report)) == {"0"}
    assert re.findall(r"(\d+) bytes stack", report) == ["0"]
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", report))
    assert registers * 32 * RESIDENT_WARPS <= 65_536
