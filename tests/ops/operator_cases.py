"""A small operator of two tensors, one of them changed, and a device that is not there for it."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from smkern.errors import ArgumentError
from smkern.ops.checks import check_kind
from smkern.ops.operator import Operator
from smkern.ops.operator_dispatch import OperatorDispatcher
from smkern.ops.operator_eager import EagerOperator
from smkern.ops.workspace import Workspaces
from smkern.tuning.config import Budget
from tests.ops.conftest import FakeProfile, memory, streams_of


class Call(NamedTuple):
    """y = x * by + total; total grows by x."""

    x: Any
    total: Any
    by: Any = 1.0
    out: Any = None
    num_sms: Any = None


class Problem(NamedTuple):
    rows: int
    cols: int
    aligned: bool


def check(call: Call) -> None:
    if not isinstance(call.x, torch.Tensor) or call.x.dim() != 2:
        raise ArgumentError(f"x is {call.x!r}: pass a matrix")
    check_kind("total", call.total)
    if call.total.shape != call.x.shape:
        raise ArgumentError(f"total is {list(call.total.shape)}, x {list(call.x.shape)}")


def problem_of(call: Call, aligned: bool) -> Problem | None:
    rows, cols = call.x.shape
    return Problem(rows, cols, aligned) if rows and cols else None


def reference(call: Call) -> torch.Tensor:
    result = call.x * call.by + call.total
    call.total.add_(call.x)
    return result


class FakeKernels:
    """Remembers what was asked; `launch` is what a family's kernels do."""

    def __init__(self) -> None:
        self.loaded: set[Any] = set()
        self.prepared: list[tuple[Any, Any, Any]] = []
        self.launches: list[tuple[Any, ...]] = []

    def variants(self, problem: Any) -> Any:
        return (("variant", problem.cols, problem.aligned),)

    def is_loaded(self, problem: Any) -> bool:
        return self.loaded.issuperset(self.variants(problem))

    def prepare(self, problem: Any, config: Any, budget: Budget) -> Any:
        self.loaded.update(self.variants(problem))
        self.prepared.append((problem, config, budget))
        return partial(self.launch, problem)

    def launch(self, problem: Any, stream: int, *given: Any) -> None:
        """The small operator's, by torch on raw addresses."""
        x, total, _, out, *rest = given
        self.launches.append((stream, *rest))
        *_, x_step, total_step, out_step, by = rest
        shape = problem[:2]
        call = Call(memory(x, shape, (x_step, 1)), memory(total, shape, (total_step, 1)), by)
        memory(out, shape, (out_step, 1)).copy_(reference(call))


class FakeOperator:
    """One operator on one device: its streams (a number each) and whether a capture is on."""

    def __init__(
        self, op: Operator[Any], capability: tuple[int, int] = (9, 0), kernels: Any = None,
        select: Any = lambda problem, budget: "only",
    ) -> None:  # fmt: skip
        self.kernels = kernels or FakeKernels()
        self.stream, self.is_capturing = 7, False
        self.budgets = {7: Budget(132, "mask", True), 8: Budget(32, "mask", False)}
        profile: Any = FakeProfile(capability)
        streams = streams_of(self)
        workspaces = Workspaces(torch.device("cpu"), streams.capturing, lambda raw: 0)
        self.dispatcher: Any = OperatorDispatcher(profile, lambda: self.kernels, select)
        self.eager = EagerOperator(op, -1, self.dispatcher, streams, workspaces)


def scale(name: str = "test_scale", **options: Any) -> Operator[Problem]:
    """The operator, its defaults changed by options."""
    given: dict[str, Any] = {
        "name": name,
        "call": Call,
        "schema": "Tensor x, Tensor(a!) total, *, float? by=1.0, Tensor? by_tensor=None",
        "results": ("out",),
        "check": check,
        "shapes": lambda call: ((call.x.shape, call.x.dtype),),
        "problem": problem_of,
        "numbers": lambda call: (
            call.x.stride(0), call.total.stride(0), call.out.stride(0), call.by,
        ),
        "reference": reference,
        "dispatcher": lambda index: None,
        "vectors": ("x", "out"),
        "in_place": (("out", "x"),),
    }  # fmt: skip
    return Operator(**given | options)
