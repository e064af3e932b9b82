"""The Triton attention kernel compiled for devices that are absent: it fits, and spills nothing."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from smkern.errors import DeviceError
from smkern.kernels.attention.merge_triton import MergeVariant, compile_merge
from smkern.kernels.attention.triton_compile import (
    compile_triton,
    compile_variant,
    default_config,
    shared_limit,
    variants_of,
)
from smkern.kernels.compile import Artifact
from smkern.tuning.attention.shapes import AttentionConfig, AttentionProblem, AttentionShape

triton = pytest.importorskip("triton")

CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
REGISTERS = re.compile(r"REG:(\d+) STACK:(\d+)")


def problem(max_q_len: int, *, head_dim: int = 128, group: int = 4, **options) -> AttentionProblem:
    """Of 8 requests with up to 4,096 keys."""
    window = options.pop("window", 0)
    shape = AttentionShape(
        8, 8 * group, 8, head_dim, 16, max_q_len, 4096, 8 * max_q_len, 8 * 4096, True, window
    )
    return AttentionProblem(shape, **options)


def default_of(wanted: AttentionProblem, capability: int) -> AttentionConfig:
    path = "prefill" if wanted.shape.has_prefill else "decode"
    return default_config(wanted, path, capability)


def compile_default(wanted: AttentionProblem, capability: int) -> tuple[Artifact, ...]:
    """By the default configuration; its kernels fit, or `compile_triton` raises."""
    return compile_triton(wanted, default_of(wanted, capability), capability)


def instructions(artifact: Artifact, folder: Path) -> str:
    """A kernel's machine code as text."""
    file = folder / "kernel.cubin"
    file.write_bytes(artifact.cubin)
    command = [CUOBJDUMP, "-sass", file]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def stack_bytes(artifact: Artifact, folder: Path) -> int:
    """Local memory of a kernel: what did not fit its registers."""
    file = folder / "kernel.cubin"
    file.write_bytes(artifact.cubin)
    command = [CUOBJDUMP, "-res-usage", file]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = REGISTERS.search(told)
    assert found, told
    return int(found[2])


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("max_q_len", [1, 8, 4096])
def test_defaults_fit_and_do_not_spill(capability, head_dim, max_q_len, tmp_path):
    wanted = problem(max_q_len, head_dim=head_dim)
    config = default_of(wanted, capability)
    for variant, artifact in zip(
        variants_of(wanted, config, capability),
        compile_triton(wanted, config, capability),
        strict=True,
    ):
        assert artifact.shared_bytes <= shared_limit(capability)
        assert artifact.num_threads == 32 * variant.num_warps
        # a few words around the tensor memory of sm_100
        assert stack_bytes(artifact, tmp_path) <= (32 if capability == 100 else 0)


@pytest.mark.parametrize("capability", [80, 86, 90, 100, 120])
def test_the_widest_heads_fit(capability):
    compile_default(problem(64, head_dim=256), capability)


OPTIONS = {
    "window": {"window": 100},
    "softcap and sinks": {"softcap": True, "sinks": True},
    "fp8 cache": {"cache_dtype": "fp8"},
    "fp16": {"dtype": "fp16", "cache_dtype": "fp16"},
    "one head": {"group": 1},
    "an odd group": {"group": 5},
    "padded heads": {"head_dim": 96},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_compiles(option):
    compile_default(problem(64, **OPTIONS[option]), 90)


def test_an_fp8_cache_is_read_as_bytes_before_sm_89():
    compile_default(problem(64, cache_dtype="fp8"), 80)


def test_strides_that_are_not_whole_compile():
    wanted = problem(64)
    for variant in variants_of(wanted, default_of(wanted, 90), 90, aligned=False):
        assert compile_variant(variant).unit == 1


def test_pages_are_gathered_by_wide_asynchronous_copies(tmp_path):
    decode, *_ = compile_default(problem(1), 90)
    assert "LDGSTS.E.BYPASS.128" in instructions(decode, tmp_path)


def test_prefill_on_sm_90_uses_its_matrix_unit(tmp_path):
    prefill, *_ = compile_default(problem(4096), 90)
    assert "HGMMA" in instructions(prefill, tmp_path)


def test_what_does_not_fit_is_refused_with_the_limit():
    wanted = problem(4096, head_dim=256)
    config = AttentionConfig("triton", keys=128, num_warps=8, num_stages=3)
    with pytest.raises(DeviceError, match=r"232448.*fewer stages"):
        compile_triton(wanted, config, 90)


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_merge_compiles_without_spills(capability, head_dim, tmp_path):
    artifact = compile_merge(MergeVariant(head_dim, "bf16", True, capability))
    assert stack_bytes(artifact, tmp_path) == 0
