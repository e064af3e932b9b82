"""The grouped GEMM compiled for devices that are absent: it fits, copies and multiplies wide."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from smkern.kernels.grouped_launch import (
    POINTER_SIGNATURE,
    WS_NUMBERS,
    GroupedKernels,
    pointer_constants,
    pointer_numbers,
    variant_of,
)
from smkern.kernels.grouped_triton import grouped_pointer
from smkern.tuning.constraints import shared_limit
from smkern.tuning.grouped import GroupedConfig, GroupedProblem, configs_of
from tests.kernels.cubins import sass, usage
from tests.kernels.test_moe_triton import waits_first

pytestmark = pytest.mark.slow

BASE = GroupedProblem(512, 128, 768, 2048, swiglu=True)
KINDS = {
    "gate-up": BASE,
    "down": GroupedProblem(512, 128, 2048, 768),
    "512-experts": replace(BASE, num_experts=512),
    "fp16": replace(BASE, num_experts=8, dtype="fp16"),
}
POINTER = replace(BASE, aligned=False)


@pytest.mark.parametrize("problem", KINDS.values(), ids=KINDS)
def test_every_variant_fits(problem: GroupedProblem, tmp_path: Path) -> None:
    configs = configs_of(problem, 90)
    artifacts = [variant_of(problem, config, 90).compile() for config in configs]
    codes = sass(artifacts, tmp_path)
    for config, artifact, code in zip(configs, artifacts, codes, strict=True):
        registers, stack = usage(artifact, tmp_path)
        assert stack == 0, config
        assert config.ctas_per_sm * registers * artifact.num_threads <= 65_536
        assert config.ctas_per_sm * (artifact.shared_bytes + 1024) <= shared_limit((9, 0)) + 1024, (
            config
        )
        assert "HGMMA" in code
        assert "UTMALDG.2D" in code
        assert waits_first(code)
        assert len(artifact.boxes) == 2
        # a whole tile's products, a half's and a quarter's
        shapes = set(re.findall(r"HGMMA\.64x(\d+)x16", code))
        assert len(shapes) == (3 if config.tails else 1), (config, shapes)


def test_parameters_are_packed_in_the_kernels_order() -> None:
    from smkern.kernels.grouped_ws import grouped_ws

    names = ["a_desc", "w_desc", "out_ptr", "offsets_ptr", *WS_NUMBERS]
    assert grouped_ws.arg_names[: len(names)] == names
    variant = variant_of(POINTER, configs_of(POINTER, 90)[0], 90)
    constants = [*pointer_constants(variant)]
    assert grouped_pointer.arg_names == [*POINTER_SIGNATURE, *constants]
    numbers = pointer_numbers(POINTER, configs_of(POINTER, 90)[0], 1)
    assert len(POINTER_SIGNATURE) == 4 + len(numbers)


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_rows_that_are_not_whole_and_other_devices(swiglu, capability, tmp_path) -> None:
    for aligned in (False, True) if capability != 90 else (False,):
        problem = replace(BASE, swiglu=swiglu, aligned=aligned)
        configs = configs_of(problem, capability)
        artifacts = [variant_of(problem, config, capability).compile() for config in configs]
        for config, artifact in zip(configs, artifacts, strict=True):
            assert config.kernel == "pointer"
            assert usage(artifact, tmp_path)[1] == 0
        if capability == 90:
            assert all(waits_first(code) for code in sass(artifacts, tmp_path))


@pytest.mark.parametrize("problem", [BASE, KINDS["down"], POINTER])
def test_a_variant_holds_nothing_of_budgets_and_rows(problem: Any) -> None:
    kernels = GroupedKernels(90)
    wanted = kernels.variants(problem)
    assert kernels.variants(replace(problem, rows=1, n=64, k=128, a_stride=999)) == wanted
    config: GroupedConfig = configs_of(problem, 90)[0]
    run_time = replace(config, pdl=False, ctas_per_sm=1)
    assert variant_of(problem, run_time, 90) == variant_of(problem, config, 90)
