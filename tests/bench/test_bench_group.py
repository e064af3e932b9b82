"""The GEMM suites end to end on a fake device: CPU tensors, a virtual clock, no partitions."""

from __future__ import annotations

import pytest
import torch
from click.testing import CliRunner

from smkern.bench import batch_invariant, cliffs, gemm, host_cost
from smkern.bench.cases import Group
from smkern.bench.group import GroupRunner, note_again
from smkern.bench.power import PowerMeter
from smkern.bench.results import Results, load_results
from smkern.device import Budget
from smkern.measure.gemm import GemmOperands
from smkern.measure.partitions import Place
from smkern.measure.timing import sets_for
from smkern.ops.gemm.dispatch import offline_dispatcher
from smkern.profile import load_profile

N, K = 48, 32


class FakePartitions:
    """Every even budget has a spread place, multiples of 8 a default one; 132 is the chip."""

    def __init__(self, cuda) -> None:
        self.cuda = cuda
        self.full = Place(132, "full", None, cuda.new_stream(), Budget(132, "grid", True))

    def at(self, num_sms, placement="spread"):
        if num_sms == 132:
            return self.full
        if num_sms % (2 if placement == "spread" else 8):
            return None
        budget = Budget(num_sms, "mask", placement == "default")
        return Place(num_sms, "green", placement, self.cuda.new_stream(), budget)


@pytest.fixture
def partitions(cuda) -> FakePartitions:
    return FakePartitions(cuda)


@pytest.fixture
def runner(partitions) -> GroupRunner:
    dispatcher = offline_dispatcher(load_profile("h200"), None)
    return GroupRunner(partitions, dispatcher, PowerMeter(lambda: (1980.0, 500.0)), budget_us=100.0)


@pytest.fixture
def ops() -> GemmOperands:
    return GemmOperands(N, K, 64, device="cpu", num_sets=2)


def by_provider(cells):
    return {(c["provider"], c["placement"]): c for c in cells}


def test_a_group_has_every_provider_with_figures_or_a_reason(runner, ops):
    cells = by_provider(runner.measure(Group(N, K, 7, 16), ops))
    wanted = {"smkern", "smkern:triton", "smkern:model", "cublas", "cublas-full", "wrong-budget"}
    assert {provider for provider, _ in cells} == wanted
    assert {("cublas", "spread"), ("cublas", "default")} <= set(cells)
    dispatched = cells["smkern", "spread"]
    assert dispatched["vs_cublas"] > 0
    assert dispatched["best_cublas"] in ("spread", "default")
    assert dispatched["case"] == {"m": 7, "n": N, "k": K, "dtype": "bf16"}
    assert (dispatched["sm_mhz"], dispatched["watts"]) == (1980.0, 500.0)
    assert cells["cublas-full", None]["num_sms"] == 132
    assert cells["cublas-full", None]["group_sms"] == 16
    wrong = cells["wrong-budget", "spread"]
    assert wrong["case"]["budget_told"] == 132
    assert wrong["us"] is None
    assert "only chooses" in wrong["error"]


def test_the_same_configuration_is_measured_once(runner, ops):
    cells = by_provider(runner.measure(Group(N, K, 7, 16), ops))
    twin = cells["smkern:model", "spread"]
    assert twin["same_as"] == "smkern"
    assert twin["us"] == cells["smkern", "spread"]["us"]


def test_the_whole_chip_has_one_cublas_and_no_wrong_budget(runner, ops):
    cells = runner.measure(Group(N, K, 7, 132), ops)
    assert [c["provider"] for c in cells if "cublas" in c["provider"]] == ["cublas"]
    assert all(c["mode"] == "full" for c in cells)
    assert not any(c["provider"] == "wrong-budget" for c in cells)


def test_a_peer_that_cannot_launch_has_an_error_and_the_other_place_counts(
    runner, ops, partitions, monkeypatch
):
    real = torch.mm

    def mm(*args, **kwargs):
        if runner.partitions.cuda.current is small.stream:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED")
        return real(*args, **kwargs)

    small = partitions.at(16, "spread")
    at = partitions.at
    monkeypatch.setattr(
        partitions, "at", lambda n, p="spread": small if (n, p) == (16, "spread") else at(n, p)
    )
    monkeypatch.setattr(torch, "mm", mm)
    cells = by_provider(runner.measure(Group(N, K, 7, 16), ops))
    assert "EXECUTION_FAILED" in cells["cublas", "spread"]["error"]
    assert cells["smkern", "spread"]["best_cublas"] == "default"


def test_a_wrong_result_is_an_error_not_a_time(runner, ops, monkeypatch):
    monkeypatch.setattr(torch, "mm", lambda a, w, out: out.zero_())
    cells = by_provider(runner.measure(Group(N, K, 7, 16), ops))
    assert "wrong result" in cells["cublas", "default"]["error"]
    assert "vs_cublas" not in cells["smkern", "spread"]


def test_an_unwritten_output_is_wrong(runner, ops, monkeypatch):
    monkeypatch.setattr(torch, "mm", lambda a, w, out: out)
    cells = by_provider(runner.measure(Group(N, K, 7, 132), ops))
    assert "nan" in cells["cublas", None]["error"]


def test_the_second_result_stands_beside_the_first():
    first = [
        {"provider": "smkern", "placement": "spread", "us": 10.0, "vs_cublas": 0.9},
        {"provider": "cublas", "placement": "default", "us": 9.0},
    ]
    second = [replace_us(first[0], 9.5, vs_cublas=1.0), replace_us(first[1], 9.4)]
    noted = note_again(first, second)
    assert (noted[0]["us"], noted[0]["us_again"], noted[0]["vs_cublas_again"]) == (10.0, 9.5, 1.0)
    assert noted[1]["us_again"] == 9.4
    assert note_again(first, []) == first


def replace_us(cell, us, **values):
    return {**cell, "us": us, **values}


def sitting(runner, path, tmp_limit=None):
    class NoBar:
        def add_task(self, *args, **kwargs):
            return 0

        def advance(self, *args):
            pass

    return gemm.Sitting(runner, Results(), path, gemm.Deadline.after(tmp_limit), NoBar())


@pytest.fixture
def cpu_operands(monkeypatch):
    for module in (gemm, batch_invariant):
        monkeypatch.setattr(
            module,
            "by_shape",
            lambda groups: [(GemmOperands(N, K, 256, device="cpu", num_sets=2), list(groups))],
        )


def test_a_sitting_resumes_where_it_stopped(runner, tmp_path, cpu_operands):
    groups = [Group(N, K, 7, n) for n in (16, 60, 132)]
    at_work = sitting(runner, tmp_path / "gemm.json", tmp_limit=0.0)
    at_work.measure(groups)
    assert gemm.pending(groups, at_work.results) == groups
    at_work.deadline = gemm.Deadline.after(None)
    at_work.measure(groups[:2])
    loaded = load_results(tmp_path / "gemm.json")
    assert gemm.pending(groups, loaded) == groups[2:]
    assert loaded.summary["geomean_vs_cublas"]["smkern"]["cells"] == 2


def test_losing_groups_are_measured_once_more_and_then_rest(runner, tmp_path, cpu_operands):
    groups = [Group(N, K, 7, 16)]
    at_work = sitting(runner, tmp_path / "gemm.json")
    at_work.measure(groups)
    for cell in at_work.results.cells:
        if cell["provider"] == "smkern":
            at_work.results.add({**cell, "vs_cublas": 0.5})
    assert gemm.losing(groups, at_work.results) == groups
    at_work.measure_again(groups)
    (ours,) = [c for c in at_work.results.cells if c["provider"] == "smkern"]
    assert ours["vs_cublas"] == 0.5
    assert ours["vs_cublas_again"] > 0
    assert gemm.losing(groups, at_work.results) == []


def test_cliffs_measure_every_budget_and_name_what_cannot_run(runner, ops):
    cliff = cliffs.Cliffs(runner.partitions, runner.dispatcher, runner.meter)
    results = Results()
    cliffs.measure_case(cliff, ops, 7, (16, 17, 18, 132), results)
    cells = {cell["num_sms"]: cell for cell in results.cells}
    assert all(cells[n]["us"] for n in (16, 18, 132))
    assert cells[17]["error"] == "no partition of 17 SMs"
    assert cliffs.summarize(results.cells)["of"] == 1


def test_batch_invariant_cells_are_paired(runner, ops):
    cells = batch_invariant.measure(
        Group(N, K, 7, 16), ops, runner.partitions, runner.dispatcher, runner.meter
    )
    assert [c["provider"] for c in cells] == ["smkern", "batch-invariant"]
    assert cells[1]["over_dispatched"] > 0


def test_operands_exceed_the_cache_and_differ():
    assert sets_for(2 * 28672 * 4096) == 2
    assert sets_for(2 * 4096 * 4096) * 4096 * 4096 * 2 >= 150e6
    assert sets_for(2) == 64
    ops = GemmOperands(N, K, 8, device="cpu", num_sets=2)
    assert ops.w(0).data_ptr() == ops.w(2).data_ptr() != ops.w(1).data_ptr()
    assert ops.a(4, 0).shape == (4, K)
    assert torch.equal(ops.a(4, 1), ops.a(8, 1)[:4])
    ops.poison(4)
    assert ops.error(4) != ops.error(4)
    ops.out(4, 0).copy_(ops.reference(4))
    assert ops.error(4) == 0.0


@pytest.mark.parametrize(
    "command", [gemm.command, cliffs.command, host_cost.command, batch_invariant.command]
)
def test_commands_explain_themselves(command):
    shown = CliRunner().invoke(command, ["--help"])
    assert shown.exit_code == 0
    for option in ("--out", "--budgets", "--shapes", "--ms", "--quick", "--resume"):
        assert option in shown.output


def test_without_a_gpu_a_suite_says_so(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    ran = CliRunner().invoke(gemm.command, ["--out", str(tmp_path / "x.json")])
    assert ran.exit_code == 1
    assert "GPU" in ran.output or "driver" in ran.output
    assert not (tmp_path / "x.json").exists()
