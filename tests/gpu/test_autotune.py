"""The tuner on a GPU: a small table, made inside partitions, that dispatch then follows."""

import pytest
from click.testing import CliRunner

from smkern.autotune import fit, raw
from smkern.autotune.main import command
from smkern.device import device_info
from smkern.profile import load_profile
from smkern.tuning.config import GemmProblem
from smkern.tuning.constraints import OPTIONAL
from smkern.tuning.select import GEMM_FAMILY, select_gemm

ARGUMENTS = ["--shapes", "1024x1024", "--ms", "16,300", "--budgets", "16,100", "--top", "3"]


def tune(tmp_path, *more):
    paths = ["--out", str(tmp_path / "gemm.json"), "--raw", str(tmp_path / "raw.jsonl")]
    result = CliRunner().invoke(command, [*ARGUMENTS, *paths, *more], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned")
    tune(folder)
    return folder


def test_every_cell_has_a_winner_and_no_candidate_is_wrong(tuned):
    table = GEMM_FAMILY.file(tuned / "gemm.json").load(device_info().name)
    assert len(table.cells) == 4
    record = raw.load(tuned / "raw.jsonl")
    own = [item for item in record if item.config.kernel != "cublaslt"]
    assert len(own) >= 12
    assert {item.error for item in own} == {None}
    assert all(cell.own_us > 1 for cell in table.cells.values())
    assert {key.num_sms for key in table.cells} == {16, 100}
    assert {key.confined for key in table.cells} == {"mask"}


def test_run_again_it_measures_nothing(tuned):
    assert "0 cells to measure" in tune(tuned)


def test_dispatch_follows_the_table(tuned):
    table = GEMM_FAMILY.table_of(GEMM_FAMILY.file(tuned / "gemm.json").load())
    profile = load_profile(0)
    for key, cell in table.cells.items():
        budget = next(
            item.budget for item in raw.load(tuned / "raw.jsonl") if fit.key_of(item) == key
        )
        problem = GemmProblem(key.m, key.n, key.k)
        found = select_gemm(problem, budget, profile, table)
        wanted = cell.own if cell.config.kernel in OPTIONAL else cell.config
        assert (found.source, found.config) == ("table", wanted)


def test_the_record_can_be_fitted(tuned):
    result = CliRunner().invoke(fit.command, [str(tuned / "raw.jsonl"), "--iterations", "2"])
    assert result.exit_code == 0, result.output
    assert "fitted: 4 cells" in result.output


def test_without_a_mask(tmp_path):
    assert "1 cells in" in tune(tmp_path, "--ms", "16", "--budgets", "32")
    tune(tmp_path, "--confined", "grid", "--ms", "300", "--budgets", "32", "--fresh")
    table = GEMM_FAMILY.file(tmp_path / "gemm.json").load()
    assert {key.confined for key in table.cells} == {"mask", "grid"}


def test_gemm_swiglu_is_tuned_fused_and_unfused(tmp_path):
    paths = ["--out", str(tmp_path / "gemm.json"), "--raw", str(tmp_path / "raw.jsonl")]
    wanted = ["--op", "gemm_swiglu", "--shapes", "512x1024", "--ms", "16,300", "--budgets", "16"]
    result = CliRunner().invoke(command, [*wanted, "--top", "3", *paths], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    table = GEMM_FAMILY.table_of(GEMM_FAMILY.file(tmp_path / "gemm.json").load(device_info().name))
    assert {(key.n, key.epilogue) for key in table.cells} == {(1024, "swiglu")}
    record = raw.load(tmp_path / "raw.jsonl")
    assert {item.error for item in record} == {None}
    assert {"unfused", "ws"} <= {item.config.kernel for item in record}
    for item in record:
        found = table.lookup(item.problem, item.budget, allow_cublaslt=False)
        assert found is not None
        assert found.kernel in ("ws", "tma")
