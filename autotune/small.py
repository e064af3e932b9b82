"""Measure a small operator's candidates inside partitions: any that `smkern.ops.small` frames."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from math import nan
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from smkern.autotune import raw
from smkern.autotune.places import Place, memory_bound_neighbour
from smkern.autotune.rounds import time_candidates
from smkern.bench.timing import Call
from smkern.bench.timing import try_eagerly as run_once
from smkern.device import Budget
from smkern.errors import SmkernError
from smkern.ops.small import Small
from smkern.ops.small_dispatch import SmallDispatcher
from smkern.ops.small_warmup import aligned
from smkern.tuning.cells import config_to_json

P = TypeVar("P")
C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class SmallMeasurement(Generic[P, C]):
    """One candidate's result in one cell. `us` is NaN where it failed, then `error` says how."""

    op: str
    problem: P
    budget: Budget
    config: C
    us: float
    noise: float
    predicted_us: float
    error: str | None = None
    contended: bool = False

    def to_json(self) -> dict[str, Any]:
        problem: Any = self.problem
        config: Any = self.config
        row: dict[str, Any] = {
            "op": self.op,
            **asdict(problem),
            "num_sms": self.budget.num_sms,
            "confined": self.budget.confined,
            "config": config_to_json(config, type(config)()),
        }
        return row | raw.result_of(self)


@dataclass(slots=True)
class SmallTuner(Generic[P, C]):
    """Measures cells of one case of an operator on one device.

    Args:
        op: the operator.
        dispatcher: prepares the launches.
        calls: with their results, on tensors of the device: launches go round them, so that none
            finds its own in L2; the first one's results are held against the reference.
        predict: the model's time of a configuration, us.
        tolerance: of a result: |x - reference| / |reference|.
        budget_us: device time that a cell's rounds may take, about.
    """

    op: Small[Any]
    dispatcher: SmallDispatcher[Any, Any]
    calls: Sequence[Any]
    predict: Callable[[P, C, Budget], float]
    tolerance: float = 0.01
    budget_us: float = 15_000.0
    _kept: dict[str, Tensor] = field(init=False)
    _wanted: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        """What the first call changes is kept, and its results made by the reference."""
        first = self.calls[0]
        self._kept = {name: getattr(first, name).clone() for name in self.op.changed}
        spare = first._replace(**{name: x.clone() for name, x in self._kept.items()})
        with torch.no_grad():
            made = self.op.reference(spare)
        results = made if isinstance(made, tuple) else () if made is None else (made,)
        self._wanted = [*results, *(getattr(spare, name) for name in self.op.changed)]

    @property
    def problem(self) -> P:
        """What a launch of these calls is chosen by."""
        problem: Any = self.op.problem(self.calls[0], aligned(self.op, self.calls[0]))
        assert problem is not None
        return problem

    def measure(
        self, place: Place, wanted: Sequence[C], *, contended: bool = False
    ) -> list[SmallMeasurement[P, C]]:
        """The times of these configurations in `place`, in their order.

        `contended`: beside a memory-bound neighbour on the complement partition.
        """
        problem: P = self.problem
        predicted = {x: self.predict(problem, x, place.budget) for x in wanted}
        errors: dict[C, str] = {}
        calls: dict[C, Call] = {}
        first: list[list[Tensor]] = []
        for config in wanted:
            call = self._checked(problem, place, config, first, errors)
            if call is not None:
                calls[config] = call
        with memory_bound_neighbour(place.neighbour_stream) if contended else nullcontext():
            timings = time_candidates(
                calls, place, min(predicted.values()), errors, budget_us=self.budget_us
            )
        found = []
        for config in wanted:
            timing = timings.get(config)
            us, noise = (nan, nan) if timing is None else (timing.us_median, timing.noise)
            error = errors.get(config, "not measured") if timing is None else None
            item = SmallMeasurement(
                self.op.name, problem, place.budget, config, us, noise, predicted[config], error,
                contended,
            )  # fmt: skip
            found.append(item)
        return found

    def _checked(
        self, problem: P, place: Place, config: C, first: list[list[Tensor]], errors: dict[C, str]
    ) -> Call | None:
        """The candidate's call after one run with the right result and the first one's bits."""
        try:
            launch = self.dispatcher.launch_by(config, problem, place.budget, False)
            call = self._call(launch, problem, place)
        except (SmkernError, RuntimeError) as error:
            errors[config] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            return None
        self._reset()
        torch.cuda.synchronize()
        message = run_once(call, place.stream)
        if message is None:
            torch.cuda.synchronize()
            got = self._got()
            relative = max(map(_error, got, self._wanted), default=0.0)
            if not relative < self.tolerance:
                message = f"wrong result: |x - reference| / |reference| is {relative:.3g}"
            elif not first:
                first.append([x.clone() for x in got])
            elif not all(torch.equal(x, y) for x, y in zip(got, first[0], strict=True)):
                message = "other bits than another candidate"
        if message is None:
            return call
        errors[config] = message
        return None

    def _reset(self) -> None:
        """What the first call changes as it was, its results poisoned."""
        call = self.calls[0]
        for name, x in self._kept.items():
            getattr(call, name).copy_(x)
        for x in self.op.results_of(call):
            x.fill_(nan if x.is_floating_point() else -1)

    def _got(self) -> list[Tensor]:
        call = self.calls[0]
        return [*self.op.results_of(call), *(getattr(call, name) for name in self.op.changed)]

    def _call(self, launch: Any, problem: P, place: Place) -> Call:
        """Launches on the place's stream; call(i) uses the tensors of call i."""
        op = self.op
        extra: tuple[int, ...] = ()
        size = op.workspace(problem, place.budget)
        workspace = None
        if size:
            workspace = torch.zeros(size, dtype=torch.uint8, device=self.calls[0][0].device)
            extra = (workspace.data_ptr(),)
        given = []
        for each in self.calls:
            tensors = (each[at] for at in op.places)
            addresses = (x.data_ptr() if isinstance(x, Tensor) else 0 for x in tensors)
            given.append((*addresses, *extra, *op.numbers(each)))
        stream, count = place.stream.cuda_stream, len(given)

        def call(i: int, kept: Any = workspace) -> None:
            launch(stream, *given[i % count])

        return call


def _error(got: Tensor, wanted: Tensor) -> float:
    """|got - wanted| / |wanted|; NaN where elements were not written."""
    x, y = got.double(), wanted.double()
    norm = torch.linalg.vector_norm
    return float(norm(x - y) / norm(y).clamp_min(1e-30))
