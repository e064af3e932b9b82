"""One attention cell measured: every candidate checked, timed in interleaved rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import nan
from typing import Any

import torch
from torch import Tensor

from smkern.autotune import raw, sitting
from smkern.autotune.attention_cases import problem_of
from smkern.autotune.places import Place, memory_bound_neighbour
from smkern.autotune.rounds import time_candidates
from smkern.bench.attention.operands import AttentionOperands
from smkern.bench.timing import Call, Timing
from smkern.bench.timing import try_eagerly as run_once
from smkern.errors import SmkernError
from smkern.kernels.attention.args import AttentionArguments
from smkern.ops.attention.dispatch import AttentionDispatcher
from smkern.ops.attention.plan import Plan, empty_plan
from smkern.tuning.attention import space
from smkern.tuning.attention.model import predict_us
from smkern.tuning.attention.shapes import AttentionConfig, AttentionProblem, Budget
from smkern.tuning.attention.table import AttentionKey
from smkern.tuning.cells import Tuned, config_to_json

TOLERANCE = 2e-2
"""|out - torch| / |torch|, with fp8 caches too: the reference reads the same bytes."""
SAME_WITHIN = 1.03
"""Times so close are one; the default is kept then: a cell serves other lengths too, and at 100 SMs
a single team was 2% faster on equal lengths, 9% slower on skewed ones."""
DEFAULT_CONFIG = AttentionConfig()


@dataclass(frozen=True, slots=True)
class AttentionMeasurement:
    """One candidate's result in one cell. `us` is NaN where it failed, then `error` says how."""

    problem: AttentionProblem
    budget: Budget
    config: AttentionConfig
    us: float
    noise: float
    predicted_us: float
    error: str | None = None
    contended: bool = False

    @property
    def key(self) -> AttentionKey:
        return AttentionKey.of(self.problem, self.budget)

    def to_json(self) -> dict[str, Any]:
        shape, budget = self.problem.shape, self.budget
        row: dict[str, Any] = {
            "op": "paged_attention",
            "batch": shape.batch,
            "q_heads": shape.num_q_heads,
            "kv_heads": shape.num_kv_heads,
            "head_dim": shape.head_dim,
            "page_size": shape.page_size,
            "q_len": shape.max_q_len,
            "kv_len": shape.max_kv_len,
            "dtype": self.problem.dtype,
            "cache_dtype": self.problem.cache_dtype,
            "num_sms": budget.num_sms,
            "confined": budget.confined,
            "config": config_to_json(self.config, DEFAULT_CONFIG),
        }
        return row | raw.result_of(self)


@dataclass(slots=True)
class AttentionTuner:
    """Measures cells of one case on one device.

    Args:
        dispatcher: prepares the launches.
        operands: caches over one page table, rotated past L2.
        budget_us: device time that a cell's rounds may take, about.
    """

    dispatcher: AttentionDispatcher
    operands: AttentionOperands
    budget_us: float = 15_000.0

    def measure(
        self,
        place: Place,
        candidates: Sequence[AttentionConfig],
        *,
        contended: bool = False,
    ) -> list[AttentionMeasurement]:
        """All candidates' times in `place`, fastest first, the failed ones last.

        `contended`: beside a memory-bound neighbour on the complement partition.
        """
        problem, profile = problem_of(self.operands.case), self.dispatcher.profile
        predicted = {c: predict_us(problem, c, place.budget, profile) for c in candidates}
        plan = self.plan(problem, place)
        errors: dict[AttentionConfig, str] = {}
        calls: dict[AttentionConfig, Call] = {}
        firsts: dict[tuple[object, ...], Tensor] = {}
        for config in candidates:
            call = self._checked(problem, place, plan, config, firsts, errors)
            if call is not None:
                calls[config] = call
        with memory_bound_neighbour(place.neighbour_stream) if contended else nullcontext():
            timings = self._time(calls, place, predicted, errors)
        found = []
        for config in candidates:
            timing = timings.get(config)
            found.append(
                AttentionMeasurement(
                    problem,
                    place.budget,
                    config,
                    nan if timing is None else timing.us_median,
                    nan if timing is None else timing.noise,
                    predicted[config],
                    errors.get(config, "not measured") if timing is None else None,
                    contended,
                )
            )
        return sorted(found, key=lambda item: (item.error is not None, item.us))

    def plan(self, problem: AttentionProblem, place: Place) -> Plan:
        """The plan of the case's lengths for a place's budget."""
        ops, shape = self.operands, problem.shape
        plan = empty_plan(shape, place.budget, ops.kv_lens.device)
        make = self.dispatcher.plan(shape, place.budget)
        torch.cuda.synchronize()
        make(
            ops.kv_lens.data_ptr(),
            ops.cu_q_lens.data_ptr() if shape.max_q_len > 1 else 0,
            plan.buffer.data_ptr(),
            plan.workspace.data_ptr(),
            place.stream.cuda_stream,
        )
        torch.cuda.synchronize()
        return plan

    def _checked(
        self,
        problem: AttentionProblem,
        place: Place,
        plan: Plan,
        config: AttentionConfig,
        firsts: dict[tuple[object, ...], Tensor],
        errors: dict[AttentionConfig, str],
    ) -> Call | None:
        """The candidate's call after one run with the right result, else None.

        Candidates whose sums have one order must agree to the bit: a table may choose any of them.
        """
        try:
            call = self._call(problem, place, plan, config)
        except (SmkernError, RuntimeError) as error:
            errors[config] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            return None
        ops = self.operands
        ops.poison()
        torch.cuda.synchronize()
        message = run_once(call, place.stream)
        if message is None:
            out, order = ops.sets[0].out, space.bits(problem, config)
            if order not in firsts:
                relative = ops.error(out)
                if relative < TOLERANCE:
                    firsts[order] = out.clone()
                else:
                    message = f"wrong result: |out - torch| / |torch| is {relative:.3g}"
            elif not torch.equal(out, firsts[order]):
                message = "other bits than another candidate with the same order of sums"
        if message is not None:
            errors[config] = message
            plan.workspace.zero_()  # a failed launch may leave counts behind
            self.plan(problem, place)
            return None
        return call

    def _call(
        self, problem: AttentionProblem, place: Place, plan: Plan, config: AttentionConfig
    ) -> Call:
        """Launches on the place's stream; call(i) uses operand set i. All share the plan."""
        launch = self.dispatcher.launch(problem, config, place.budget)
        launches = [self._arguments(index, plan) for index in range(len(self.operands.sets))]
        stream, count = place.stream.cuda_stream, len(launches)

        def call(i: int) -> None:
            launch(launches[i % count], stream)

        return call

    def _arguments(self, index: int, plan: Plan) -> AttentionArguments:
        """One operand set under the plan, causal, the default scale."""
        ops = self.operands
        one, table = ops.sets[index], ops.pages.table
        q, out, k, v = (x.stride() for x in (one.q, one.out, one.k, one.v))
        return AttentionArguments(
            q=one.q.data_ptr(),
            k=one.k.data_ptr(),
            v=one.v.data_ptr(),
            out=one.out.data_ptr(),
            lse=0,
            page_table=table.data_ptr(),
            page_indptr=0,
            sinks=0,
            k_scale_ptr=0,
            v_scale_ptr=0,
            plan=plan.buffer.data_ptr(),
            workspace=plan.workspace.data_ptr(),
            q_strides=(q[0], q[1]),
            out_strides=(out[0], out[1]),
            k_strides=(k[0], k[1], k[2]),
            v_strides=(v[0], v[1], v[2]),
            table_stride=table.stride(0),
            table_len=table.shape[1],
            num_pages=one.k.shape[0],
            num_tokens=one.q.shape[0],
            scale=ops.case.head_dim**-0.5,
            softcap=0.0,
            k_scale=1.0,
            v_scale=1.0,
        )

    def _time(
        self,
        calls: Mapping[AttentionConfig, Call],
        place: Place,
        predicted: Mapping[AttentionConfig, float],
        errors: dict[AttentionConfig, str],
    ) -> dict[AttentionConfig, Timing]:
        if not calls:
            return {}
        expected_us = min(predicted[config] for config in calls)
        return time_candidates(
            calls, place, expected_us, errors, budget_us=self.budget_us, at_most=20
        )


def best_cell(
    measurements: Sequence[AttentionMeasurement], default: AttentionConfig
) -> Tuned[AttentionConfig] | None:
    """The fastest, or the default where it is as fast; None where nothing ran."""
    return sitting.best_cell(measurements, default, same_within=SAME_WITHIN)
