"""The append kernel compiled for devices that are absent: wide accesses, no spills, one order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from smkern.kernels.append_launch import (
    NUMBERS,
    POINTERS,
    SCALARS,
    STRIDES,
    compile_append,
    first_step,
    variant_of,
    variants_of,
)
from smkern.kernels.append_triton import append_rows
from smkern.tuning.append import AppendConfig, AppendProblem, Budget, num_ctas
from tests.kernels.cubins import layouts_summed, sass, usage

pytestmark = pytest.mark.slow

BASE = AppendProblem(64, 64, 32, 8, 128, 16, rotary_dim=128, norm=True, ragged=True)
PLAIN = replace(BASE, num_q_heads=0, rotary_dim=0, norm=False)
KINDS = {
    "all": BASE,
    "decode": replace(BASE, ragged=False),
    "plain": PLAIN,
    "plain-fp8": replace(PLAIN, cache_dtype="fp8"),
    "fp8": replace(BASE, cache_dtype="fp8"),
    "fp16": replace(BASE, dtype="fp16", cache_dtype="fp16", weight_dtype="fp16", flat=True),
    "partial": replace(BASE, rotary_dim=64, page_size=1),
    "interleaved": replace(BASE, interleaved=True),
    "bf16-table": replace(BASE, table_dtype="bf16", weight_dtype="fp32"),
    "64": replace(BASE, head_dim=64, rotary_dim=64),
    "96": replace(BASE, head_dim=96, rotary_dim=96),
    "256": replace(BASE, head_dim=256, rotary_dim=256),
}


def test_parameters_are_packed_in_the_kernels_order():
    packed = (*POINTERS, *STRIDES, *NUMBERS, *SCALARS)
    constants = variants_of(BASE, 90)[0].constants
    assert append_rows.arg_names == [*packed, *constants]


@pytest.mark.parametrize("problem", KINDS.values(), ids=KINDS)
def test_fits_and_reads_whole_vectors(problem, tmp_path):
    artifacts = [compile_append(variant) for variant in variants_of(problem, 90)]
    for artifact, code in zip(artifacts, sass(artifacts, tmp_path), strict=True):
        registers, stack = usage(artifact, tmp_path)
        assert stack == 0
        assert registers * artifact.num_threads <= 65_536
        assert "LDG.E.128" in code
        assert ("STG.E.64" if problem.cache_dtype == "fp8" else "STG.E.128") in code


@pytest.mark.parametrize("capability", [80, 89, 100, 120])
def test_other_devices(capability, tmp_path):
    for problem in (BASE, KINDS["fp8"], PLAIN):
        for variant in variants_of(problem, capability)[:1]:
            assert usage(compile_append(variant), tmp_path)[1] == 0


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("head_dim", [64, 96, 256])
def test_few_kv_heads_one_token_a_request(kv_heads, head_dim, tmp_path):
    sizes = {"num_kv_heads": kv_heads, "head_dim": head_dim, "ragged": False}
    turned = {"num_q_heads": 4 * kv_heads, "rotary_dim": head_dim}
    normed = replace(BASE, **sizes, num_q_heads=4 * kv_heads, rotary_dim=0)
    for problem in (replace(PLAIN, **sizes), normed, replace(BASE, **sizes, **turned)):
        for variant in variants_of(problem, 90):
            assert usage(compile_append(variant), tmp_path)[1] == 0


def test_rows_that_are_not_whole_compile(tmp_path):
    for variant in variants_of(replace(BASE, aligned=False), 90):
        assert variant.unit == 1
        assert usage(compile_append(variant), tmp_path)[1] == 0


@pytest.mark.parametrize("name", ["all", "interleaved", "64", "96", "256"])
def test_a_row_is_summed_in_one_order_whatever_the_cta(name, monkeypatch):
    """Lanes and elements of a row are dealt alike, or its bits would depend on the budget."""
    layouts = layouts_summed(monkeypatch, r"[\dx]+")  # of k and of every chunk of q
    for problem in (KINDS[name], replace(KINDS[name], ragged=False, cache_dtype="fp8")):
        for variant in variants_of(problem, 90):
            compile_append(variant)
    assert len(layouts) == 1, layouts
    assert dict(layouts.pop())["warpsPerCTA"] == "1"


def test_a_variant_holds_nothing_of_budgets_and_sizes():
    config = AppendConfig(8, 2)
    wanted = variant_of(BASE, config, 90)
    assert variant_of(replace(BASE, tokens=9000, batch=3), config, 90) == wanted
    assert variant_of(BASE, replace(config, ctas_per_sm=1), 90) == wanted
    assert len(set(variants_of(BASE, 90))) == 3


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 63, 64, 65])
def test_the_search_reaches_every_request(batch):
    for wanted in range(batch):
        request, step = 0, first_step(batch)
        while step:
            if request + step < batch and request + step <= wanted:
                request += step
            step //= 2
        assert request == wanted


@pytest.mark.parametrize("tokens", [1, 8, 513, 8192])
@pytest.mark.parametrize("num_sms", [1, 16, 132])
def test_the_grid_is_within_the_budget(tokens, num_sms):
    problem = replace(BASE, tokens=tokens)
    for shape in ((4, 4), (8, 2), (16, 1)):
        config = AppendConfig(*shape)
        assert 1 <= num_ctas(problem, config, Budget(num_sms, "grid")) <= num_sms
        masked = num_ctas(problem, config, Budget(num_sms, "mask"))
        assert masked <= num_sms * config.ctas_per_sm
