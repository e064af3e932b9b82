"""Attention's part of a warmup: every kernel that dispatch can pick for a model, launched once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from smkern.kernels.attention.args import AttentionArguments
from smkern.ops import checks
from smkern.ops.annotated import check_fields
from smkern.ops.attention.call import check_heads_of_scales, problem_from
from smkern.ops.attention.dispatch import AttentionDispatcher
from smkern.ops.attention.explain import shape_from_numbers
from smkern.ops.attention.merge import MERGE, Merge
from smkern.ops.attention.plan import PlanNumbers, empty_plan
from smkern.ops.attention.plan_eager import EagerPlans, eager_plans
from smkern.ops.checks import DTYPES, FP8, FP8_BLOCK
from smkern.ops.operator import Operator
from smkern.ops.operator_dispatch import Compile
from smkern.ops.operator_warmup import joined, work_of_calls
from smkern.ops.warming import Target, Work, room
from smkern.tuning.attention.select import reachable
from smkern.tuning.attention.shapes import DECODE_MAX_Q, AttentionConfig, AttentionProblem, Budget

Choice = tuple[AttentionProblem, AttentionConfig, bool]
"""What is launched, how, and whether its tensors are 16-byte aligned."""


@dataclass(frozen=True, slots=True)
class AttentionCalls:
    """Attention calls to come, for `smkern.warmup`: what a model fixes; batch and lengths are free.

    Args:
        num_q_heads: Query heads.
        num_kv_heads: KV heads; those of this device under tensor parallelism.
        head_dim: 64, 96, 128 or 256.
        page_size: Tokens of a page.
        max_q_len: Calls come with this `max_q_len` or less.
        causal: As in `smkern.paged_attention`.
        window: As in `smkern.paged_attention`.
        softcap: Whether scores are capped.
        sinks: Whether heads have sinks.
        dtype: Dtype of the queries: torch.bfloat16 or torch.float16.
        cache_dtype: None (dtype's) or torch.float8_e4m3fn.
        out_scale: Whether calls have `out_scale`, and write e4m3.

    Raises:
        ArgumentError: numbers or dtypes that cannot be.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    max_q_len: int = 1
    causal: bool = True
    window: int | None = None
    softcap: bool = False
    sinks: bool = False
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None
    out_scale: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        self.problems()
        if self.out_scale:
            check_heads_of_scales(self.num_q_heads, self.num_kv_heads, self.head_dim)

    def problems(self) -> list[AttentionProblem]:
        """The smallest problem of every path and width of decode item that calls can have."""
        longest = checks.as_int("max_q_len", self.max_q_len, 1)
        steps = [[count] for count in range(1, min(longest, DECODE_MAX_Q) + 1)]
        if longest > DECODE_MAX_Q:
            steps += [[DECODE_MAX_Q + 1], [DECODE_MAX_Q + 1, 1]]
        return [self._problem(q_lens) for q_lens in steps]

    def _problem(self, q_lens: list[int]) -> AttentionProblem:
        longest = max(q_lens)
        given = PlanNumbers(
            self.num_q_heads, self.num_kv_heads, self.head_dim, self.page_size, longest, longest,
            self.causal, self.window, sum(q_lens), None,
        )  # fmt: skip
        return problem_from(
            shape_from_numbers(len(q_lens), given),
            self.dtype,
            self.cache_dtype or self.dtype,
            self.softcap,
            self.sinks,
            self.out_scale,
        )

    def work(self, target: Target) -> Work:
        """What these calls need on a device: attention, its plans and the merge of its states."""
        return joined(
            [work_of(eager_plans(target.index), self, target), work_of_calls(self.merges, target)]
        )

    def merges(self, device: torch.device, aligned: bool) -> list[tuple[Operator[Any], Any]]:
        """A merge of two states of a token, on tensors of its own."""
        states = (2, 1, self.num_q_heads, self.head_dim)
        outs = room(states, self.dtype, aligned, device)
        return [(MERGE, Merge(outs, torch.zeros(states[:3], dtype=torch.float32, device=device)))]


def choices(
    dispatcher: AttentionDispatcher, calls: AttentionCalls, target: Target
) -> Iterator[Choice]:
    """Every choice that dispatch can make for these calls.

    With tensors that are not aligned Triton stands in for CUDA's kernels, and also where K and V
    merely differ in strides, so it comes aligned, too.
    """
    profile, table = dispatcher.profile, dispatcher.table
    budgets = {(budget.num_sms, budget.confined): budget for budget in target.budgets}
    for problem in calls.problems():
        for budget in budgets.values():
            own = reachable(problem, budget, profile, table)
            if True in target.aligned:
                yield from ((problem, config, True) for config in own)
            if False in target.aligned:
                others = [config for config in own if config.kernel == "triton"]
                if not others:
                    others = reachable(problem, budget, profile, backend="triton")
                yield from (
                    (problem, config, aligned) for config in others for aligned in (True, False)
                )


def work_of(eager: EagerPlans, calls: AttentionCalls, target: Target) -> Work:
    """Sort choices by the kernels that they are made of; launch one of each."""
    from smkern.kernels.attention.cuda import PlanVariant

    dispatcher, kernels = eager.dispatcher, eager.dispatcher.kernels()
    launched: dict[Any, Choice] = {}
    count = 0
    for choice in choices(dispatcher, calls, target):
        count += 1
        launched.setdefault(kernels.variants(*choice), choice)
    wanted: list[Any] = list(
        dict.fromkeys(
            variant
            for variants, choice in launched.items()
            if not kernels.is_loaded(*choice)
            for variant in variants
        )
    )
    if not kernels.is_plan_loaded():
        wanted.insert(0, PlanVariant(dispatcher.profile.info.sm))
    return Work(
        choices=count,
        variants=len({variant for variants in launched for variant in variants}) + 1,
        compile=[Compile(variant) for variant in wanted],
        launches=[partial(launch_once, eager, *choice) for choice in launched.values()],
    )


def launch_once(
    eager: EagerPlans, problem: AttentionProblem, config: AttentionConfig, aligned: bool
) -> None:
    """Make a plan and launch a choice on the current stream, on tensors of its own."""
    shape, dispatcher = problem.shape, eager.dispatcher
    device = torch.device("cpu" if eager.index < 0 else f"cuda:{eager.index}")
    budget = Budget(dispatcher.profile.info.num_sms, "mask", True)
    heads = (shape.max_tokens, shape.num_q_heads, shape.head_dim)
    pages = (1, shape.page_size, shape.num_kv_heads, shape.head_dim)
    q = room(heads, DTYPES[problem.dtype], aligned, device)
    out = torch.empty(heads, dtype=FP8 if problem.scaled else q.dtype, device=device)
    columns = shape.num_q_heads * shape.head_dim // FP8_BLOCK
    out_scale = torch.empty(shape.max_tokens, columns, dtype=torch.float32, device=device)
    caches = torch.empty(2, *pages, dtype=DTYPES[problem.cache_dtype], device=device)
    table = torch.zeros(shape.batch, shape.max_kv_len, dtype=torch.int32, device=device)
    sinks = torch.zeros(shape.num_q_heads, dtype=torch.float32, device=device)
    kv_lens = torch.full((shape.batch,), shape.max_kv_len, dtype=torch.int32, device=device)
    starts = torch.full((shape.batch + 1,), shape.max_tokens, dtype=torch.int32, device=device)
    starts[0] = 0
    starts[1] = min(shape.max_q_len, shape.max_tokens)
    plan = empty_plan(shape, budget, device)
    stream = eager.streams.current_stream(eager.index)
    rows: Any = out.stride()[:2]
    cache: Any = caches.stride()[1:4]
    arguments = AttentionArguments(
        q.data_ptr(), caches[0].data_ptr(), caches[1].data_ptr(), out.data_ptr(), 0,
        table.data_ptr(), 0, sinks.data_ptr() if problem.sinks else 0, 0, 0,
        plan.buffer.data_ptr(), plan.workspace.data_ptr(),
        rows, rows, cache, cache, table.stride(0), table.shape[1], 1, shape.max_tokens,
        shape.head_dim**-0.5, 30.0 if problem.softcap else 0.0, 1.0, 1.0, (columns, 1),
    )  # fmt: skip
    starts_ptr = starts.data_ptr() if shape.max_q_len > 1 else 0
    dispatcher.plan(shape, budget)(
        kv_lens.data_ptr(), starts_ptr, arguments.plan, arguments.workspace, stream
    )
    bind = dispatcher.launch(problem, config, budget, aligned=aligned)
    bind(arguments.sizes)(stream, *arguments.addresses, 0, 0, 0, out_scale.data_ptr())
