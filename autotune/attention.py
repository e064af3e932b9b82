"""Attention's family: candidates of a cell, and its tuner."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from smkern.autotune.family import MeasuredFamily, Tasks
from smkern.autotune.measure import Tuner, best_cell
from smkern.device import Budget
from smkern.kernels.attention.args import AttentionArguments
from smkern.measure.attention import AttentionCase, AttentionOperands
from smkern.measure.partitions import Place
from smkern.ops.attention.dispatch import AttentionDispatcher, attention_dispatcher
from smkern.ops.attention.plan import Plan, empty_plan
from smkern.profile import Profile
from smkern.tuning.attention import constraints
from smkern.tuning.attention.key import OP
from smkern.tuning.attention.select import ATTENTION_FAMILY
from smkern.tuning.attention.shapes import AttentionConfig, AttentionProblem

SAME_WITHIN = 1.03
"""Times so close are one; the default is kept then: a cell serves other lengths too, and at 100 SMs
a single team was 2% faster on equal lengths, 9% slower on skewed ones."""


def listed(
    problem: AttentionProblem, budget: Budget, profile: Profile, most: int = 12
) -> dict[AttentionConfig, float]:
    """The candidates of a cell, the default first: of the kernel that serves the problem anyway.

    Another kernel, or other keys and warps, would turn bits and has no place in a table.
    """
    candidates = ATTENTION_FAMILY.candidates(problem, budget, profile)
    if not candidates:
        return {}
    default = ATTENTION_FAMILY.choose(problem, budget, profile)
    found = sorted(candidates, key=lambda x: (x != default, _distance(x, default)))[:most]
    return {x: ATTENTION_FAMILY.predict_us(problem, x, budget, profile) for x in found}


def _distance(config: AttentionConfig, default: AttentionConfig) -> int:
    """How unlike the default: those near it are tried first."""
    stages = abs(config.num_stages - default.num_stages) // 2
    ctas = abs(config.ctas_per_sm - default.ctas_per_sm)
    return stages + ctas + abs(config.teams - default.teams)


class AttentionTuner(Tuner[AttentionProblem, AttentionConfig]):
    """Measures cells of one case on one device.

    Args:
        dispatcher: prepares the launches.
        operands: caches over one page table, rotated past L2.
    """

    name = OP
    tolerance = 2e-2
    """With fp8 caches too: the reference reads the same bytes."""

    def __init__(self, dispatcher: AttentionDispatcher, operands: AttentionOperands) -> None:
        self.dispatcher, self.operands = dispatcher, operands
        self._plan: Plan | None = None

    def order(self, problem: AttentionProblem, config: AttentionConfig) -> Hashable:
        return constraints.bits(config)

    def expected(self, problem: AttentionProblem) -> Sequence[Tensor]:
        return [self.operands.reference()]

    def results(self, problem: AttentionProblem) -> Sequence[Tensor]:
        return [self.operands.sets[0].out]

    def prepare(self, problem: AttentionProblem, place: Place) -> None:
        self._plan = empty_plan(problem.shape, place.budget, self.operands.kv_lens.device)
        self.recover(problem, place)

    def recover(self, problem: AttentionProblem, place: Place) -> None:
        """The plan of the case's lengths, in place: calls that are fine have its addresses."""
        assert self._plan is not None
        ops, shape, plan = self.operands, problem.shape, self._plan
        plan.workspace.zero_()  # a failed launch may leave counts behind
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

    def launches(
        self, problem: AttentionProblem, place: Place, config: AttentionConfig
    ) -> Sequence[Callable[[], object]]:
        assert self._plan is not None
        bind = self.dispatcher.launch(problem, config, place.budget)
        given = [self._arguments(index, self._plan) for index in range(len(self.operands.sets))]
        stream = place.stream.cuda_stream
        return [partial(bind(one.sizes), stream, *one.addresses) for one in given]

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


def _tuner(cases: Sequence[AttentionCase], dispatcher: Any, device: str) -> AttentionTuner:
    (case,) = cases
    return AttentionTuner(dispatcher, AttentionOperands(case, device))


def _tasks(
    problem: AttentionProblem, budget: Budget, configs: Sequence[AttentionConfig], dispatcher: Any
) -> Tasks:
    """The CUDA variants of the candidates, and the plan's kernel."""
    from smkern.kernels.attention.cuda import PlanVariant, variant_of

    plan = PlanVariant(dispatcher.profile.info.sm)
    cuda = [config for config in configs if config.kernel == "cuda"]
    found = {variant_of(problem, config, plan.capability) for config in cuda}
    return {plan: plan.compile} | {variant: variant.compile for variant in found}


FAMILY = MeasuredFamily(
    tuned=ATTENTION_FAMILY,
    listed=listed,
    dispatcher=attention_dispatcher,
    tuner=_tuner,
    tasks=_tasks,
    best=partial(best_cell, same_within=SAME_WITHIN),
)
