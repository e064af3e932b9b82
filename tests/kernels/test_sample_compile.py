"""CUDA C++ compiled for devices that are absent: the sampler spills nothing, plans fit."""

from __future__ import annotations

import pytest

from smkern.device import Budget
from smkern.kernels.attention.cuda import PLAN_STATIC_BYTES, PlanVariant
from smkern.kernels.cuda_source import source_folder
from smkern.kernels.sample import CANDIDATES, SampleVariant, shared_bytes
from smkern.tuning.constraints import shared_limit
from smkern.tuning.sample import MAX_VOCAB, RESIDENT_WARPS, SAMPLE_FAMILY, WARPS, SampleProblem
from tests.kernels.cubins import needs_nvcc, sizes
from tests.kernels.devices import profile_of

pytestmark = pytest.mark.slow


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
    registers, stack, _ = sizes(SampleVariant(dtype, aligned, warps, 90).compile().cubin, tmp_path)
    assert stack == 0
    assert registers * 32 * RESIDENT_WARPS <= 65_536


@needs_nvcc
@pytest.mark.parametrize("capability", [80, 86, 89, 100])
def test_what_dispatch_chooses_on_other_devices_fits(capability, tmp_path):
    """One CTA of it at least: its shared memory beside what the launch asks for."""
    problem = SampleProblem(64, 128_256)
    config = SAMPLE_FAMILY.config(problem, Budget(32, "mask"), profile_of(capability))
    variant = SampleVariant(problem.dtype, problem.aligned, config.num_warps, capability)
    registers, stack, static = sizes(variant.compile().cubin, tmp_path)
    assert stack == 0
    assert registers * 32 * config.num_warps <= 65_536
    most = shared_bytes(SampleProblem(1, MAX_VOCAB, "fp32"))
    assert static + most <= shared_limit(divmod(capability, 10))


@needs_nvcc
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100])
def test_the_plans_kernel_takes_the_shared_memory_that_is_counted(capability, tmp_path):
    registers, stack, static = sizes(PlanVariant(capability).compile().cubin, tmp_path)
    reserved = 1024 if capability >= 90 else 0  # the system's, which is told with it
    assert static - reserved == PLAN_STATIC_BYTES
    assert registers * 1024 <= 65_536
    assert stack <= 64  # of turns that broken promises alone need
