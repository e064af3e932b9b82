"""From an attention problem to its launch: table or cost model, then the kernels of one device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from smkern.errors import ArgumentError, WarmupError
from smkern.kernels.attention.args import AttentionArguments, Bind
from smkern.ops.bounded_cache import keep, model_rows
from smkern.ops.operator_dispatch import absent_kernels
from smkern.tuning.attention.shapes import AttentionConfig, AttentionProblem, AttentionShape, Budget

if TYPE_CHECKING:
    from smkern.kernels.attention.cuda import PlanLaunch
    from smkern.kernels.attention.launch import AttentionKernels
    from smkern.profile import Profile

Violations = Callable[[AttentionArguments, AttentionProblem], tuple[str, ...]]
"""Why the CUDA kernels cannot take a call's addresses and strides."""


class AttentionDispatcher:
    """Chooses and prepares attention launches for one device, each combination once.

    Args:
        profile: The device's facts and ceilings.
        kernels: Makes the kernels of this device on first need.
        select: `select_attention`, which chooses a configuration.
        violations: What a call's addresses and strides keep from the CUDA kernels.
        table: Tuned cells, or None.
    """

    def __init__(
        self,
        profile: Profile,
        kernels: Callable[[], AttentionKernels],
        select: Callable[..., Any],
        violations: Violations,
        table: Any,
    ) -> None:
        self.profile = profile
        self.table = table
        self.kernels = cache(kernels)
        self._select = select
        self._violations = violations
        self._selections: dict[tuple[Any, ...], Any] = {}
        self._launches: dict[tuple[Any, ...], Bind] = {}
        self._plans: dict[tuple[AttentionShape, Budget], PlanLaunch] = {}
        self._lock = threading.RLock()

    def select(self, problem: AttentionProblem, budget: Budget, backend: str | None = None) -> Any:
        """The selection (`config`, `source`) for a problem in a budget; one for a step of prompts.

        Raises:
            ArgumentError: `backend` names a kernel that cannot run this problem here.
        """
        key = (of_step(problem), budget, backend)
        found = self._selections.get(key)
        if found is None:
            table = None if backend == "model" else self.table
            kernel = None if backend == "model" else backend
            found = self._select(key[0], budget, self.profile, table, kernel)
            keep(self._selections, key, found)
        return found

    def config(
        self,
        problem: AttentionProblem,
        budget: Budget,
        backend: str | None,
        arguments: AttentionArguments,
    ) -> AttentionConfig:
        """The configuration that runs a call with these addresses and strides.

        Where the choice is the CUDA kernels and they cannot take them, Triton's stands in.

        Raises:
            ArgumentError: `backend="cuda"` and they cannot.
        """
        config: AttentionConfig = self.select(problem, budget, backend).config
        if config.kernel != "cuda":
            return config
        reasons = self._violations(arguments, problem)
        if not reasons:
            return config
        if backend == "cuda":
            raise ArgumentError(
                f"backend='cuda' cannot run this call: {'; '.join(reasons)}; leave backend at None"
            )
        found: AttentionConfig = self.select(problem, budget, "triton").config
        return found

    def launch(
        self,
        problem: AttentionProblem,
        config: AttentionConfig,
        budget: Budget,
        *,
        capturing: bool = False,
        aligned: bool = True,
    ) -> Bind:
        """What binds the launches of a problem; compiles and loads it unless in a capture.

        `aligned`: addresses and strides of the calls to come are whole 16 bytes.

        Raises:
            WarmupError: a capture needs a kernel that is not loaded.
        """
        key = (problem, config, budget, aligned)
        found = self._launches.get(key)
        if found is None:
            if capturing and not self.kernels().is_loaded(problem, config, aligned):
                s = problem.shape
                raise WarmupError(
                    f"attention of {s.num_q_heads} query and {s.num_kv_heads} KV heads, head_dim "
                    f"{s.head_dim}, {problem.dtype} with a {problem.cache_dtype} cache on "
                    f"{budget.num_sms} SMs needs kernel {config.kernel!r} (16-byte aligned: "
                    f"{aligned}), which is not loaded, "
                    "and a graph capture cannot load one: call smkern.warmup(attention=[...], "
                    "budgets=[...]), or this attention once, before"
                )
            with self._lock:
                found = self.kernels().prepare(problem, config, budget, aligned)
                keep(self._launches, key, found)
        return found

    def plan(self, shape: AttentionShape, budget: Budget, *, capturing: bool = False) -> PlanLaunch:
        """The launch that makes a plan; compiles and loads it unless in a capture.

        Raises:
            WarmupError: a capture needs the kernel and it is not loaded.
        """
        found = self._plans.get((shape, budget))
        if found is None:
            if capturing and not self.kernels().is_plan_loaded():
                raise WarmupError(
                    f"the plan of {shape} needs a kernel that is not loaded, and a graph capture "
                    "cannot load one: call smkern.warmup(attention=[...], budgets=[...]), or "
                    "plan_attention once, before"
                )
            with self._lock:
                found = self.kernels().plan(shape, budget)
                keep(self._plans, (shape, budget), found)
        return found


def of_step(problem: AttentionProblem) -> AttentionProblem:
    """The problem that the choice of a whole step is made for: a prompt's numbers, rounded up.

    Decode keeps its own: they are few, and the model prices them exactly.
    """
    s = problem.shape
    if not s.has_prefill:
        return problem
    shape = replace(
        s,
        max_q_len=model_rows(s.max_q_len),
        max_kv_len=model_rows(s.max_kv_len),
        max_tokens=model_rows(s.max_tokens),
        max_total_kv=model_rows(s.max_total_kv),
    )
    return replace(problem, shape=shape)


@cache
def attention_dispatcher(index: int) -> AttentionDispatcher:
    """The dispatcher of a device that is present: its profile, its tables, its kernels."""
    from smkern.profile import load_profile

    profile = load_profile(index)

    def kernels() -> Any:
        from smkern.kernels.attention.launch import AttentionKernels

        return AttentionKernels(profile.info.sm)

    return _dispatcher(profile, kernels)


def offline_dispatcher(profile: Profile) -> AttentionDispatcher:
    """A dispatcher that chooses for a device that may be absent; it cannot prepare launches."""
    return _dispatcher(profile, absent_kernels)


def _dispatcher(profile: Profile, kernels: Callable[[], AttentionKernels]) -> AttentionDispatcher:
    from smkern.kernels.attention.cuda import violations
    from smkern.tuning.attention.select import ATTENTION_FAMILY, select_attention

    table = ATTENTION_FAMILY.load(profile)
    return AttentionDispatcher(profile, kernels, select_attention, violations, table)
