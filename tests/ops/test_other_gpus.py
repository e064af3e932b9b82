"""Dispatch on GPUs that nobody tuned: their own capability and SMs, nobody else's tables."""

from __future__ import annotations

from typing import Any

import pytest

from smkern.device import DeviceInfo
from smkern.errors import TableError
from smkern.ops.append.dispatch import append_dispatcher
from smkern.ops.attention.dispatch import attention_dispatcher
from smkern.ops.gemm.dispatch import gemm_dispatcher
from smkern.ops.moe.dispatch import moe_dispatcher
from smkern.ops.moe.grouped import grouped_dispatcher
from smkern.ops.rows.dispatch import rows_dispatcher
from smkern.ops.sample.operators import sample_dispatcher
from smkern.profile import profile_for
from smkern.tuning import constraints
from smkern.tuning.append import AppendProblem
from smkern.tuning.attention import constraints as attention_constraints
from smkern.tuning.attention.shapes import AttentionProblem, AttentionShape
from smkern.tuning.cells import PROVENANCE, user_path
from smkern.tuning.config import Budget, GemmConfig, GemmProblem
from smkern.tuning.cost_constants import DEFAULTS, load_constants
from smkern.tuning.families import FAMILIES
from smkern.tuning.grouped import GroupedProblem
from smkern.tuning.moe import TopkProblem
from smkern.tuning.rows import RowsProblem
from smkern.tuning.sample import SampleProblem
from smkern.tuning.select import GEMM_FAMILY, OWN_ROWS
from smkern.tuning.table import Cell, CellKey
from tests import gpus

GEMMS = [GemmProblem(m, n, k) for m in (1, 64, 2048) for n, k in ((6144, 4096), (4096, 14336))]
CONFIG = GemmConfig("pointer", 64, 64, 64)
META = dict.fromkeys(PROVENANCE, "x")
every_gpu = pytest.mark.parametrize("info", gpus.FOREIGN, ids=gpus.by_name)


@pytest.fixture(autouse=True)
def _no_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def budgets(info: DeviceInfo) -> list[Budget]:
    """All SMs, and some under a mask and under the grid alone."""
    some = max(info.min_sms, info.num_sms // 4 // info.min_sms * info.min_sms)
    whole = Budget(info.num_sms, "mask", True)
    return [whole, Budget(some, "mask", False), Budget(some, "grid", info.capability >= (9, 0))]


@every_gpu
def test_a_gemm_runs_kernels_of_its_own_device(info, monkeypatch) -> None:
    gpus.install(monkeypatch, info)
    dispatcher = gemm_dispatcher.__wrapped__(0)
    assert dispatcher.profile.info == info
    assert not dispatcher.tables.cells
    hopper = info.capability[0] == 9
    assert dispatcher.constants == (load_constants("NVIDIA H200") if hopper else DEFAULTS)
    for problem in GEMMS:
        for budget in budgets(info):
            found = dispatcher.select(problem, budget)
            many = problem.m > OWN_ROWS and budget.num_sms == info.num_sms
            assert found.source == ("library" if many else "model")
            assert found.predicted_us > 0
            assert not constraints.violations(problem, found.config, budget, info.capability)
            wgmma = found.config.kernel == "ws"
            assert not wgmma or info.capability[0] == 9


@pytest.mark.parametrize("info", gpus.PARTS, ids=gpus.by_sms)
def test_a_part_of_a_tuned_gpu_takes_its_tables(info, monkeypatch) -> None:
    """Cells on more SMs than the process sees tell nothing."""
    gpus.install(monkeypatch, info)
    dispatcher, sources = gemm_dispatcher.__wrapped__(0), set()
    for problem in GEMMS:
        for num_sms in range(16, info.num_sms + 1, 2):
            budget = Budget(num_sms, "mask", 2 * num_sms > info.num_sms)
            found = dispatcher.select(problem, budget)
            assert not constraints.violations(problem, found.config, budget, info.capability)
            sources.add(found.source)
    assert {"table", "near"} <= sources


@every_gpu
def test_attention_runs_kernels_of_its_own_device(info, monkeypatch) -> None:
    gpus.install(monkeypatch, info)
    dispatcher = attention_dispatcher.__wrapped__(0)
    assert dispatcher.profile.info == info
    assert not dispatcher.table.cells
    for max_q_len, batch in ((1, 64), (4096, 2)):
        shape = AttentionShape(
            batch, 32, 8, 128, 16, max_q_len, 8192, max_q_len * batch, 8192 * batch
        )
        problem = AttentionProblem(shape)
        for budget in budgets(info):
            found = dispatcher.select(problem, budget)
            assert found.source == "model"
            assert found.config.kernel == ("cuda" if info.capability == (9, 0) else "triton")
            broken = attention_constraints.violations(
                problem, found.config, budget, info.capability
            )
            assert not broken


def small_choices(index: int) -> dict[str, tuple[Any, Any]]:
    """A dispatcher and a problem of each small family."""
    return {
        "append": (
            append_dispatcher.__wrapped__(index),
            AppendProblem(64, 64, 32, 8, 128, 16, rotary_dim=128, norm=True, ragged=True),
        ),
        "rows": (rows_dispatcher.__wrapped__(index), RowsProblem("rms_norm", 64, 4096)),
        "sample": (sample_dispatcher.__wrapped__(index), SampleProblem(64, 151_936)),
        "moe": (moe_dispatcher.__wrapped__(index), TopkProblem(64, 128, 8)),
        "grouped_gemm": (
            grouped_dispatcher.__wrapped__(index),
            GroupedProblem(512, 128, 768, 2048, swiglu=True),
        ),
    }


@pytest.mark.parametrize("family", ["append", "rows", "sample", "moe", "grouped_gemm"])
@every_gpu
def test_a_small_operator_knows_its_own_device(info, family, monkeypatch) -> None:
    gpus.install(monkeypatch, info)
    dispatcher, problem = small_choices(0)[family]
    assert dispatcher.profile.info == info
    for budget in budgets(info):
        config = dispatcher.select(problem, budget)
        if family == "grouped_gemm":
            assert config.kernel == "pointer" or info.capability[0] == 9


@every_gpu
def test_no_table_of_another_gpu_is_found(info) -> None:
    assert not any(family.load(profile_for(info)).cells for family in FAMILIES)
    constants = load_constants(info.name, info.capability)
    hopper = info.capability[0] == 9
    assert constants == (load_constants("NVIDIA H200") if hopper else DEFAULTS)


def test_a_table_of_another_gpu_in_this_ones_place_is_refused_and_left() -> None:
    path = user_path(gpus.A100.name)
    key = CellKey.of(GEMMS[0], Budget(32, "mask"))
    store = GEMM_FAMILY.file(path)
    store.merge({key: Cell(CONFIG, 1.0, CONFIG, 1.0)}, META | {"gpu": "NVIDIA H200"})
    before = path.read_bytes()
    with pytest.raises(TableError, match=r"tuned on 'NVIDIA H200', and this is 'NVIDIA A100"):
        GEMM_FAMILY.load(profile_for(gpus.A100))
    with pytest.raises(TableError, match="tuned on 'NVIDIA H200'"):
        store.merge({key: Cell(CONFIG, 2.0, CONFIG, 2.0)}, META | {"gpu": gpus.A100.name})
    assert path.read_bytes() == before


def test_what_is_tuned_here_is_what_dispatch_reads_here(monkeypatch) -> None:
    """Under its own name, so a second run finds the first one's cells."""
    gpus.install(monkeypatch, gpus.H100)
    budget = Budget(32, "mask", False)
    cells = {CellKey.of(GEMMS[0], budget): Cell(CONFIG, 1.0, CONFIG, 1.0)}
    for _ in range(2):
        GEMM_FAMILY.file(user_path(gpus.H100.name)).merge(cells, META | {"gpu": gpus.H100.name})
    found = gemm_dispatcher.__wrapped__(0).select(GEMMS[0], budget)
    assert (found.source, found.config) == ("table", CONFIG)


def test_two_gpus_of_different_kinds_have_a_dispatcher_each(monkeypatch) -> None:
    gpus.install(monkeypatch, gpus.H200, gpus.A100)
    problem, budget = GEMMS[-1], Budget(108, "mask", True)
    first, second = (gemm_dispatcher.__wrapped__(index) for index in (0, 1))
    assert first.tables.cells
    assert not second.tables.cells
    assert first.select(problem, budget, "model").config.kernel in ("ws", "tma")
    assert second.select(problem, budget, "model").config.kernel == "pointer"
