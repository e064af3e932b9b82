"""The GEMM suites on a fake device: CPU tensors, a virtual clock, no partitions."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

import smkern
from smkern.bench import batch_invariant, cliffs, gemm, gemm_providers, untuned
from smkern.bench.cases import Group
from smkern.bench.frame import Rounds
from smkern.bench.gemm_providers import GemmBench, GemmCase
from smkern.bench.gemm_rows import is_losing
from smkern.bench.results import load_results
from smkern.measure import compiling
from smkern.measure.gemm import BUDGETS, MS, SHAPES, GemmOperands
from smkern.ops.gemm.dispatch import offline_dispatcher
from smkern.profile import load_profile
from tests.bench.doubles import FakePartitions, Meter, run_suite

N, K = 48, 32


def test_the_suite_is_every_shape_row_and_budget_once():
    groups = gemm.gemm_groups()
    assert len(groups) == len(set(groups)) == len(SHAPES) * len(MS) * len(BUDGETS) == 810
    assert groups == sorted(groups, key=lambda group: SHAPES.index(group.case.shape))


def test_streaming_adds_24_sms_for_decode_rows_of_the_widest_weight():
    extra = set(gemm.gemm_groups(streaming=True)) - set(gemm.gemm_groups())
    assert {(*g.case.shape, g.num_sms) for g in extra} == {(28672, 4096, 24)}
    assert {g.case.m for g in extra} == {1, 8, 16, 32, 64}


@pytest.fixture
def dispatcher():
    return offline_dispatcher(load_profile("h200"), None)


@pytest.fixture
def partitions(cuda) -> FakePartitions:
    return FakePartitions(cuda)


@pytest.fixture
def bench(dispatcher) -> GemmBench:
    return GemmBench(GemmOperands(N, K, 64, device="cpu", num_sets=2), dispatcher, 100.0)


@pytest.fixture
def measure(partitions, bench):
    """The cells of 7 rows in a budget, by provider and placement."""
    rounds = Rounds(partitions, load_profile("h200"), Meter())

    def cells(num_sms):
        found = rounds.measure(bench, Group(GemmCase(7, N, K), num_sms), None)
        return {(cell["provider"], cell["placement"]): cell for cell in found}

    return cells


def test_a_group_has_every_provider_with_figures_or_a_reason(measure):
    cells = measure(16)
    ours = {"smkern", "smkern:static", "smkern:triton", "smkern:model"}
    wanted = ours | {"cublas", "cublas-full", "wrong-budget"}
    assert {provider for provider, _ in cells} == wanted
    assert {("cublas", "spread"), ("cublas", "default")} <= set(cells)
    dispatched = cells["smkern", "spread"]
    assert dispatched["vs_cublas"] > 0
    assert dispatched["best_cublas"] in ("spread", "default")
    assert dispatched["case"] == {"m": 7, "n": N, "k": K, "dtype": "bf16"}
    assert (dispatched["sm_mhz"], dispatched["watts"]) == (1980.0, 400.0)
    assert cells["cublas-full", None]["num_sms"] == 132
    assert cells["cublas-full", None]["group_sms"] == 16
    wrong = cells["wrong-budget", "spread"]
    assert wrong["case"]["budget_told"] == 132
    assert wrong["us"] is None
    assert "only chooses" in wrong["error"]


def test_the_same_configuration_is_measured_once(measure):
    cells = measure(16)
    twin = cells["smkern:model", "spread"]
    assert twin["same_as"] == "smkern"
    assert twin["us"] == cells["smkern", "spread"]["us"]


def test_static_weights_are_promised_in_launches_of_their_own(measure, monkeypatch):
    real, promised = smkern.gemm, []

    def gemm(*args, static_weights, **kwargs):
        promised.append(static_weights)
        return real(*args, static_weights=static_weights, **kwargs)

    monkeypatch.setattr(smkern, "gemm", gemm)
    cells = measure(16)
    assert set(promised) == {False, True}
    assert cells["smkern:static", "spread"]["config"] == cells["smkern", "spread"]["config"]
    assert "same_as" not in cells["smkern:static", "spread"]


def test_the_whole_chip_has_one_cublas_and_no_wrong_budget(measure):
    cells = measure(132)
    assert [name for name, _ in cells if "cublas" in name] == ["cublas"]
    assert all(cell["mode"] == "full" for cell in cells.values())
    assert ("wrong-budget", None) not in cells


def test_a_peer_that_cannot_launch_has_an_error_and_the_other_place_counts(
    measure, partitions, monkeypatch
):
    real, small = torch.mm, partitions.at(16)

    def mm(*args, **kwargs):
        if partitions.cuda.current is small.stream:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED")
        return real(*args, **kwargs)

    monkeypatch.setattr(torch, "mm", mm)
    cells = measure(16)
    assert "EXECUTION_FAILED" in cells["cublas", "spread"]["error"]
    assert cells["smkern", "spread"]["best_cublas"] == "default"


def test_a_wrong_result_is_an_error_not_a_time(measure, monkeypatch):
    monkeypatch.setattr(torch, "mm", lambda a, w, out: out.zero_())
    cells = measure(16)
    assert "wrong result" in cells["cublas", "default"]["error"]
    assert "vs_cublas" not in cells["smkern", "spread"]


def test_an_unwritten_output_is_wrong(measure, monkeypatch):
    monkeypatch.setattr(torch, "mm", lambda a, w, out: out)
    cells = measure(132)
    assert "nan" in cells["cublas", None]["error"]


def test_a_budget_without_a_partition_has_the_peers_that_run(measure):
    assert set(measure(17)) == {("cublas-full", None)}


@pytest.fixture
def small(virtual_gpu, dispatcher, monkeypatch):
    """The suites on weights of 48 x 32 in CPU tensors; nothing is compiled."""

    def operands(n, k, rows, num_sets=2):
        return GemmOperands(n, k, rows, device="cpu", num_sets=2)

    for module in (gemm, gemm_providers, compiling, untuned):
        monkeypatch.setattr(module, "dispatcher_of", lambda: dispatcher)
    for module in (gemm_providers, batch_invariant):
        monkeypatch.setattr(module, "GemmOperands", operands)
    for module in (gemm, cliffs, batch_invariant):
        monkeypatch.setattr(module, "SHAPES", ((N, K),))
        monkeypatch.setattr(module, "MS", (7, 8))
    compiled = []
    for module, name in ((gemm, "compile_configs"), (compiling, "compile_configs")):
        monkeypatch.setattr(module, name, lambda x, done=None: compiled.append([*x]))
    return compiled


def test_the_suite_measures_writes_and_resumes(small, tmp_path):
    out = tmp_path / "gemm.json"
    assert "0 groups left" in run_suite(gemm.command, out, "--budgets", "16,132", "--no-again")
    results = load_results(out)
    assert {(c["case"]["m"], c["group_sms"]) for c in results.cells} == {
        (7, 16), (7, 132), (8, 16), (8, 132),
    }  # fmt: skip
    assert results.summary["geomean_vs_cublas"]["smkern"]["cells"] == 4
    assert len(small[0]) > 1, "what the groups launch is compiled before they are measured"
    run_suite(gemm.command, out, "--budgets", "16,24,132", "--no-again", "--resume")
    assert len(load_results(out).cells) > len(results.cells)
    assert {problem.m for problem, _ in small[1]} == {7, 8}


def test_a_losing_cell_is_measured_once_more(small, tmp_path, monkeypatch):
    limits = {"smkern": 1e9, "smkern:triton": 1e9}
    monkeypatch.setattr(gemm, "is_losing", lambda cell, _: is_losing(cell, limits))
    run_suite(gemm.command, tmp_path / "gemm.json", "--budgets", "16")
    cells = load_results(tmp_path / "gemm.json").cells
    ours = [cell for cell in cells if cell["provider"] == "smkern"]
    assert len(ours) == 2
    assert all(cell["vs_cublas_again"] > 0 for cell in ours)


def test_what_nobody_tuned_has_the_model_s_cells_dispatch_s_and_cublas(
    small, tmp_path, monkeypatch
):
    groups = [Group(GemmCase(7, N, K), 16)]
    monkeypatch.setattr(untuned, "untuned_groups", lambda total: groups)
    run_suite(untuned.command, tmp_path / "untuned.json", "--no-again")
    results = load_results(tmp_path / "untuned.json")
    assert {cell["provider"] for cell in results.cells} == {"smkern:model", "smkern", "cublas"}
    assert results.summary["untuned_geomean"]["cells"] == 1
    assert results.summary["untuned_dispatched_geomean"]["cells"] == 1


def test_left_out_shapes_are_chosen_by_the_constants_without_them(
    small, tmp_path, monkeypatch, dispatcher
):
    constants = dispatcher.constants
    seen = []
    given = lambda shape, folder: seen.append(shape) or constants  # noqa: E731
    monkeypatch.setattr(untuned, "constants_without", given)
    monkeypatch.setattr(untuned, "gemm_groups", lambda budgets: [Group(GemmCase(7, N, K), 16)])
    out = tmp_path / "left_out.json"
    run_suite(untuned.command, out, "--left-out", str(tmp_path))
    assert {cell["provider"] for cell in load_results(out).cells} == {
        "smkern:triton",
        "smkern:model",
    }
    assert set(seen) == {(N, K)}


def test_cliffs_measure_every_budget_and_name_what_cannot_run(small, tmp_path):
    out = tmp_path / "cliffs.json"
    assert "of 2 cases without a cliff" in run_suite(
        cliffs.command, out, "--budgets", "16,17,18,132"
    )
    results = load_results(out)
    cells = {cell["num_sms"]: cell for cell in results.cells if cell["case"]["m"] == 7}
    assert set(cells) == {16, 17, 18, 132}
    assert all(cells[n]["us"] and cells[n]["group_sms"] == n for n in (16, 18, 132))
    assert cells[17]["error"] == "no partition of 17 SMs"
    assert cells[132]["mode"] == "full"
    assert "vs" not in cells[16]
    run_suite(cliffs.command, out, "--budgets", "16,132", "--own", "--resume")
    providers = {cell["provider"] for cell in load_results(out).cells}
    assert providers == {"smkern", "smkern:triton"}


def test_batch_invariant_cells_are_paired_and_bits_compared(small, tmp_path):
    out = tmp_path / "batch_invariant.json"
    run_suite(batch_invariant.command, out, "--budgets", "16,60")
    results = load_results(out)
    by = {(c["provider"], c["case"]["m"], c["num_sms"]): c for c in results.cells}
    assert len(by) == 2 * 2 * 2
    assert by["batch-invariant", 7, 16]["over_dispatched"] > 0
    assert "over_dispatched" not in by["smkern", 7, 16]
    assert results.summary["cells"] == 4
    assert set(results.summary["rows_that_differ"]) == {f"{N}x{K}"}


@pytest.mark.parametrize("command", [gemm.command, cliffs.command, batch_invariant.command])
def test_commands_explain_themselves(command):
    shown = CliRunner().invoke(command, ["--help"])
    assert shown.exit_code == 0
    for option in ("--out", "--budgets", "--shapes", "--ms", "--quick", "--resume"):
        assert option in shown.output
