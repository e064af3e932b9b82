"""Kernels over rows compiled for devices that are absent: wide accesses, no spills, one order."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from smkern.kernels import rows_triton
from smkern.kernels.compile import Artifact
from smkern.kernels.rows_launch import PARAMETERS, variant_of
from smkern.tuning.rows import RowsConfig, RowsProblem, held, registers, shapes_of
from tests.kernels.cubins import layouts_summed, sass, usage, waits_first

pytestmark = pytest.mark.slow

WIDTHS = (2048, 4096, 5120, 7168, 8192, 12288, 16384)
BASE = RowsProblem("add_rms_norm", 64, 4096)


@pytest.mark.parametrize("op", PARAMETERS)
def test_parameters_are_packed_in_the_kernels_order(op: str) -> None:
    problem = replace(BASE, op=op)
    constants = variant_of(problem, shapes_of(problem)[0], 90).constants
    names = getattr(rows_triton, f"{op}_rows").arg_names
    assert names == [*PARAMETERS[op], *constants]


def compiled(problem: RowsProblem, folder: Path) -> Iterable[tuple[RowsConfig, Artifact, str]]:
    """Every shape of a problem's kernel, compiled, and its instructions."""
    configs = shapes_of(problem)
    artifacts = [variant_of(problem, config, 90).compile() for config in configs]
    return zip(configs, artifacts, sass(artifacts, folder), strict=True)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm"])
def test_norms_fit_and_move_whole_vectors(op: str, width: int, tmp_path: Path) -> None:
    problem = replace(BASE, op=op, width=width)
    for config, artifact, code in compiled(problem, tmp_path):
        found, stack = usage(artifact, tmp_path)
        assert stack == 0, config
        assert found * artifact.num_threads <= 65_536
        assert found <= 1.25 * registers(problem, config) + 8, (config, found)
        assert "STG.E.128" in code
        assert "LDG.E.128" in code
        assert ("LDGSTS" in code) == (config.stages > 1)
        assert not re.search(r"(LDG|STG)\.E(\.U16|\.64)? ", code)


@pytest.mark.parametrize("op", ["silu_and_mul", "embedding"])
@pytest.mark.parametrize("width", [4096, 5120, 12288])
def test_the_others_fit_and_move_whole_vectors(op: str, width: int, tmp_path: Path) -> None:
    problem = replace(BASE, op=op, width=width, index_dtype="i64")
    for config, artifact, code in compiled(problem, tmp_path):
        found, stack = usage(artifact, tmp_path)
        assert stack == 0
        assert found <= 64
        # vectors behind every row's end are left out
        assert 1 <= len(re.findall(r"STG\.E\.128", code)) <= config.vectors
        assert "LDG.E.128" in code


@pytest.mark.parametrize("capability", [80, 89, 100, 120])
def test_other_devices_and_kinds(capability: int, tmp_path: Path) -> None:
    for problem in (
        replace(BASE, dtype="fp16", weight_dtype="fp32"),
        replace(BASE, op="rms_norm", aligned=False, width=2885),
        replace(BASE, op="silu_and_mul", dtype="fp16"),
        replace(BASE, op="embedding", aligned=False),
    ):
        variant = variant_of(problem, shapes_of(problem)[0], capability)
        assert variant.constants["PDL"] == (capability >= 90)
        assert usage(variant.compile(), tmp_path)[1] <= 16  # sm_120's compiler spills two words


def test_a_launch_waits_for_the_one_before(tmp_path: Path) -> None:
    problems = [replace(BASE, op=op) for op in PARAMETERS]
    artifacts = [variant_of(x, shapes_of(x)[0], 90).compile() for x in problems]
    for op, code in zip(PARAMETERS, sass(artifacts, tmp_path), strict=True):
        assert waits_first(code), op
        if "norm" in op:  # asking for the weights to come to L2 is no access
            assert code.index("CCTL.E.PF2") < code.index("ACQBULK"), op


@pytest.mark.parametrize("width", [1000, 4096, 5120, 16384])
def test_a_row_is_summed_in_one_order_whatever_the_cta(width, monkeypatch) -> None:
    """A piece lies in one warp, or a row's bits would depend on the budget."""
    layouts = layouts_summed(monkeypatch, r"\d+x256")
    for op in ("rms_norm", "add_rms_norm"):
        problem = replace(BASE, op=op, width=width)
        for config in shapes_of(problem):
            variant_of(problem, config, 90).compile()
    assert layouts == {(("sizePerThread", "8"), ("threadsPerWarp", "32"), ("warpsPerCTA", "1"))}


def test_a_variant_holds_nothing_of_budgets_and_sizes() -> None:
    config = RowsConfig(8, 1, 2)
    wanted = variant_of(BASE, config, 90)
    assert variant_of(replace(BASE, rows=9000), config, 90) == wanted
    assert variant_of(BASE, replace(config, ctas_per_sm=1, pdl=False), 90) == wanted
    assert held(BASE, config) == 16
