"""The frame of small operators on an operator of its own: what reaches a kernel, and when."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch

from smkern.errors import ArgumentError, BudgetError, DeviceError, WarmupError
from smkern.ops import operator_eager
from smkern.ops.operator_eager import run_on_cpu
from smkern.ops.operator_library import register, run, schema_of, through_library
from smkern.ops.operator_warmup import joined, work_of
from smkern.ops.warming import Target
from smkern.tuning.config import Budget
from tests.ops.operator_cases import Call, FakeOperator, scale


@pytest.fixture
def device() -> FakeOperator:
    return FakeOperator(scale())


def rows(count: int = 3, cols: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, cols), torch.randn(count, cols)


def wanted(x: torch.Tensor, total: torch.Tensor, by: float = 1.0) -> torch.Tensor:
    return x * by + total


def test_a_combination_is_prepared_once_and_launched_each_time(device: FakeOperator) -> None:
    for _ in range(3):
        x, total = rows()
        expected, grown = wanted(x, total, 2.0), total + x
        assert torch.equal(device.eager(Call(x, total, 2.0)), expected)
        assert torch.equal(total, grown)
    assert len(device.kernels.prepared) == 1
    assert len(device.kernels.launches) == 3


@pytest.mark.parametrize("change", ["cols", "by", "budget", "stream"])
def test_another_number_is_another_combination(device: FakeOperator, change: str) -> None:
    device.eager(Call(*rows()))
    if change == "stream":
        device.stream = 8
    cols = 16 if change == "cols" else 8
    options = {"by": 3.0} if change == "by" else {"num_sms": 5} if change == "budget" else {}
    x, total = rows(3, cols)
    expected = wanted(x, total, options.get("by", 1.0))
    assert torch.equal(device.eager(Call(x, total, **options)), expected)
    assert len(device.eager.records) == 2


def test_budgets(device: FakeOperator) -> None:
    device.stream = 8
    device.eager(Call(*rows()))
    device.eager(Call(*rows(), num_sms=8))
    budgets = [budget for *_, budget in device.kernels.prepared]
    assert budgets == [Budget(32, "mask", False), Budget(8, "grid", False)]
    for bad in (0, 33, 2.5, True):
        with pytest.raises(BudgetError, match="num_sms"):
            device.eager(Call(*rows(), num_sms=bad))


def test_an_old_device_is_refused() -> None:
    with pytest.raises(DeviceError, match=r"7\.5"):
        FakeOperator(scale(), (7, 5)).eager(Call(*rows()))


def test_alignment_is_the_vectors_own(device: FakeOperator) -> None:
    x, total = rows()
    device.eager(Call(x, torch.zeros(25)[1:].view(3, 8)))
    device.eager(Call(torch.zeros(25)[1:].view(3, 8), total))
    assert [problem.aligned for problem, *_ in device.kernels.prepared] == [True, False]


def test_no_rows_launch_nothing(device: FakeOperator) -> None:
    assert device.eager(Call(*rows(0))).shape == (0, 8)
    assert not device.kernels.launches


def test_a_capture_may_not_load(device: FakeOperator) -> None:
    device.is_capturing = True
    with pytest.raises(WarmupError, match=r"smkern\.warmup\(calls"):
        device.eager(Call(*rows()))
    device.is_capturing = False
    device.eager(Call(*rows(5)))
    device.is_capturing = True
    device.eager(Call(*rows()))


def test_results_that_are_given_and_strided(device: FakeOperator) -> None:
    x, total = torch.randn(3, 20)[:, :8], torch.randn(3, 8)
    out = torch.full((3, 12), torch.nan)
    expected = wanted(x, total)
    assert device.eager(Call(x, total, out=out[:, :8])).data_ptr() == out.data_ptr()
    assert torch.equal(out[:, :8], expected)
    assert out[:, 8:].isnan().all()
    kept = x.clone()
    device.eager(Call(kept, total, out=kept))


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.zeros(3, 9), "agrees"),
        (torch.zeros(3, 8).double(), "agrees"),
        (torch.zeros(8, 3).T, "inner stride"),
        (torch.zeros(1, 8).expand(3, 8), "share an address"),
        (torch.zeros(3, 8, device="meta"), "move out"),
        ([1], "not a torch.Tensor"),
    ],
)
def test_bad_results(device: FakeOperator, out: Any, message: str) -> None:
    for call in (device.eager, lambda call: run_on_cpu(scale(), call)):
        with pytest.raises(ArgumentError, match=message):
            call(Call(*rows(), out=out))


@pytest.mark.parametrize("on_cpu", [False, True])
def test_overlaps(device: FakeOperator, on_cpu: bool) -> None:
    run_it: Any = (lambda call: run_on_cpu(scale(), call)) if on_cpu else device.eager
    whole = torch.zeros(6, 8)
    for call in (
        Call(whole[:3], whole[1:4]),
        Call(whole[:3], torch.zeros(3, 8), out=whole[1:4]),
        Call(torch.zeros(3, 8), whole[:3], out=whole[:3]),
    ):
        with pytest.raises(ArgumentError, match="overlaps"):
            run_it(call)
    apart = torch.randn(3, 16)
    run_it(Call(apart[:, :8], apart[:, 8:]))
    run_it(Call(apart[:, :8], apart[:, 8:], out=apart[:, :8]))


def test_tensors_that_lie_between_each_other_are_told_from_those_that_overlap(device) -> None:
    """One combination of numbers, at changing addresses."""
    whole = torch.zeros(3, 48)
    for x, total in ((0, 8), (8, 0), (0, 8), (16, 24)):
        device.eager(Call(whole[:, x : x + 8], whole[:, total : total + 8]))
        with pytest.raises(ArgumentError, match="overlaps"):
            device.eager(Call(whole[:, x : x + 8], whole[:, x + 4 : x + 12]))
    assert len(device.kernels.prepared) == 1


def test_tensors_as_far_apart_as_before_are_not_looked_at_again(device, monkeypatch) -> None:
    """Slices of one buffer a layer, of more layers than a record remembers."""
    looked: list[Any] = []
    monkeypatch.setattr(operator_eager, "check_overlap", lambda *given: looked.append(given))
    layers = [torch.zeros(3, 48) for _ in range(2 * operator_eager._MAX_APART)]
    for at in (8, 8, 16):
        for whole in layers:
            device.eager(Call(whole[:, :8], whole[:, at : at + 8]))
    records = list(device.eager.records.values())
    assert len(records) == 1
    assert len(records[0].apart) <= operator_eager._MAX_APART + 1
    assert len(looked) == 2, "once for each distance, not for each layer"


def test_a_traceback_shows_the_generated_path(device, monkeypatch) -> None:
    call = Call(*rows())
    device.eager(call)
    monkeypatch.setattr(device.kernels, "launches", None)
    with pytest.raises(AttributeError) as caught:
        device.eager(call)
    lines = "".join(traceback.format_tb(caught.tb))
    assert "eager path of test_scale" in lines
    assert "_launch(_stream, x_ptr, total_ptr, by_ptr, out_ptr, *_numbers)" in lines


@pytest.mark.parametrize(
    "odd",
    [[1.0], torch.eye(3).to_sparse(), torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])],
    ids=["list", "sparse", "nested"],
)
def test_what_no_key_can_be_made_of_is_refused_by_name(device: FakeOperator, odd: Any) -> None:
    x, total = rows()
    for call in (Call(odd, total), Call(x, odd), Call(x, total, out=odd)):
        with pytest.raises(ArgumentError):
            device.eager(call)
    assert not device.kernels.launches


def test_a_changed_tensor_has_addresses_of_its_own(device: FakeOperator) -> None:
    with pytest.raises(ArgumentError, match="total has strides"):
        device.eager(Call(torch.zeros(3, 8), torch.zeros(1, 8).expand(3, 8)))


def test_a_workspace_comes_before_the_numbers() -> None:
    device = FakeOperator(scale(workspace=lambda problem: 1024))
    device.eager(Call(*rows()))
    (launch,) = device.kernels.launches
    assert launch[1] > 0
    assert launch[2:] == (8, 8, 8, 1.0)


def test_the_schemas() -> None:
    given = "Tensor x, Tensor(a!) total, *, float? by=1.0, Tensor? by_tensor=None"
    assert schema_of(scale(), returns=True) == (
        f"test_scale({given}, SymInt? num_sms=None) -> Tensor"
    )
    assert "Tensor(a!) total, Tensor(r0!) out, *, float" in schema_of(scale(), returns=False)


@pytest.fixture(scope="module")
def registered() -> Any:
    op = scale("test_scale_registered")
    return op, register(op)


@pytest.mark.parametrize("by", [2.0, torch.tensor(2.0)])
@pytest.mark.parametrize("given", [False, True])
def test_through_the_library(registered: Any, by: Any, given: bool) -> None:
    op, _ = registered
    x, total = rows()
    expected, grown = wanted(x, total, 2.0), total + x
    out = torch.zeros(3, 8) if given else None
    found = through_library(op, Call(x, total, by, out))
    assert torch.equal(found, expected)
    assert torch.equal(total, grown)
    assert found is out or not given


def test_opcheck(registered: Any) -> None:
    operators = torch.ops.smkern
    torch.library.opcheck(operators.test_scale_registered.default, rows(), {"by": 2.0})
    args = (*rows(), torch.zeros(3, 8))
    torch.library.opcheck(operators.test_scale_registered_out.default, args, {"by": 2.0})


def test_fakes_are_checked(registered: Any) -> None:
    op, _ = registered
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert run(op, Call(torch.empty(3, 8), torch.empty(3, 8))).shape == (3, 8)
        with pytest.raises(ArgumentError, match="total"):
            run(op, Call(torch.empty(3, 8), torch.empty(3, 4)))


def test_bad_first_argument_and_cpu(registered: Any) -> None:
    op, _ = registered
    for bad in (None, [1.0]):
        with pytest.raises(ArgumentError, match="pass a matrix"):
            run(op, Call(bad, torch.zeros(3, 8)))
    with pytest.raises(BudgetError):
        run(op, Call(*rows(), num_sms=0))
    x, total = rows()
    expected = wanted(x, total)
    assert torch.equal(run(op, Call(x, total, out=x)), expected)
    assert torch.equal(x, expected)


def test_the_work_of_a_warmup(device: FakeOperator) -> None:
    target = Target(-1, 132, [], (True,))
    made = [Call(*rows()), Call(*rows(3, 16)), Call(*rows(5))]
    work = work_of(device.eager.op, made, target, device.eager)
    assert (work.choices, work.variants, len(work.compile), len(work.launches)) == (3, 2, 2, 3)
    for launch in work.launches:
        launch()
    assert not work_of(device.eager.op, made, target, device.eager).compile
    both = joined([work, work])
    assert (both.choices, len(both.compile), len(both.launches)) == (6, 2, 6)
