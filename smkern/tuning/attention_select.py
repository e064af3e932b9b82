"""Which configuration an attention step runs with: the tuned table where it has the cell, else
the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from smkern.errors import ArgumentError, BudgetError
from smkern.tuning import attention_space as space
from smkern.tuning.attention import AttentionConfig, AttentionKernel, AttentionProblem, Budget

if TYPE_CHECKING:
    from smkern.device import Profile


@dataclass(frozen=True, slots=True)
class Selection:
    """A configuration, where it came from, and the time that the model expects, us."""

    config: AttentionConfig
    source: Literal["table", "model", "forced"]
    predicted_us: float


def select_attention(
    problem: AttentionProblem,
    budget: Budget,
    profile: Profile,
    table: Any = None,
    backend: AttentionKernel | None = None,
) -> Selection:
    """The configuration for `problem` in `budget`; pure, needs no GPU.

    The kernel follows from the model and the device alone: batch and budget choose run-time numbers
    only (teams, stages, CTAs an SM), so they never turn a row's bits.

    Raises:
        BudgetError: a budget below one SM.
        ArgumentError: `backend`, or every kernel, cannot serve the problem on this device.
    """
    if budget.num_sms < 1:
        raise BudgetError(f"num_sms is {budget.num_sms}; give at least 1")
    capability = profile.info.capability
    if backend is not None and backend not in get_args(AttentionKernel):
        raise ArgumentError(f"backend={backend!r} is none of {space.AVAILABLE}, nor None")
    kernel = backend or space.default_kernel(problem, capability)
    found = space.candidates(problem, budget, capability, (kernel,))
    if not found and backend is None:
        found = space.candidates(problem, budget, capability, ("triton",))
    if not found:
        raise ArgumentError(_unserved(problem, budget, capability, kernel, backend))
    default = space.default_config(problem, found[0].kernel)
    if budget.confined == "grid":
        default = replace(default, ctas_per_sm=1)
    config = default if default in found else found[0]
    return Selection(config, "model" if backend is None else "forced", 0.0)


def _unserved(
    problem: AttentionProblem,
    budget: Budget,
    capability: space.Capability,
    kernel: AttentionKernel,
    backend: AttentionKernel | None,
) -> str:
    """What the error says: the rules that the kernel's default breaks, and the remedy."""
    broken = space.violations(problem, space.default_config(problem, kernel), budget, capability)
    shape = problem.shape
    remedy = "leave backend at None" if backend else "use sm_80 or later, and a head_dim up to 256"
    return (
        f"kernel {kernel!r} cannot run head_dim={shape.head_dim}, page_size={shape.page_size}, "
        f"{problem.dtype} queries on {problem.cache_dtype} caches on compute capability "
        f"{capability[0]}.{capability[1]} (breaks {', '.join(broken) or 'residency'}): {remedy}"
    )
