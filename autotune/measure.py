"""One cell measured: every candidate checked, timed in interleaved rounds, the best again.

Calls follow each other as in a model's forward pass: ours may begin while the one before ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from math import nan
from typing import Any

import torch
from torch import Tensor

from smkern.autotune.places import Place, memory_bound_neighbour
from smkern.autotune.raw import Measurement
from smkern.autotune.shortlist import Candidate
from smkern.bench.operands import Operands
from smkern.bench.timing import (
    Call,
    Case,
    Timing,
    calls_for,
    rounds_for,
    time_interleaved,
    try_eagerly,
)
from smkern.errors import SmkernError
from smkern.ops.dispatch import Dispatcher
from smkern.tuning import space
from smkern.tuning.config import GemmConfig, GemmProblem
from smkern.tuning.table import Cell

TOLERANCE = 2e-2
"""|out - torch| / |torch|; bf16 rounding alone gives 2e-3, a wrong tile far more."""

FINALISTS_WITHIN = 1.06
"""Candidates this close to the fastest are timed again in more rounds."""

SAME_WITHIN = 1.015
"""Times so close are one: power and clocks move more than that between sittings."""
SPLIT_MUST_GAIN = 1.04
LIBRARY_MUST_GAIN = 1.01
"""cuBLASLt wins a cell only by more: its kernels need clusters and may change with versions. So
does SwiGLU unfused: it costs a second launch, the host's time and memory."""


@dataclass(slots=True)
class CellTuner:
    """Measures cells of one weight shape on one device.

    Args:
        dispatcher: prepares the launches.
        operands: rotated sets of a, w and out, together past L2.
        budget_us: device time that a cell's first rounds may take; the finals take about half.
    """

    dispatcher: Dispatcher
    operands: Operands
    budget_us: float = 12_000.0
    _extras: dict[str, Tensor] = field(default_factory=dict)
    _workspace: Tensor | None = None

    def measure(
        self,
        problem: GemmProblem,
        place: Place,
        candidates: Sequence[Candidate],
        *,
        contended: bool = False,
    ) -> list[Measurement]:
        """All candidates' times in `place`, fastest first, the failed ones last.

        `contended`: beside a memory-bound neighbour on the complement partition.
        """
        errors: dict[str, str] = {}
        calls: dict[str, Call] = {}
        expected = self._reference(problem)
        for candidate in candidates:
            call = self._checked(problem, place, candidate, expected, errors)
            if call is not None:
                calls[candidate.name] = call
        fastest = min(candidate.predicted_us for candidate in candidates)
        with memory_bound_neighbour(place.neighbour_stream) if contended else nullcontext():
            timings = self._time(calls, place, fastest, errors)
        found = [
            replace(
                self._measurement(problem, place, candidate, timings, errors), contended=contended
            )
            for candidate in candidates
        ]
        return sorted(found, key=lambda item: (item.error is not None, item.us))

    def _time(
        self, calls: Mapping[str, Call], place: Place, expected_us: float, errors: dict[str, str]
    ) -> dict[str, Timing]:
        if not calls:
            return {}
        cases = {
            name: Case(call, place.stream, calls_for(expected_us, at_most=20), index)
            for index, (name, call) in enumerate(calls.items())
        }
        round_us = sum(expected_us * case.calls for case in cases.values())
        rounds = rounds_for(round_us, budget_us=self.budget_us, at_least=1, at_most=3)
        timings = time_interleaved(cases, rounds=rounds, errors=errors)
        if not timings:
            return {}
        best = min(timing.us_median for timing in timings.values())
        finalists = {
            name: replace(cases[name], calls=calls_for(best, at_most=20))
            for name, timing in timings.items()
            if timing.us_median <= FINALISTS_WITHIN * best
        }
        if len(finalists) > 1:
            round_us = sum(best * case.calls for case in finalists.values())
            rounds = rounds_for(round_us, budget_us=self.budget_us, at_least=3, at_most=7)
            timings |= time_interleaved(finalists, rounds=rounds, errors=errors)
        return timings

    def _checked(
        self,
        problem: GemmProblem,
        place: Place,
        candidate: Candidate,
        expected: Tensor,
        errors: dict[str, str],
    ) -> Call | None:
        """The candidate's call after one eager run with the right result, else None."""
        try:
            call = self._call(problem, place, candidate.config)
        except (SmkernError, RuntimeError) as error:
            errors[candidate.name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            return None
        out = self.operands.out(problem.m, 0)[:, : problem.out_columns]
        out.fill_(float("nan"))
        torch.cuda.synchronize()
        message = try_eagerly(call, place.stream)
        if message is None:
            norm = torch.linalg.vector_norm
            error_norm = norm(out - expected, dtype=torch.float32)
            relative = float(error_norm / norm(expected, dtype=torch.float32))
            if not relative < TOLERANCE:
                message = f"wrong result: |out - torch| / |torch| is {relative:.3g}"
        if message is not None:
            errors[candidate.name] = message
            return None
        return call

    def _call(self, problem: GemmProblem, place: Place, config: GemmConfig) -> Call:
        """Launches on the place's stream; call(i) uses operand set i. All share a workspace."""
        plan = self.dispatcher.prepare(problem, config, place.budget)
        workspace, stream = self._workspace_of(plan.workspace_bytes), place.stream.cuda_stream
        bias, residual = self._epilogue_operands(problem)
        launches = [
            (
                *(tensor.data_ptr() for tensor in (a, w, out)),
                bias.data_ptr() if bias is not None else 0,
                residual.data_ptr() if residual is not None else 0,
                workspace,
                stream,
            )
            for a, w, out in self.operands.sets(problem.m)
        ]
        a, w, out = self.operands.sets(problem.m)[0]
        residual_stride = problem.n if residual is not None else 0
        # a model's weights stay as they are: launches overlap as they do there
        launch = plan.bind(
            a.stride(0), w.stride(0), out.stride(0), residual_stride, static_weights=True
        )
        count = len(launches)

        def call(i: int) -> None:
            launch(*launches[i % count])

        return call

    def _epilogue_operands(self, problem: GemmProblem) -> tuple[Tensor | None, Tensor | None]:
        """bias [n] and residual [m, n], where the epilogue has them."""
        epilogue, ops = problem.epilogue, self.operands
        bias = residual = None
        if epilogue.bias:
            bias = self._extra("bias", 1, ops.n)[0]
        if epilogue.residual:
            residual = self._extra("residual", ops.max_m, ops.n)[: problem.m]
        return bias, residual

    def _extra(self, name: str, rows: int, columns: int) -> Tensor:
        if name not in self._extras:
            dtype, device = self.operands.dtype, self.operands.device
            self._extras[name] = torch.randn(rows, columns, dtype=dtype, device=device)
        return self._extras[name]

    def _reference(self, problem: GemmProblem) -> Tensor:
        """What set 0 comes to by torch, [m, n] (SwiGLU [m, n / 2]) in the operands' dtype."""
        ops = self.operands
        value = ops.a(problem.m, 0) @ ops.w(0).t()
        if problem.epilogue.swiglu:
            gate, up = value.chunk(2, dim=1)
            return torch.nn.functional.silu(gate) * up
        bias, residual = self._epilogue_operands(problem)
        if bias is not None:
            value = value + bias
        if problem.epilogue.activation is not None:
            value = getattr(torch.nn.functional, problem.epilogue.activation)(value)
        return value if residual is None else value + residual

    def _workspace_of(self, num_bytes: int) -> int:
        """Zeroed afresh: a candidate that failed may have left counts behind."""
        if not num_bytes:
            return 0
        if self._workspace is None or self._workspace.nbytes < num_bytes:
            torch.cuda.synchronize()
            size = max(num_bytes, 64 << 20)
            self._workspace = torch.zeros(size, dtype=torch.uint8, device=self.operands.device)
        self._workspace[: 64 << 10].zero_()
        torch.cuda.synchronize()
        return self._workspace.data_ptr()

    def _measurement(
        self,
        problem: GemmProblem,
        place: Place,
        candidate: Candidate,
        timings: Mapping[str, Timing],
        errors: Mapping[str, str],
    ) -> Measurement:
        timing: Any = timings.get(candidate.name)
        error = None if timing is not None else errors.get(candidate.name, "not measured")
        return Measurement(
            problem,
            place.budget,
            candidate.config,
            timing.us_median if timing is not None else nan,
            timing.noise if timing is not None else nan,
            candidate.predicted_us,
            error,
        )


def _handicapped_us(item: Measurement) -> float:
    return item.us * (LIBRARY_MUST_GAIN if item.config.kernel in space.LIBRARIES else 1)


def _likeliest(own: Sequence[Measurement]) -> Measurement:
    """The fastest; among those within the measurement's noise of it, the likeliest to stay so.

    A split K loop must gain more than that over the best whole one: partial sums cost L2 traffic
    and power, which weigh more on another day. Then the model's favourite.
    """
    whole = [item for item in own if item.config.split == 1]
    fastest = min(item.us for item in own)
    if whole and min(item.us for item in whole) <= SPLIT_MUST_GAIN * fastest:
        own, fastest = whole, min(item.us for item in whole)
    same = [item for item in own if item.us <= SAME_WITHIN * fastest]
    return min(same, key=lambda item: (item.predicted_us, item.us))


def best_cell(measurements: Sequence[Measurement]) -> Cell | None:
    """The cell that these measurements make; None where none of our kernels ran."""
    fine = [item for item in measurements if item.error is None]
    own = [item for item in fine if item.config.kernel not in space.LIBRARIES]
    if not own:
        return None
    ours = _likeliest(own)
    library = [item for item in fine if item.config.kernel in space.LIBRARIES]
    best = min([ours, *library], key=lambda item: _handicapped_us(item))
    return Cell(best.config, best.us, ours.config, ours.us)
