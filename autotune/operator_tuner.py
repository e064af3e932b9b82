"""Cells of the operators that `smkern.ops.operator` declares."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from smkern.autotune.family import Tasks
from smkern.autotune.measure import Tuner
from smkern.device import Budget
from smkern.measure.partitions import Place
from smkern.ops.operator import Operator
from smkern.ops.operator_dispatch import Compile, OperatorDispatcher
from smkern.ops.operator_warmup import aligned


class OperatorTuner(Tuner[Any, Any]):
    """Measures cells of one case of an operator on one device.

    Args:
        op: the operator.
        dispatcher: prepares the launches.
        calls: with their results, on tensors of the device: launches go round them, so that none
            finds its own in L2; the first one's results are held against the reference.
        tolerance: largest |x - reference| / |reference| of a result.
        exact: whether candidates must agree to the bit.
    """

    def __init__(
        self,
        op: Operator[Any],
        dispatcher: OperatorDispatcher[Any, Any],
        calls: Sequence[Any],
        *,
        tolerance: float = 0.01,
        exact: bool = True,
    ) -> None:
        self.name, self.tolerance = op.name, tolerance
        self.op, self.dispatcher, self.calls, self.exact = op, dispatcher, calls, exact
        self._workspace: Tensor | None = None
        first = calls[0]
        # What the first call changes is kept; the reference changes clones of it.
        self._kept = {name: getattr(first, name).clone() for name in op.changed}
        spare = first._replace(**{name: x.clone() for name, x in self._kept.items()})
        with torch.no_grad():
            made = op.reference(spare)
        results = made if isinstance(made, tuple) else () if made is None else (made,)
        self._expected = [*results, *(getattr(spare, name) for name in op.changed)]

    def order(self, problem: Any, config: Any) -> Hashable:
        return 0 if self.exact else None

    def expected(self, problem: Any) -> Sequence[Tensor]:
        return self._expected

    def results(self, problem: Any) -> Sequence[Tensor]:
        call = self.calls[0]
        return [*self.op.results_of(call), *(getattr(call, name) for name in self.op.changed)]

    def poison(self, problem: Any) -> None:
        super().poison(problem)
        for name, x in self._kept.items():
            getattr(self.calls[0], name).copy_(x)

    def recover(self, problem: Any, place: Place) -> None:
        if self._workspace is not None:
            self._workspace.zero_()  # a launch that failed may leave counts behind

    def launches(self, problem: Any, place: Place, config: Any) -> Sequence[Callable[[], object]]:
        op = self.op
        problem = op.problem(self.calls[0], aligned(op, self.calls[0]))  # with the strides
        assert problem is not None
        launch = self.dispatcher.launch_by(config, problem, place.budget, False)
        extra: tuple[int, ...] = ()
        size = op.workspace(problem) if op.workspace is not None else 0
        if size:
            if self._workspace is None or self._workspace.nbytes != size:
                device = self.calls[0][0].device
                self._workspace = torch.empty(size, dtype=torch.uint8, device=device)
            self._workspace.zero_()
            extra = (self._workspace.data_ptr(),)
        launch = partial(launch, place.stream.cuda_stream)
        return [partial(launch, *op.addresses(x), *extra, *op.numbers(x)) for x in self.calls]


def operator_tuner(
    calls: Callable[[Any, str], tuple[Operator[Any], list[Any]]], **options: Any
) -> Callable[[Sequence[Any], Any, str], OperatorTuner]:
    """A family's `tuner`.

    Args:
        calls: A case's operator, and calls with results on a device.
        options: Keyword arguments of `OperatorTuner`.
    """

    def tuner(cases: Sequence[Any], dispatcher: Any, device: str) -> OperatorTuner:
        (case,) = cases
        op, made = calls(case, device)
        return OperatorTuner(op, dispatcher, made, **options)

    return tuner


def operator_tasks(problem: Any, budget: Budget, configs: Sequence[Any], dispatcher: Any) -> Tasks:
    """All kernels of the problem's kind: its first launch loads them all."""
    return {x: Compile(x) for x in dispatcher.kernels().variants(problem)}
