"""Where dispatch takes CUTLASS's kernels of e4m3: tuned, where nobody tuned, and never else."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from smkern.kernels.cute import compile as cute
from smkern.ops.fp8.dispatch import ScaledDispatcher, of_step, offline_dispatcher
from smkern.profile import load_profile
from smkern.tuning import fp8, fp8_cutlass
from smkern.tuning.config import Budget, Epilogue
from smkern.tuning.constraints import REGISTERS_PER_SM, ctas_fit, shared_bytes
from smkern.tuning.fp8 import ScaledProblem
from tests.extras import set_cutlass

H200, H100 = load_profile("h200"), load_profile("h100-80gb-hbm3")
NOBODYS = ScaledProblem(64, 10240, 5120)
"""Of a weight without cells."""


@pytest.fixture
def there(monkeypatch) -> None:
    set_cutlass(monkeypatch, True)


@pytest.fixture
def lacking(monkeypatch) -> None:
    set_cutlass(monkeypatch, False)


def tuned(dispatcher: ScaledDispatcher, rows: range):
    """Cells of rows for which a whole step's choice is made."""
    for key, cell in dispatcher.table.cells.items():
        if key.m in rows and of_step(key.problem) == key.problem:
            yield key.problem, Budget(key.num_sms, key.confined), cell


def test_what_was_tuned_with_them_is_taken_as_it_was(there):
    dispatcher, taken = offline_dispatcher(H200), 0
    for problem, budget, cell in tuned(dispatcher, range(17, 257)):
        found = dispatcher.select(problem, budget)
        kernel = cell.config.kernel
        if fp8.is_librarys(problem, budget, H200):
            kernel = "cublaslt"
        assert found.kernel == kernel
        taken += kernel == "cutlass"
    assert taken > 200


def test_without_them_our_own_serves(lacking):
    dispatcher = offline_dispatcher(H200)
    for problem, budget, cell in tuned(dispatcher, range(17, 257)):
        if not fp8.is_librarys(problem, budget, H200):
            found = dispatcher.select(problem, budget)
            assert (found.kernel, found.block_n) == (cell.own.kernel, cell.own.block_n)


def test_what_was_tuned_without_them_gives_way_where_the_model_is_sure(there):
    """No H100 has run them."""
    dispatcher = offline_dispatcher(H100)
    assert not dispatcher.table.has_extras

    def found(rows: range, blocks: bool) -> list[str]:
        cells = [cell[:2] for cell in tuned(dispatcher, rows) if cell[0].blocks == blocks]
        return [dispatcher.select(*cell).kernel for cell in cells]

    few = found(range(33, 65), True) + found(range(33, 65), False)
    for kernels in (few, found(range(65, 513), False)):
        assert kernels.count("cutlass") > 0.3 * len(kernels)
    assert "cutlass" not in found(range(65, 513), True) + found(range(33), True)


@pytest.mark.parametrize(("rows", "served"), [(16, False), (64, True), (300, True), (4096, True)])
def test_where_nobody_tuned_the_model_chooses_among_both(rows, served, there):
    dispatcher = offline_dispatcher(H200)
    found = {
        dispatcher.select(replace(NOBODYS, m=rows, scales=scales), Budget(sms, "mask", True)).kernel
        for scales in ("block", "row") for sms in (24, 40, 60)
    }  # fmt: skip
    assert ("cutlass" in found) is served


@pytest.mark.parametrize(
    "problem",
    [
        replace(NOBODYS, batch_invariant=True),
        replace(NOBODYS, aligned=False),
        replace(NOBODYS, kernel="own"),
        replace(NOBODYS, kernel="model"),
    ],
    ids=["batch-invariant", "unaligned", "own", "model"],
)
def test_where_it_must_not_it_does_not(problem, there):
    dispatcher = offline_dispatcher(H200)
    for num_sms in (24, 60):
        assert dispatcher.select(problem, Budget(num_sms, "mask", True)).kernel != "cutlass"


def test_gate_and_up_of_many_rows_stay_our_own_kernel(there, monkeypatch):
    """One multiplies, gates and quantizes: none of CUTLASS's does, whose cubins are at hand."""
    monkeypatch.setattr(cute, "_is_kept", lambda path: True)
    dispatcher = offline_dispatcher(H200)
    gate = ScaledProblem(300, 24576, 4096, epilogue=Epilogue(swiglu=True), scales="block")
    assert fp8.serves_gated(gate, (9, 0))
    for num_sms, m in product((52, 100, 132), (257, 300, 384, 1000, 4096)):
        problem, budget = replace(gate, m=m), Budget(num_sms, "mask", True)
        found = dispatcher.select(problem, budget)
        assert replace(found, group_m=1) == replace(fp8.GATED, group_m=1)
        plain = dispatcher.select(replace(problem, epilogue=Epilogue(), kernel="cutlass"), budget)
        assert cute.serves((9, 0), replace(problem, epilogue=Epilogue()), plain)
        assert not cute.serves((9, 0), problem, plain)


def test_every_kernel_fits_an_sm():
    made = fp8_cutlass.variants((9, 0))
    assert {config.ctas_per_sm for config in made} == {1, 2}
    for config in made:
        each = shared_bytes(config) + fp8_cutlass.SCALE_BYTES
        assert ctas_fit(each, config.ctas_per_sm, (9, 0))
        parts = config.num_warps // 4
        multiplying, copying = fp8_cutlass.registers(parts, config.ctas_per_sm)
        all_groups = parts * multiplying + copying
        assert 128 * all_groups * config.ctas_per_sm <= REGISTERS_PER_SM
    assert not fp8_cutlass.variants((10, 0))
