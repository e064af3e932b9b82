"""`smkern autotune --op moe` and `grouped_gemm`: routing, permutations and the grouped GEMM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from smkern.autotune.family import MeasuredFamily, ranked
from smkern.autotune.operator_tuner import operator_tasks, operator_tuner
from smkern.measure.timing import sets_for
from smkern.ops.moe.dispatch import moe_dispatcher
from smkern.ops.moe.grouped import GROUPED as GROUPED_OPERATOR
from smkern.ops.moe.grouped import Grouped, grouped_dispatcher
from smkern.ops.moe.permute import PERMUTE, Permute
from smkern.ops.moe.route import TOPK, Topk
from smkern.ops.moe.unpermute import UNPERMUTE, Unpermute
from smkern.ops.operator import Operator
from smkern.ops.reference.moe import places
from smkern.tuning import moe as tuning
from smkern.tuning.grouped import GROUPED_FAMILY, GroupedProblem
from smkern.tuning.moe import MoeProblem, PermuteProblem, TopkProblem, UnpermuteProblem

Op = Literal["topk_softmax", "moe_permute", "moe_unpermute", "gate_up", "down"]

TOKENS = (1, 8, 32, 64, 128, 512, 2048, 8192)
QUICK_TOKENS = (64, 2048)
MOE_OPS: tuple[Op, ...] = ("topk_softmax", "moe_permute", "moe_unpermute")
GROUPED_OPS: tuple[Op, ...] = ("gate_up", "down")
MAX_SETS = 32


@dataclass(frozen=True, slots=True)
class Experts:
    """Sizes of a model's experts."""

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int


MODELS = (Experts(2048, 768, 128, 8),)
"""Qwen3-30B-A3B."""


@dataclass(frozen=True, slots=True)
class MoeCase:
    """One operator of a model at some tokens, in bf16."""

    op: Op
    model: Experts
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.op}-{self.tokens}"

    @property
    def problem(self) -> MoeProblem | GroupedProblem:
        """The case as keys and cost models see it."""
        m, tokens = self.model, self.tokens
        if self.op == "topk_softmax":
            return TopkProblem(tokens, m.num_experts, m.top_k)
        if self.op == "moe_permute":
            return PermuteProblem(tokens, m.top_k, m.num_experts, m.hidden)
        if self.op == "moe_unpermute":
            return UnpermuteProblem(tokens, m.top_k, m.hidden, residual=True)
        rows = tokens * m.top_k
        if self.op == "gate_up":
            return GroupedProblem(rows, m.num_experts, m.intermediate, m.hidden, swiglu=True)
        return GroupedProblem(rows, m.num_experts, m.hidden, m.intermediate)


def routed(tokens: int, model: Experts, seed: int, device: str) -> Tensor:
    """[tokens, top_k] int32: different experts for each token, dealt at random."""
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(tokens, model.num_experts, generator=generator, device=device)
    return logits.topk(model.top_k, 1).indices.int()


def calls_of(case: MoeCase, device: str) -> tuple[Operator[Any], list[Any]]:
    """The operator, and calls with results, each on rows and choices of its own.

    Grouped products share one model's weights, which no L2 holds.
    """
    generator = torch.Generator(device).manual_seed(case.tokens)
    model, tokens, bf16 = case.model, case.tokens, torch.bfloat16
    rows = tokens * model.top_k

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=bf16)

    def empty(*shape: int, dtype: torch.dtype = bf16) -> Tensor:
        return torch.empty(shape, device=device, dtype=dtype)

    gate_up = case.op == "gate_up"
    weights = None
    if gate_up or case.op == "down":
        n, k = (
            (2 * model.intermediate, model.hidden)
            if gate_up
            else (model.hidden, model.intermediate)
        )
        weights = random(model.num_experts, n, k).mul_(0.02)

    def call(seed: int) -> Any:
        experts = routed(tokens, model, seed, device)
        offsets, index = places(experts, model.num_experts)
        if case.op == "topk_softmax":
            results = empty(tokens, model.top_k, dtype=torch.float32), torch.empty_like(experts)
            return Topk(random(tokens, model.num_experts), model.top_k, True, *results)
        if case.op == "moe_permute":
            made = empty(rows, model.hidden), torch.empty_like(offsets), torch.empty_like(index)
            return Permute(random(tokens, model.hidden), experts, model.num_experts, *made)
        if case.op == "moe_unpermute":
            shares = torch.rand(tokens, model.top_k, generator=generator, device=device)
            hidden = random(tokens, model.hidden)
            out = torch.empty_like(hidden)
            return Unpermute(random(rows, model.hidden), index, shares, hidden, out)
        if gate_up:
            out = empty(rows, model.intermediate)
            return Grouped(random(rows, model.hidden), weights, offsets, True, out=out)
        out = empty(rows, model.hidden)
        return Grouped(random(rows, model.intermediate), weights, offsets, out=out)

    count = sets_for(int(case.problem.bytes_moved), most=MAX_SETS)
    ops: dict[Op, Operator[Any]] = {
        "topk_softmax": TOPK, "moe_permute": PERMUTE, "moe_unpermute": UNPERMUTE,
        "gate_up": GROUPED_OPERATOR, "down": GROUPED_OPERATOR,
    }  # fmt: skip
    return ops[case.op], [call(seed) for seed in range(count)]


def cases_of(ops: Sequence[Op], tokens: Sequence[int]) -> list[MoeCase]:
    """Each operator of each model at each number of tokens."""
    return [MoeCase(op, model, count) for op in ops for model in MODELS for count in tokens]


MOE = MeasuredFamily(
    tuned=tuning.MOE_FAMILY,
    listed=ranked(tuning.MOE_FAMILY),
    dispatcher=moe_dispatcher,
    tuner=operator_tuner(calls_of),
    tasks=operator_tasks,
)
GROUPED = MeasuredFamily(
    tuned=GROUPED_FAMILY,
    listed=ranked(GROUPED_FAMILY),
    dispatcher=grouped_dispatcher,
    tuner=operator_tuner(calls_of, exact=False),
    tasks=operator_tasks,
)
