"""`smkern autotune --op append`: measure the append's candidates inside partitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from smkern.autotune import raw, sitting
from smkern.autotune.attention_cases import Heads
from smkern.autotune.places import Place, memory_bound_neighbour
from smkern.autotune.rounds import time_candidates
from smkern.autotune.sitting import Outcome, Request, Sitting
from smkern.bench.append.cases import AppendCase, Kind
from smkern.bench.append.group import TOLERANCE
from smkern.bench.append.operands import AppendOperands
from smkern.bench.append.providers import call_of, problem_of_case
from smkern.bench.timing import Call
from smkern.bench.timing import try_eagerly as run_once
from smkern.device import Budget
from smkern.errors import SmkernError
from smkern.ops.append.dispatch import AppendDispatcher
from smkern.profile import Profile
from smkern.tuning.append import AppendConfig, AppendProblem, candidates, choose, predict_us
from smkern.tuning.append_table import CODEC, AppendKey
from smkern.tuning.cells import CellFile, Tuned, config_to_json

TOKENS = (8, 64, 512, 4096)
QUICK_TOKENS = (64,)
MAX_CANDIDATES = 12
SAME_WITHIN = 1.015
"""Times so close are one; the model's choice is kept then."""


class Job(NamedTuple):
    """One cell to measure."""

    case: AppendCase
    place: Place


@dataclass(frozen=True, slots=True)
class AppendMeasurement:
    """One candidate's result in one cell. `us` is NaN where it failed, then `error` says how."""

    problem: AppendProblem
    budget: Budget
    config: AppendConfig
    us: float
    noise: float
    predicted_us: float
    error: str | None = None
    contended: bool = False

    def to_json(self) -> dict[str, Any]:
        p, budget = self.problem, self.budget
        row: dict[str, Any] = {
            "op": p.op,
            "tokens": p.tokens,
            "q_heads": p.num_q_heads,
            "kv_heads": p.num_kv_heads,
            "head_dim": p.head_dim,
            "rotary_dim": p.rotary_dim,
            "norm": p.norm,
            "dtype": p.dtype,
            "cache_dtype": p.cache_dtype,
            "num_sms": budget.num_sms,
            "confined": budget.confined,
            "config": config_to_json(self.config, AppendConfig()),
        }
        return row | raw.result_of(self)


def tuned_cases(
    models: Sequence[Heads], *, cache_dtype: str = "bf16", tokens: Sequence[int] = TOKENS
) -> list[AppendCase]:
    """Every kind with this cache, of every size, of each model; KV heads alone are models too."""
    kinds: tuple[Kind, ...] = ("fp8",) if cache_dtype == "fp8" else ("plain", "norm-rope")
    found = [
        AppendCase(kind, count, heads.num_q_heads, heads.num_kv_heads, heads.head_dim)
        for heads in models
        for kind in kinds
        for count in tokens
    ]
    return list({shape_of(case): case for case in reversed(found)}.values())[::-1]


def shape_of(case: AppendCase) -> AppendProblem:
    """What a table's key and the model see of a case; needs no tensors."""
    turned = case.head_dim if case.turns else 0
    return AppendProblem(
        case.tokens, len(case.q_lens), case.num_q_heads if case.turns else 0, case.num_kv_heads,
        case.head_dim, case.page_size, "bf16", case.cache_dtype, turned, norm=case.turns,
        ragged=not case.is_decode,
    )  # fmt: skip


def listed(problem: AppendProblem, budget: Budget, profile: Profile) -> tuple[AppendConfig, ...]:
    """The candidates of a cell, the model's choice first, then by its prediction."""
    first = choose(problem, budget, profile)

    def order(config: AppendConfig) -> tuple[bool, float]:
        return config != first, predict_us(problem, config, budget, profile)

    return tuple(sorted(candidates(problem, budget), key=order)[:MAX_CANDIDATES])


def describe(request: Request[AppendCase], profile: Profile) -> None:
    """Print what would be measured on the profile's GPU; needs none."""
    sitting.describe(request, profile, lambda case, budget: listed(shape_of(case), budget, profile))


def jobs_of(
    request: Request[AppendCase], places: Sequence[Place], done: Callable[[AppendKey], bool]
) -> Iterator[Job]:
    """Cells that are not done, a case after the other, so that its operands are made once."""
    for case in request.cases:
        for place in places:
            if not done(AppendKey.of(shape_of(case), place.budget)):
                yield Job(case, place)


@dataclass(slots=True)
class AppendTuner:
    """Measures cells of one case on one device.

    Args:
        dispatcher: prepares the launches.
        operands: rows, caches and tables.
        budget_us: device time that a cell's rounds may take, about.
    """

    dispatcher: AppendDispatcher
    operands: AppendOperands
    budget_us: float = 15_000.0

    def measure(self, place: Place, *, contended: bool = False) -> list[AppendMeasurement]:
        """All candidates' times in `place`, the model's choice first.

        `contended`: beside a memory-bound neighbour on the complement partition.
        """
        problem, profile = problem_of_case(self.operands), self.dispatcher.profile
        wanted = listed(problem, place.budget, profile)
        predicted = {x: predict_us(problem, x, place.budget, profile) for x in wanted}
        errors: dict[AppendConfig, str] = {}
        calls: dict[AppendConfig, Call] = {}
        first: list[tuple[Tensor, ...]] = []
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
            item = AppendMeasurement(
                problem, place.budget, config, us, noise, predicted[config], error, contended
            )
            found.append(item)
        return found

    def _checked(
        self,
        problem: AppendProblem,
        place: Place,
        config: AppendConfig,
        first: list[tuple[Tensor, ...]],
        errors: dict[AppendConfig, str],
    ) -> Call | None:
        """The candidate's call after one run with the right result and the first one's bits."""
        ops = self.operands
        try:
            launch = self.dispatcher.launch_by(config, problem, place.budget, False)
            call = _call(ops, launch, place)
        except (SmkernError, RuntimeError) as error:
            errors[config] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            return None
        ops.wanted()
        ops.poison()
        torch.cuda.synchronize()
        message = run_once(call, place.stream)
        if message is None:
            got = (*((ops.sets[0].out,) if ops.case.turns else ()), *ops.rows("HND"))
            relative = ops.error("HND")
            if not relative < TOLERANCE[ops.case.cache_dtype]:
                message = f"wrong result: |x - torch| / |torch| is {relative:.3g}"
            elif not first:
                first.append(tuple(x.clone() for x in got))
            elif not all(torch.equal(x, y) for x, y in zip(got, first[0], strict=True)):
                message = "other bits than another candidate"
        if message is None:
            return call
        errors[config] = message
        return None


def _call(ops: AppendOperands, launch: Any, place: Place) -> Call:
    """Launches on the place's stream; call(i) uses operand set i."""
    from smkern.ops.append.eager import arguments_of

    given = [arguments_of(call_of(ops, index)) for index in range(len(ops.sets))]
    stream, count = place.stream.cuda_stream, len(given)

    def call(i: int) -> None:
        launch(given[i % count], stream)

    return call


def best_cell(found: Sequence[AppendMeasurement]) -> Tuned[AppendConfig] | None:
    """The fastest, or the first (the model's choice) where it is as fast; None where none ran."""
    return sitting.best_cell(found, found[0].config, same_within=SAME_WITHIN)


def tune(request: Request[AppendCase], out: Path, raw_path: Path, *, fresh: bool) -> None:
    """Measure the cells that the table at `out` lacks (with `fresh` all), and write them there."""
    from smkern.ops.append.eager import eager_append

    started = Sitting(request, CellFile(out, CODEC), raw_path, fresh)
    dispatcher = eager_append(0).dispatcher

    def measure(tuner: AppendTuner, job: Job) -> Outcome[AppendKey, AppendConfig]:
        found = tuner.measure(job.place, contended=request.contended)
        key = AppendKey.of(shape_of(job.case), job.place.budget)
        return Outcome(found, key, best_cell(found))

    started.run(
        dispatcher.profile,
        lambda places, done: jobs_of(request, places, done),
        lambda case: AppendTuner(dispatcher, AppendOperands(case)),
        measure,
    )
