"""When dispatch takes a kernel that needs an extra, and what becomes of calls without it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from smkern.errors import ArgumentError, DeviceError
from smkern.kernels.cuda_source import keep_cubin
from smkern.kernels.cute import compile as cute
from smkern.kernels.gemm_variants import variant_of
from smkern.ops.gemm.dispatch import Dispatcher, offline_dispatcher
from smkern.ops.gemm.extras import Extras
from smkern.profile import load_profile
from smkern.tuning.config import Budget, Epilogue, GemmConfig, GemmProblem
from smkern.tuning.select import GEMM_FAMILY, Selection
from smkern.tuning.table import Cell, CellKey, Table
from tests.extras import set_cutlass

WS = GemmConfig("ws", 128, 128, 64, 8, 4)
CUTLASS = GemmConfig("cutlass", 80, 128, 64, 4, 8, swap=True)
PROBLEM, BUDGET = GemmProblem(77, 28672, 4096), Budget(16, "mask", False)
FOUND, BEST = Selection(WS, "table", 210.0), Selection(CUTLASS, "model", 199.0)


@pytest.fixture
def there(monkeypatch) -> None:
    set_cutlass(monkeypatch, True)


@pytest.mark.parametrize(
    ("rows", "source", "gain"),
    [(77, "table", 1.05), (77, "model", 1.0), (512, "near", 1.0), (32, "model", 1.05)],
)
def test_where_nobody_tuned_it_need_only_be_as_good(there, rows, source, gain):
    """To replace what was measured it must be faster by more than the model's error."""
    problem = replace(PROBLEM, m=rows)
    found = replace(FOUND, source=source)
    for by, chosen in ((1.005, True), (0.995, False)):
        best = replace(BEST, predicted_us=found.predicted_us / (gain * by))
        got = Extras(load_profile()).faster(problem, found, lambda kernels, x=best: x)
        assert got is (best if chosen else found)


@pytest.mark.parametrize(
    ("problem", "found", "capability"),
    [
        (replace(PROBLEM, batch_invariant=True), FOUND, (9, 0)),
        (replace(PROBLEM, aligned=False), FOUND, (9, 0)),
        (replace(PROBLEM, dtype="fp32"), FOUND, (9, 0)),
        (PROBLEM, replace(FOUND, source="warmup"), (9, 0)),
        (PROBLEM, replace(FOUND, source="library"), (9, 0)),
        (PROBLEM, FOUND, (8, 0)),
        (PROBLEM, FOUND, (10, 0)),
    ],
)
def test_where_it_cannot_run_or_must_not_the_choice_stays(there, problem, found, capability):
    def asked(kernels):
        raise AssertionError("the model is not asked")

    profile = load_profile()
    there = replace(profile, info=replace(profile.info, capability=capability))
    assert Extras(there).faster(problem, found, asked) is found


def test_without_the_package_and_cubins_the_model_is_not_asked():
    assert Extras(load_profile()).faster(PROBLEM, FOUND, lambda kernels: 1 / 0) is FOUND


def h200(tables: Table | None = None) -> Dispatcher:
    profile = load_profile()
    return offline_dispatcher(profile, tables or GEMM_FAMILY.load(profile))


def test_rows_between_powers_of_two_go_to_it_and_a_whole_wave_of_128_does_not(there):
    """The table serves 136 rows by tiles for 256; measured, one of 136 columns took 0.53 of it."""
    found = h200().select(replace(PROBLEM, m=136), BUDGET)
    assert (found.config.kernel, found.config.block_m, found.config.swap) == ("cutlass", 144, True)
    wave = replace(PROBLEM, m=128, n=4096)
    assert h200().select(wave, Budget(32, "mask", False)).config.kernel != "cutlass"
    assert h200().select(replace(PROBLEM, m=136), BUDGET, "own").config.kernel == "ws"


def test_named_without_the_package_it_is_refused_with_the_remedy(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cute, "absent", lambda: "it is not installed; pip install it")
    with pytest.raises(ArgumentError, match=r"backend='cutlass' cannot run .*pip install it"):
        h200().select(PROBLEM, BUDGET, "cutlass")
    with pytest.raises(ArgumentError, match="leave backend at None"):
        h200().select(replace(PROBLEM, aligned=False), BUDGET, "cutlass")


def test_a_tuned_cell_falls_back_to_the_best_of_the_others(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    key = CellKey.of(PROBLEM, BUDGET)
    dispatcher = h200(Table({}, {key: Cell(CUTLASS, 170.0, WS, 220.0)}))
    monkeypatch.setattr(cute, "is_there", lambda: True)
    monkeypatch.setattr(cute, "absent", lambda: "it is not installed")
    assert dispatcher.select(PROBLEM, BUDGET).config == WS
    monkeypatch.setattr(cute, "absent", lambda: "")
    assert h200(dispatcher.tables).select(PROBLEM, BUDGET).config == CUTLASS
    assert h200(dispatcher.tables).select(PROBLEM, BUDGET, "own").config == WS
    invariant = replace(PROBLEM, batch_invariant=True)
    assert h200(dispatcher.tables).select(invariant, BUDGET).config == WS


def test_a_cell_of_these_very_rows_stays_and_other_rows_give_way(there):
    """By the model 80 x 128 takes 0.6 of the time of 128 x 128."""
    cell = Cell(WS, 210.0, WS, 210.0)
    dispatcher = h200(Table({}, {CellKey.of(PROBLEM, BUDGET): cell}))
    assert dispatcher.select(PROBLEM, BUDGET).config == WS
    assert dispatcher.select(replace(PROBLEM, m=76), BUDGET).config.kernel == "cutlass"


def test_a_plain_cells_kernel_must_be_there_with_the_epilogue_too(monkeypatch, tmp_path):
    """Built with and without a residual are two cubins, and one alone may have been copied."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cute, "absent", lambda: "it is not installed")
    monkeypatch.setattr(cute, "is_there", lambda: True)
    plain, added = PROBLEM, replace(PROBLEM, epilogue=Epilogue(residual=True))
    keep_cubin(cute._path(variant_of(plain, CUTLASS, 90)), b"cubin")
    dispatcher = h200(Table({}, {CellKey.of(plain, BUDGET): Cell(CUTLASS, 170.0, WS, 220.0)}))
    assert dispatcher.select(plain, BUDGET).config == CUTLASS
    assert dispatcher.select(added, BUDGET).config == WS


class Kernels:
    """Those of a device on which CUTLASS's do not load."""

    def is_loaded(self, problem, config):
        return True

    def prepare(self, problem, config, budget):
        if config.kernel == "cutlass":
            raise DeviceError("cuModuleLoadData failed with 222: unsupported toolchain")
        return config


def test_one_that_fails_is_warned_of_once_and_others_serve(there):
    profile = load_profile()
    dispatcher = Dispatcher(profile, GEMM_FAMILY.load(profile), Kernels, Kernels)
    problem = replace(PROBLEM, m=136)
    with pytest.warns(RuntimeWarning, match="unsupported toolchain; other kernels serve"):
        assert dispatcher.plan(problem, BUDGET).kernel == "ws"
    assert dispatcher.plan(replace(problem, m=144), BUDGET).kernel == "ws"
    with pytest.raises(ArgumentError, match="failed in this process before"):
        dispatcher.plan(problem, BUDGET, "cutlass")
