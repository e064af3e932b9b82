"""`smkern build`: which kernels it compiles, and what it says where it cannot."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from click.testing import CliRunner

from smkern.device import Budget
from smkern.errors import DeviceError
from smkern.kernels.fp8.gemm_compile import variant_of as scaled_variant_of
from smkern.kernels.gemm_variants import variant_of
from smkern.latency.model_gemms import problems_of, scaled_problems_of
from smkern.measure import build_command
from smkern.measure.build_command import command, likeliest
from smkern.models import preset
from smkern.ops.fp8 import dispatch as fp8_dispatch
from smkern.ops.gemm.dispatch import offline_dispatcher
from smkern.profile import load_profile
from smkern.tuning import fp8
from smkern.tuning.config import Epilogue, GemmProblem
from smkern.tuning.fp8 import ScaledProblem
from smkern.tuning.select import GEMM_FAMILY
from tests.extras import set_cutlass


def built(monkeypatch, *words: str):
    """The variants that a command line compiles, and what it prints."""
    wanted = []
    monkeypatch.setattr(build_command, "absent", lambda: "")
    monkeypatch.setattr(
        build_command, "compile_many", lambda variants, **_: wanted.extend(variants) or len(wanted)
    )
    told = CliRunner().invoke(command, words, catch_exceptions=False)
    assert told.exit_code == 0, told.output
    return wanted, told.output


def test_one_wave_of_64_rows_on_32_sms_and_one_product_of_80_columns(monkeypatch):
    wanted, said = built(
        monkeypatch, "--shapes", "28672x4096", "--ms", "64,77", "--budgets", "32", "--workers", "1"
    )
    tiles = [(each.block_x, each.block_y, each.swap) for each in wanted]
    assert tiles == [(64, 224, False), (128, 80, True)]  # 4 waves of 32 tiles, 7 of 32
    assert "2 kernels for sm_90a" in said


def test_it_compiles_what_dispatch_takes(monkeypatch):
    """Rows are those of a step: 200 are served by what 208 take."""
    sizes = "--shapes", "28672x4096", "--ms", "72,200,1000", "--budgets", "16,60"
    wanted, _ = built(monkeypatch, *sizes)
    set_cutlass(monkeypatch, True)
    dispatcher = offline_dispatcher(load_profile(), None)
    for m, num_sms in product((72, 200, 1000), (16, 60)):
        problem = GemmProblem(m, 28672, 4096)
        found = dispatcher.select(problem, Budget(num_sms, "mask", False), "cutlass")
        assert variant_of(problem, found.config, 90) in wanted


@pytest.mark.parametrize("gpu", ["h200", "h100-80gb-hbm3"])
def test_of_a_model_it_compiles_what_dispatch_takes_by_the_gpus_table(gpu, monkeypatch):
    monkeypatch.setattr(build_command, "ROWS", [96, 256])
    set_cutlass(monkeypatch, True)
    wanted, _ = built(monkeypatch, "--model", "qwen3-8b", "--gpu", gpu)
    profile = load_profile(gpu)
    dispatcher = offline_dispatcher(profile, GEMM_FAMILY.load(profile))
    found = set()
    for problem, num_sms in product(problems_of(preset("qwen3-8b"), 256, 256), (16, 48, 60)):
        chosen = dispatcher.select(problem, Budget(num_sms, "mask", False)).config
        if chosen.kernel == "cutlass":
            found.add(variant_of(problem, chosen, 90))
    assert len(found) > 1
    assert found <= set(wanted)


def test_of_a_model_in_fp8_it_compiles_the_products_of_e4m3_too(monkeypatch):
    monkeypatch.setattr(build_command, "ROWS", [16, 64, 512])
    set_cutlass(monkeypatch, True)
    wanted, _ = built(monkeypatch, "--model", "qwen3-8b-fp8", "--gpu", "h200")
    profile = load_profile("h200")
    dispatcher = fp8_dispatch.offline_dispatcher(profile)
    found = set()
    for num_sms in (16, 48, 84):
        for problem in scaled_problems_of(preset("qwen3-8b-fp8"), 64, profile.info.capability):
            chosen = dispatcher.select(problem, Budget(num_sms, "mask", True))
            if chosen.kernel == "cutlass":
                found.add(scaled_variant_of(problem, chosen, 90))
    assert {each.residual for each in found} == {False, True}
    assert found <= set(wanted)


@pytest.mark.parametrize("scales", ["block", "row"])
def test_of_shapes_in_e4m3_the_models_first_and_none_for_rows_they_do_not_serve(
    scales, monkeypatch
):
    sizes = "--shapes", "10240x5120", "--ms", "8,64", "--budgets", "24", "--epilogue", "residual"
    wanted, said = built(monkeypatch, *sizes, "--scales", scales, "--top", "2")
    assert len(set(wanted)) == 2
    assert "2 kernels for sm_90a" in said
    problem = ScaledProblem(64, 10240, 5120, epilogue=Epilogue(residual=True), scales=scales)
    first = fp8.choose(
        replace(problem, kernel="cutlass"), Budget(24, "mask", True), load_profile("h200")
    )
    assert scaled_variant_of(problem, first, 90) in wanted
    assert {(each.blocks, each.residual) for each in wanted} == {(scales == "block", True)}


def test_epilogues_are_variants_of_their_own(monkeypatch):
    sizes = "--shapes", "6144x4096", "--ms", "77", "--budgets", "16"
    wanted, _ = built(
        monkeypatch, *sizes, "--epilogue", "bias+residual+silu", "--epilogue", "swiglu"
    )
    found = [(each.bias, each.residual, each.activation) for each in wanted]
    assert found == [(True, True, "silu"), (False, False, "swiglu")]


def test_the_top_ones_are_different_variants():
    profile, problem = load_profile(), GemmProblem(77, 6144, 4096)
    assert len(set(likeliest([problem], [16], profile, top=3))) == 3
    swiglu = GemmProblem(77, 24576, 4096, epilogue=Epilogue(swiglu=True))
    assert all(
        each.block_y % 16 == 0 or each.swap for each in likeliest([swiglu], [16], profile, 9)
    )


def test_without_the_package_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(build_command, "absent", lambda: "it is not installed; pip install it")
    with pytest.raises(DeviceError, match="pip install it"):
        CliRunner().invoke(command, [], catch_exceptions=False)


def test_cpp_builds_the_library_alone(monkeypatch):
    monkeypatch.setattr(build_command, "absent", lambda: "it is not installed")
    monkeypatch.setattr(build_command.cpp_build, "build", lambda: "/cache/cutlass_gemm.so")
    told = CliRunner().invoke(command, ["--cpp"], catch_exceptions=False)
    assert told.exit_code == 0
    assert "/cache/cutlass_gemm.so" in told.output


def test_an_epilogue_that_is_none_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="epilogue 'tanh'"):
        built(monkeypatch, "--epilogue", "tanh")
