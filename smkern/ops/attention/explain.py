"""A question about attention that launches nothing: which kernel and configuration, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from smkern.device import Confinement
from smkern.kernels.attention.args import WorkspaceLayout
from smkern.kernels.attention.items import PlanLayout
from smkern.ops import checks
from smkern.ops.annotated import checked
from smkern.ops.attention.call import BACKENDS, problem_from
from smkern.ops.attention.dispatch import attention_dispatcher, offline_dispatcher
from smkern.ops.attention.plan import PlanNumbers, shape_of_plan
from smkern.ops.checks import check_choice
from smkern.ops.explain import dispatcher_and_budget
from smkern.tuning.attention.shapes import AttentionConfig, AttentionProblem, AttentionShape, Budget

if TYPE_CHECKING:
    from smkern.partition import Partition


@dataclass(frozen=True, slots=True)
class AttentionExplanation:
    """What runs an attention step in a budget, and what the cost model knows of it.

    Args:
        problem: Shape, dtypes and options.
        budget: SMs and what confines them.
        config: The kernel and its run-time numbers.
        source: Where they came from: a tuned cell, the cost model, or `backend=`.
        predicted_us: Time of one launch with cold caches, without the plan.
        floor_us: The larger of bytes over the budget's bandwidth and FLOPs over its rate.
        bound: What the prediction waits for: memory, the busiest SM's work, or power.
        bytes_moved: Keys, values, queries, results and page table, once each.
        flops: FLOPs of the visible pairs of query and key.
        units: Items times KV heads, what the CTAs share.
        ctas: CTAs of the launch, at most.
        plan_bytes: A plan's work items.
        workspace_bytes: A plan's workspace.
        device: Name of the GPU that this holds for.
    """

    problem: AttentionProblem
    budget: Budget
    config: AttentionConfig
    source: Literal["table", "model", "forced"]
    predicted_us: float
    floor_us: float
    bound: str
    bytes_moved: int
    flops: int
    units: int
    ctas: int
    plan_bytes: int
    workspace_bytes: int
    device: str

    def __str__(self) -> str:
        s, p, c, b = self.problem.shape, self.problem, self.config, self.budget
        how = (
            f"{c.teams} teams"
            if c.kernel == "cuda"
            else f"{c.keys} keys a step, {c.num_warps} warps, {c.num_stages} stages"
        )
        by = {"mask": "a mask", "grid": "the grid"}[b.confined]
        return (
            f"attention of a batch of {s.batch}, q_len up to {s.max_q_len}, kv_len up to "
            f"{s.max_kv_len}, {s.num_q_heads}/{s.num_kv_heads} heads of {s.head_dim}, pages of "
            f"{s.page_size}, {p.dtype} on {p.cache_dtype}, on {b.num_sms} SMs of {self.device} "
            f"confined by {by}: kernel {c.kernel}, {how}, "
            f"{self.units} units over {self.ctas} CTAs, {self.predicted_us:.1f} us predicted, "
            f"floor {self.floor_us:.1f} us, bound by {self.bound}; plan {self.plan_bytes} bytes, "
            f"workspace {self.workspace_bytes} bytes; chosen by {self.source}"
        )


def shape_from_numbers(batch: Any, given: PlanNumbers) -> AttentionShape:
    """The shape of a step with these host numbers, checked as `plan_attention` does.

    Raises:
        ArgumentError: naming the number, its value and what is wanted.
    """
    count = checks.as_int("batch", batch, 1)
    lens = torch.empty(count, dtype=torch.int32, device="meta")
    starts = None
    if given.max_q_len != 1:
        starts = torch.empty(count + 1, dtype=torch.int32, device="meta")
    return shape_of_plan(lens, starts, given)


@checked
def explain_attention(
    batch: int,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    max_q_len: int = 1,
    max_kv_len: int,
    causal: bool = True,
    window: int | None = None,
    softcap: bool = False,
    sinks: bool = False,
    num_tokens: int | None = None,
    max_total_kv: int | None = None,
    kv_lens: Sequence[int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    cache_dtype: torch.dtype | None = None,
    backend: str | None = None,
    num_sms: int | None = None,
    confined: Confinement | None = None,
    clusters: bool | None = None,
    partition: Partition | Budget | None = None,
    device: int | None = None,
) -> AttentionExplanation:
    """Which kernel `smkern.paged_attention` takes for a step in a budget, and what it may cost.

    On a machine with no GPU it answers for the GPU whose profile and tables are shipped.

    Args:
        batch: Requests.
        num_q_heads: Query heads.
        num_kv_heads: KV heads.
        head_dim: 64, 96, 128 or 256.
        page_size: Tokens of a page.
        max_q_len: Query tokens of a request, at most.
        max_kv_len: Keys of a request, at most.
        causal: As in `smkern.paged_attention`.
        window: As in `smkern.paged_attention`.
        softcap: Whether scores are capped.
        sinks: Whether heads have sinks.
        num_tokens: Query tokens of the step, at most. None: batch * max_q_len.
        max_total_kv: Keys of the step, at most. None: batch * max_kv_len.
        kv_lens: Lengths to predict for, repeated over the batch. None: the upper bounds.
        dtype: Dtype of the queries: torch.bfloat16 or torch.float16.
        cache_dtype: None (dtype's) or torch.float8_e4m3fn.
        backend: As in `smkern.paged_attention`.
        num_sms: As in `smkern.paged_attention`.
        confined: As in `smkern.explain_gemm`.
        clusters: As in `smkern.explain_gemm`.
        partition: As in `smkern.explain_gemm`.
        device: Index of the GPU; None is the current one.

    Returns:
        An AttentionExplanation; `print` it for a sentence. It holds for caches whose pages, tokens
        and heads the CUDA kernels can take; for others Triton's stand in.

    Raises:
        BudgetError, ArgumentError: as `smkern.paged_attention` does.

    Example:
        >>> import smkern
        >>> why = smkern.explain_attention(
        ...     64, num_q_heads=32, num_kv_heads=8, head_dim=128, page_size=16, max_kv_len=4096,
        ...     num_sms=32, confined="mask")
        >>> why.floor_us < why.predicted_us
        True
    """
    from smkern.tuning.attention.model import estimate

    check_choice("backend", backend, BACKENDS)
    given = PlanNumbers(
        num_q_heads, num_kv_heads, head_dim, page_size, max_q_len, max_kv_len, causal, window,
        num_tokens, max_total_kv,
    )  # fmt: skip
    shape = shape_from_numbers(batch, given)
    problem = problem_from(shape, dtype, cache_dtype or dtype, bool(softcap), bool(sinks))
    dispatcher, budget = dispatcher_and_budget(
        device, attention_dispatcher, offline_dispatcher,
        num_sms=num_sms, confined=confined, clusters=clusters, partition=partition,
    )  # fmt: skip
    profile = dispatcher.profile
    found = dispatcher.select(problem, budget, backend)
    about = estimate(problem, found.config, budget, profile, kv_lens=kv_lens)
    return AttentionExplanation(
        problem=problem,
        budget=budget,
        config=found.config,
        source="forced" if backend not in (None, "model") else found.source,
        predicted_us=about.predicted_us,
        floor_us=about.floor_us,
        bound=about.bound,
        bytes_moved=about.bytes_moved,
        flops=about.flops,
        units=about.decode_units + about.prefill_units,
        ctas=about.ctas,
        plan_bytes=4 * PlanLayout.of(shape).words,
        workspace_bytes=WorkspaceLayout.of(shape).num_bytes,
        device=profile.info.name,
    )
