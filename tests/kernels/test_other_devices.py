"""What dispatch chooses on GPUs that are absent compiles, fits them, and spills nothing.

One decode step and one prompt of a Qwen3-sized model on each. The kernels of attention, routing,
sampling and the runtime's rows are compiled for them in tests of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import triton

from smkern.device import Budget
from smkern.kernels import gemm_launch
from smkern.kernels.append_launch import compile_append
from smkern.kernels.append_launch import variant_of as append_variant
from smkern.kernels.compile import Artifact
from smkern.kernels.gemm_launch import GemmKernels
from smkern.kernels.grouped_launch import variant_of as grouped_variant
from smkern.kernels.rows_launch import variant_of as rows_variant
from smkern.ops.gemm.dispatch import Dispatcher
from smkern.tuning.append import APPEND_FAMILY, AppendProblem
from smkern.tuning.config import Epilogue, GemmProblem
from smkern.tuning.constraints import REGISTERS_PER_SM, shared_limit
from smkern.tuning.grouped import GROUPED_FAMILY, GroupedProblem
from smkern.tuning.rows import RowsProblem, choose
from tests.kernels.cubins import told, usage
from tests.kernels.devices import FACTS, profile_of

pytestmark = pytest.mark.slow

DEVICES = (80, 89, 100)
STEPS = {"decode": (8, 32), "prompt": (2048, 76)}
"""Rows of a step, and the SMs of its partition."""
SPILLS = {100: 256}
"""Bytes allowed: on sm_100 an epilogue brings 128 sums a thread back from tensor memory."""
TENSOR_COLUMNS = 512
"""Of an SM's tensor memory: a CTA that finds too few waits for one that has them."""
EPILOGUES = {
    "plain": (Epilogue(), 6144, 4096),
    "all": (Epilogue(bias=True, residual=True, activation="gelu"), 4096, 12288),
    "swiglu": (Epilogue(swiglu=True), 24576, 4096),
}


@dataclass(slots=True)
class Loaded:
    """What a driver would have been given, and what the compiler said of it."""

    cubins: list[tuple[bytes, int]]
    metadata: list[Any]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Loaded:
    """GEMM kernels are compiled, and not loaded."""
    seen = Loaded([], [])
    compile_triton = triton.compile

    def spied(*args: Any, **options: Any) -> Any:
        kernel = compile_triton(*args, **options)
        seen.metadata.append(kernel.metadata)
        return kernel

    monkeypatch.setattr(triton, "compile", spied)
    monkeypatch.setattr(
        gemm_launch,
        "load_function",
        lambda cubin, name, shared: seen.cubins.append((cubin, shared)),
    )
    return seen


def check_fits(kernel: Artifact | bytes, shared: int, capability: int, folder: Path) -> None:
    assert shared <= shared_limit(divmod(capability, 10))
    assert usage(kernel, folder)[1] <= SPILLS.get(capability, 0)


@pytest.mark.parametrize(
    ("step", "epilogue"),
    [("decode", "plain"), ("decode", "swiglu"), ("prompt", "all"), ("prompt", "swiglu")],
)
@pytest.mark.parametrize("capability", DEVICES)
def test_a_gemm_is_planned_by_a_kernel_of_the_device(
    capability, step, epilogue, loaded, tmp_path
) -> None:
    (rows, num_sms), (fused, n, k) = STEPS[step], EPILOGUES[epilogue]
    kernels = GemmKernels(0, capability)
    dispatcher = Dispatcher(profile_of(capability), None, lambda: kernels, _absent)
    plan: Any = dispatcher.plan(GemmProblem(rows, n, k, epilogue=fused), Budget(num_sms, "mask"))
    assert plan.config.kernel == ("tma" if capability == 100 else "pointer")
    ((cubin, shared),), (meta,) = loaded.cubins, loaded.metadata
    check_fits(cubin, shared, capability, tmp_path)
    resident = plan.config.ctas_per_sm
    assert resident * (shared + 1024) <= shared_limit(divmod(capability, 10)) + 1024
    assert resident * meta.tmem_size <= TENSOR_COLUMNS
    assert meta.global_scratch_size == 0  # a launch passes none
    code = told(cubin, tmp_path, "-sass")
    assert ("UTMALDG" if capability == 100 else "LDGSTS.E.BYPASS") in code
    assert (".128" in code.split("LDGSTS", 1)[1][:40]) if capability < 90 else "UTCHMMA" in code


def _absent() -> Any:
    raise AssertionError("cuBLASLt was asked for")


@pytest.mark.parametrize("capability", FACTS)
@pytest.mark.parametrize("rows", [1, 16, 64, 300, 4096])
@pytest.mark.parametrize("invariant", [False, True])
def test_every_size_has_a_gemm_whose_operands_are_registers_enough(
    capability, rows, invariant
) -> None:
    """Without wgmma or tensor memory 64 sums a thread at most: more were seen to spill."""
    dispatcher = Dispatcher(profile_of(capability), None, _absent, _absent)
    for fused, n, k in EPILOGUES.values():
        for confined in ("mask", "grid"):
            problem = GemmProblem(rows, n, k, epilogue=fused, batch_invariant=invariant)
            config = dispatcher.select(problem, Budget(48, confined)).config
            sums = config.block_m * config.block_n // (32 * config.num_warps)
            assert sums <= (128 if capability in (90, 100) else 64)
            assert (config.kernel == "pointer") == (capability < 90)


@pytest.mark.parametrize("rows", [1, 16, 77, 2048])
@pytest.mark.parametrize("capability", DEVICES)
def test_a_gemm_of_unaligned_rows_spills_a_few_words(capability, rows, loaded, tmp_path) -> None:
    """Operands go through registers by element: larger tiles spilled kilobytes a thread."""
    kernels = GemmKernels(0, capability)
    dispatcher = Dispatcher(profile_of(capability), None, lambda: kernels, _absent)
    problem = GemmProblem(rows, 50_257, 4096, aligned=False)
    plan: Any = dispatcher.plan(problem, Budget(32, "mask"))
    ((cubin, _),) = loaded.cubins
    registers, spilled = usage(cubin, tmp_path)
    assert spilled <= 100
    assert plan.config.ctas_per_sm * 32 * plan.config.num_warps * registers <= REGISTERS_PER_SM


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("capability", DEVICES)
def test_an_expert_gemm_is_the_pointer_kernels(capability: int, step: str, tmp_path: Path) -> None:
    (rows, num_sms), profile = STEPS[step], profile_of(capability)
    problem = GroupedProblem(8 * rows, 128, 768, 2048, swiglu=True)
    config = GROUPED_FAMILY.config(problem, Budget(num_sms, "mask"), profile)
    assert config.kernel == "pointer"
    artifact = grouped_variant(problem, config, capability).compile()
    check_fits(artifact, artifact.shared_bytes, capability, tmp_path)
    assert "LDGSTS.E.BYPASS.128" in told(artifact, tmp_path, "-sass")


@pytest.mark.parametrize(
    ("op", "step"),
    [
        ("rms_norm", "decode"),
        ("add_rms_norm", "decode"),
        ("add_rms_norm", "prompt"),
        ("silu_and_mul", "prompt"),
        ("embedding", "decode"),
    ],
)
@pytest.mark.parametrize("capability", DEVICES)
def test_operators_over_rows(capability: int, step: str, op: Any, tmp_path: Path) -> None:
    (rows, num_sms), profile = STEPS[step], profile_of(capability)
    problem = RowsProblem(op, rows, 4096)
    config = choose(problem, Budget(num_sms, "mask"), profile)
    artifact = rows_variant(problem, config, capability).compile()
    check_fits(artifact, artifact.shared_bytes, capability, tmp_path)
    assert ("ACQBULK" in told(artifact, tmp_path, "-sass")) == (capability >= 90)


@pytest.mark.parametrize(("cache_dtype", "step"), [("bf16", "decode"), ("fp8", "prompt")])
@pytest.mark.parametrize("capability", DEVICES)
def test_an_append_converts_to_fp8_itself_where_the_device_does_not(
    capability, step, cache_dtype, tmp_path
) -> None:
    (rows, num_sms), profile = STEPS[step], profile_of(capability)
    problem = AppendProblem(
        rows, min(rows, 8), 32, 8, 128, 16, rotary_dim=128, norm=True, ragged=rows > 8,
        cache_dtype=cache_dtype,
    )  # fmt: skip
    config = APPEND_FAMILY.config(problem, Budget(num_sms, "mask"), profile)
    artifact = compile_append(append_variant(problem, config, capability))
    check_fits(artifact, artifact.shared_bytes, capability, tmp_path)
    native = cache_dtype == "fp8" and capability >= 89
    assert ("E4M3" in told(artifact, tmp_path, "-sass")) == native
