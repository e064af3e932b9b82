"""Selects an attention step's configuration: from the tuned table if it has the cell, else by the
model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from smkern.device import check_budget
from smkern.errors import ArgumentError
from smkern.tuning.attention import constraints
from smkern.tuning.attention.key import AttentionKey
from smkern.tuning.attention.model import predict_us
from smkern.tuning.attention.shapes import (
    AttentionConfig,
    AttentionKernel,
    AttentionProblem,
    AttentionShape,
    Budget,
)
from smkern.tuning.bucket_table import BucketTable
from smkern.tuning.family import BucketFamily, Selection

if TYPE_CHECKING:
    from smkern.profile import Profile

MUST_GAIN = 1.05
"""Predicted speed-up that another configuration needs to replace the default."""
FEW_UNITS, FEW_TEAMS = 24, 2
"""Of wide rows, more than `NARROW_ROWS`, up to 24 decode units an SM are faster by two teams, but
of heads of 64, whose teams have half as many bytes in flight.

Three teams over two, 64 heads on 8, 16 to 132 SMs of an H200: 1.02 to 1.17 with up to 16 units an
SM, 1.0 with 24, 0.85 to 1.01 with more, but 1.02 to 1.04 with 31 on the whole device. A team's
warps add their sums one after another there, and a thread of three teams has fewer registers. 14
heads of 64 on 2: 0.78 and 0.80 on 32 and 84 SMs, once 1.08.
"""


AttentionTable = BucketTable[AttentionKey, AttentionConfig]


def select_attention(
    problem: AttentionProblem,
    budget: Budget,
    profile: Profile,
    table: AttentionTable | None = None,
    backend: str | None = None,
) -> Selection[AttentionConfig]:
    """The configuration for `problem` in `budget`; pure, needs no GPU.

    The kernel depends on the model and the device only. Batch and budget choose run-time numbers
    (teams, stages, CTAs per SM), so they never change a row's bits.

    Args:
        problem: Shape, dtypes, options.
        budget: SMs and what confines them.
        profile: The device's facts and ceilings.
        table: Tuned cells; the model chooses without them, or with none near the problem.
        backend: None, or the name of a kernel, for which the table is not used.

    Raises:
        BudgetError: a budget below one SM.
        ArgumentError: `backend`, or every kernel, cannot serve the problem on this device.
    """
    check_budget(budget)
    capability = profile.info.capability
    if backend not in (None, *constraints.AVAILABLE):
        raise ArgumentError(
            f"backend={backend!r} is none of {list(constraints.AVAILABLE)}: leave it at None"
        )
    if backend is None and table is not None:
        found = ATTENTION_FAMILY.lookup(problem, budget, profile, table)
        if found is not None:
            return Selection(found, "table")
    named = next((kernel for kernel in constraints.AVAILABLE if kernel == backend), None)
    kernel = named or constraints.served_by(problem, budget, capability)
    listed = _listed(problem, budget, capability, kernel)
    if not listed:
        raise ArgumentError(_unserved(problem, budget, capability, named))
    config = _best(problem, budget, profile, _worthwhile(problem, budget, listed))
    return Selection(config, "model" if backend is None else "forced")


def reachable(
    problem: AttentionProblem,
    budget: Budget,
    profile: Profile,
    table: AttentionTable | None = None,
    backend: AttentionKernel | None = None,
) -> list[AttentionConfig]:
    """All configurations that `select_attention` can return for any batch and lengths.

    Args:
        problem: Heads, head_dim, page size, longest query, dtypes and options matter.
        table: Tuned cells, or None.
        backend: None, or a kernel's name.

    Raises:
        ArgumentError: see `select_attention`.
    """
    select_attention(problem, budget, profile, table, backend)
    capability = profile.info.capability
    kernel = backend or constraints.served_by(problem, budget, capability)
    tuned: list[AttentionConfig] = []
    if table is not None and not backend:
        cells = set(table.series(AttentionKey.of(problem, budget)))
        tuned = sorted(x for x in cells if _keeps_kernel(problem, x, budget, profile))
    return list(dict.fromkeys([*_listed(problem, budget, capability, kernel), *tuned]))


def candidates(
    problem: AttentionProblem,
    budget: Budget,
    capability: constraints.Capability,
    kernel: AttentionKernel,
) -> list[AttentionConfig]:
    """Every legal configuration of a kernel; all give the same bits as its default."""
    resident = range(1, constraints.MAX_RESIDENT + 1) if budget.confined == "mask" else (1,)
    prefill = problem.shape.has_prefill
    if kernel == "triton":
        base = constraints.default_config(problem, kernel, capability)
        stages = (2, 3, 4) if prefill else (3, 5, 7, 9)
        most = 2 if prefill else constraints.MAX_RESIDENT
        found = [
            replace(base, num_stages=count, ctas_per_sm=ctas)
            for count, ctas in product(stages, resident)
            if ctas <= most
        ]
    elif prefill:
        found = [constraints.CUDA_PREFILL]
    else:
        teams = product((1, *constraints.TEAMS), resident)
        found = [AttentionConfig("cuda", ctas, count) for count, ctas in teams]
    return [x for x in found if constraints.is_legal(problem, x, budget, capability)]


def _listed(
    problem: AttentionProblem,
    budget: Budget,
    capability: constraints.Capability,
    kernel: AttentionKernel | None,
) -> list[AttentionConfig]:
    """The model's candidates, the default first: CUDA's teams; for Triton only the default.

    The model knows too little about Triton's stages and residency to overrule a measured default.
    """
    if kernel is None:
        return []
    default = constraints.default_config(problem, kernel, capability)
    if budget.confined == "grid":
        default = replace(default, ctas_per_sm=1)
    found = candidates(problem, budget, capability, kernel)
    if constraints.is_legal(problem, default, budget, capability):
        others = [config for config in found if config != default]
        return [default, *others] if kernel == "cuda" else [default]
    return found


def _worthwhile(
    problem: AttentionProblem, budget: Budget, listed: list[AttentionConfig]
) -> list[AttentionConfig]:
    """Those to choose from, without teams that few decode units do not need, the default first."""
    shape = problem.shape
    units = shape.max_decode_items * shape.num_kv_heads
    wide = shape.decode_rows > constraints.NARROW_ROWS and shape.head_dim > 64
    if not wide or shape.has_prefill or units > FEW_UNITS * budget.num_sms:
        return listed
    few = [x for x in listed if x.kernel != "cuda" or x.teams <= FEW_TEAMS]
    return sorted(few, key=lambda x: x.teams, reverse=True) or listed


def _best(
    problem: AttentionProblem, budget: Budget, profile: Profile, listed: Sequence[AttentionConfig]
) -> AttentionConfig:
    """The first, or the fastest if it is predicted faster by more than the model's error."""
    if len(listed) == 1:
        return listed[0]
    times = [predict_us(problem, config, budget, profile) for config in listed]
    fastest = min(range(len(times)), key=times.__getitem__)
    return listed[fastest if MUST_GAIN * times[fastest] < times[0] else 0]


def _unserved(
    problem: AttentionProblem,
    budget: Budget,
    capability: constraints.Capability,
    backend: AttentionKernel | None,
) -> str:
    """The error message: the constraints that the kernel's default breaks, and the remedy."""
    kernel = backend or "triton"
    default = constraints.default_config(problem, kernel, capability)
    broken = constraints.violations(problem, default, budget, capability)
    shape = problem.shape
    remedy = "leave backend at None" if backend else "use sm_80 or later, and a head_dim up to 256"
    return (
        f"kernel {kernel!r} cannot run head_dim={shape.head_dim}, page_size={shape.page_size}, "
        f"{problem.dtype} queries on {problem.cache_dtype} caches on compute capability "
        f"{capability[0]}.{capability[1]} (breaks {', '.join(broken) or 'residency'}): {remedy}"
    )


def _keeps_kernel(
    problem: AttentionProblem, config: AttentionConfig, budget: Budget, profile: Profile
) -> bool:
    """Legal, and for the problem's own kernel: another one would change bits."""
    capability = profile.info.capability
    kernel = constraints.served_by(problem, budget, capability)
    return config.kernel == kernel and constraints.is_legal(problem, config, budget, capability)


def _candidates(
    problem: AttentionProblem, budget: Budget, profile: Profile
) -> list[AttentionConfig]:
    """Candidates for the kernel that serves a problem; empty if none does."""
    capability = profile.info.capability
    kernel = constraints.served_by(problem, budget, capability)
    return candidates(problem, budget, capability, kernel) if kernel else []


def _problems(key: AttentionKey) -> tuple[AttentionProblem, ...]:
    """Problems of the longest and the shortest queries of a key."""
    return tuple(
        AttentionProblem(
            AttentionShape(
                key.batch, key.num_q_heads, key.num_kv_heads, key.head_dim, key.page_size, q_len,
                key.kv_len, key.batch * q_len, key.batch * key.kv_len,
            ),
            key.dtype,
            key.cache_dtype,
        )
        for q_len in (key.q_len, key.q_len // 2 + 1)
    )  # fmt: skip


ATTENTION_FAMILY: BucketFamily[AttentionProblem, AttentionConfig] = BucketFamily(
    name="attention",
    key=AttentionKey,
    problems=_problems,
    default=AttentionConfig(),
    candidates=_candidates,
    predict_us=predict_us,
    legal=_keeps_kernel,
    modelled=lambda problem, budget, profile: select_attention(problem, budget, profile).config,
)
