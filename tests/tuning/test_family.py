"""Families with buckets: which cells serve a problem, their files, and the model elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest

from smkern.errors import BudgetError, TableError
from smkern.profile import load_profile
from smkern.tuning.append import APPEND_FAMILY, AppendConfig, AppendProblem
from smkern.tuning.attention.select import ATTENTION_FAMILY
from smkern.tuning.attention.shapes import AttentionProblem, AttentionShape
from smkern.tuning.cells import PROVENANCE, Cells, Tuned
from smkern.tuning.config import Budget
from smkern.tuning.families import FAMILIES
from smkern.tuning.family import BucketFamily
from smkern.tuning.grouped import GROUPED_FAMILY, GroupedConfig, GroupedProblem, configs_of
from smkern.tuning.moe import MOE_FAMILY, MoeConfig, PermuteProblem
from smkern.tuning.sample import SAMPLE_FAMILY, SampleConfig, SampleProblem

META = dict.fromkeys(PROVENANCE, "x") | {"gpu": "NVIDIA H200"}
BUDGET = Budget(32, "mask")
PROFILE = load_profile("h200")
GATE_UP = GroupedProblem(512, 128, 768, 2048, swiglu=True)


@dataclass(frozen=True)
class Case:
    """A family and a problem of 512 rows.

    Args:
        tuned: A legal configuration, not the model's choice.
        illegal: One that no kernel is made for.
        size: Name of the bucketed size.
        other: A change for which the cell must not serve.
    """

    family: BucketFamily[Any, Any]
    problem: Any
    tuned: Any
    illegal: Any
    size: str
    other: dict[str, Any]


CASES = {
    "sample": Case(
        SAMPLE_FAMILY, SampleProblem(512, 151_936),
        SampleConfig(8, 2, pdl=False), SampleConfig(32, 8), "rows", {"vocab": 32_000},
    ),
    "append": Case(
        APPEND_FAMILY,
        AppendProblem(512, 64, 32, 8, 128, 16, rotary_dim=128, norm=True, ragged=True),
        AppendConfig(16, 1), AppendConfig(16, 8), "tokens", {"norm": False},
    ),
    "moe": Case(
        MOE_FAMILY, PermuteProblem(512, 8, 128, 2048), MoeConfig(16, 1, counted=True, pdl=False),
        MoeConfig(3), "tokens", {"hidden": 4096},
    ),
    "grouped_gemm": Case(
        GROUPED_FAMILY, GATE_UP, replace(configs_of(GATE_UP, 90)[3], pdl=False),
        GroupedConfig("ws", 48, 64, 64), "rows", {"k": 1024},
    ),
}  # fmt: skip
EACH = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def table_of(case: Case, config: Any) -> Any:
    key = case.family.key_of(case.problem, BUDGET)
    return case.family.table_of(Cells({}, {key: Tuned(config, 3.0)}))


@EACH
def test_a_cell_serves_two_octaves_around_it(case: Case) -> None:
    table = table_of(case, case.tuned)
    for size, served in ((64, False), (65, True), (512, True), (2048, True), (2049, False)):
        problem = replace(case.problem, **{case.size: size})
        found = case.family.select(problem, BUDGET, PROFILE, table)
        legal = case.family.is_legal(problem, case.tuned, BUDGET, PROFILE)
        assert found.source == ("table" if served and legal else "model")
        model = case.family.choose(problem, BUDGET, PROFILE)
        assert found.config == (case.tuned if found.source == "table" else model)


@EACH
def test_anything_else_is_the_models(case: Case) -> None:
    table, family = table_of(case, case.tuned), case.family
    assert family.choose(case.problem, BUDGET, PROFILE) != case.tuned
    assert family.config(case.problem, BUDGET, PROFILE, table) == case.tuned
    others = [
        (replace(case.problem, **case.other), BUDGET),
        (case.problem, replace(BUDGET, num_sms=34)),
        (case.problem, replace(BUDGET, confined="grid")),
    ]
    for problem, budget in others:
        assert family.select(problem, budget, PROFILE, table).source == "model"
    assert family.select(case.problem, BUDGET, PROFILE).source == "model"


@EACH
def test_an_illegal_cell_is_passed_over(case: Case) -> None:
    table = table_of(case, case.illegal)
    assert case.family.select(case.problem, BUDGET, PROFILE, table).source == "model"


@EACH
def test_what_is_written_is_what_dispatch_takes(case, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("smkern.tuning.cells.user_path", lambda gpu, op: tmp_path / f"{op}.json")
    file = case.family.file(tmp_path / f"{case.family.name}.json")
    cells = {case.family.key_of(case.problem, BUDGET): Tuned(case.tuned, 4.25)}
    file.merge(cells, META)
    assert file.load("NVIDIA H200").cells == cells
    assert case.family.selector(PROFILE)(case.problem, BUDGET) == case.tuned
    with pytest.raises(TableError, match="tuned on"):
        file.load("NVIDIA B200")


@EACH
def test_what_no_problem_of_a_cell_may_run_is_refused(case, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("smkern.tuning.cells.user_path", lambda gpu, op: tmp_path / f"{op}.json")
    key = case.family.key_of(case.problem, BUDGET)
    file = case.family.file(tmp_path / f"{case.family.name}.json")
    good = Tuned(case.tuned, 4.25)
    for wrong in (Tuned(case.illegal, 4.25), Tuned(replace(case.tuned, ctas_per_sm=0), 4.25)):
        file.merge({key: wrong}, META)
        with pytest.raises(TableError, match=r"invalid cell.*every candidate's constraints"):
            case.family.load(PROFILE)
    file.merge({replace(key, num_sms=0): good, key: good}, META)
    with pytest.raises(TableError, match="breaks num_sms"):
        case.family.load(PROFILE)


@EACH
def test_a_cell_of_an_empty_bucket_is_refused(case, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("smkern.tuning.cells.user_path", lambda gpu, op: tmp_path / f"{op}.json")
    key = replace(case.family.key_of(case.problem, BUDGET), **{case.size: 0})
    cells = {key: Tuned(case.family.choose(case.problem, BUDGET, PROFILE), 4.25)}
    case.family.file(tmp_path / f"{case.family.name}.json").merge(cells, META)
    with pytest.raises(TableError, match=rf"invalid cell.*breaks {case.size} of at least 1"):
        case.family.load(PROFILE)


@EACH
@pytest.mark.parametrize("size", [1, 3, 100, 129, 513, 1000, 1025, 5000])
def test_whatever_the_tuner_may_measure_is_legal_in_its_cell(case: Case, size: int) -> None:
    problem = replace(case.problem, **{case.size: size})
    for budget in (BUDGET, Budget(32, "grid")):
        key = case.family.key_of(problem, budget)
        for config in case.family.candidates(problem, budget, PROFILE):
            assert not case.family.broken(key, Tuned(config, 1.0), PROFILE), config


@pytest.mark.parametrize("q_len", [1, 2, 3, 5, 8, 9, 100, 4096])
@pytest.mark.parametrize("heads", [(32, 8, 128), (64, 2, 64), (16, 16, 256), (24, 1, 96)])
def test_attention_may_measure_what_its_cells_may_hold(q_len: int, heads: Any) -> None:
    shape = AttentionShape(5, *heads, 16, q_len, 3000, 5 * q_len, 15_000)
    problem, family = AttentionProblem(shape), ATTENTION_FAMILY
    for budget in (BUDGET, Budget(32, "grid")):
        for config in family.candidates(problem, budget, PROFILE):
            key = family.key_of(problem, budget)
            assert not family.broken(key, Tuned(config, 1.0), PROFILE), config


@EACH
@pytest.mark.parametrize("confined", ["grid", "mask"])
@pytest.mark.parametrize("size", [1, 8, 512, 8192])
@pytest.mark.parametrize("aligned", [True, False])
def test_choices_are_legal_and_more_sms_never_slower(case, aligned, size, confined) -> None:
    problem = replace(case.problem, aligned=aligned, **{case.size: size})
    times = []
    for num_sms in (1, *range(2, 134, 2)):
        budget = Budget(num_sms, confined)
        config = case.family.choose(problem, budget, PROFILE)
        assert config in case.family.candidates(problem, budget, PROFILE)
        assert case.family.is_legal(problem, config, budget, PROFILE)
        assert confined == "mask" or config.ctas_per_sm == 1
        times.append(case.family.predict_us(problem, config, budget, PROFILE))
    assert all(later <= 1.02 * earlier for earlier, later in pairwise(times)), times


@EACH
def test_no_budget(case: Case) -> None:
    with pytest.raises(BudgetError, match="num_sms is 0"):
        case.family.config(case.problem, Budget(0, "mask"), PROFILE)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_what_ships_loads_and_an_unknown_gpu_has_nothing(family: Any) -> None:
    assert all(cell.us > 0 for cell in family.load(PROFILE).cells.values())
    unknown = replace(PROFILE, info=replace(PROFILE.info, name="NVIDIA Nothing"))
    assert not family.load(unknown).cells
