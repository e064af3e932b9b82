"""The attention kernels of one device: whichever a configuration names, loaded once, counted."""

from __future__ import annotations

from collections.abc import Callable

from smkern.errors import ArgumentError
from smkern.kernels.attention_args import AttentionArguments
from smkern.kernels.attention_cuda import CudaAttention, PlanLaunch
from smkern.kernels.launch import ledger
from smkern.tuning.attention import AttentionConfig, AttentionProblem, AttentionShape, Budget

Launch = Callable[[AttentionArguments, int], None]


class AttentionKernels:
    """Prepares launches of plans and of attention on one device.

    Args:
        device_index: Of the GPU.
        capability: 90 and the like.
    """

    def __init__(self, device_index: int, capability: int) -> None:
        self.device_index, self.capability = device_index, capability
        self._cuda = CudaAttention(capability, ledger().append)
        self._triton: dict[tuple[AttentionProblem, AttentionConfig, Budget], Launch] = {}

    def plan(self, shape: AttentionShape, budget: Budget) -> PlanLaunch:
        """The launch that makes a plan: `launch(kv_lens, cu_q_lens or 0, plan, workspace, stream)`."""
        return self._cuda.plan(shape, budget)

    def is_plan_loaded(self, shape: AttentionShape) -> bool:
        """Whether `plan` would compile and load nothing."""
        return self._cuda.is_plan_loaded

    def is_loaded(self, problem: AttentionProblem, config: AttentionConfig) -> bool:
        """Whether `prepare` would compile and load nothing."""
        if config.kernel == "cuda":
            return self._cuda.is_loaded(problem, config)
        return any(key[:2] == (problem, config) for key in self._triton)

    def prepare(self, problem: AttentionProblem, config: AttentionConfig, budget: Budget) -> Launch:
        """The launch of a problem by a configuration within a budget; loads its kernel if new.

        Raises:
            ArgumentError: no such kernel in this build.
        """
        if config.kernel == "cuda":
            return self._cuda.prepare(problem, config, budget)
        if config.kernel != "triton":
            raise ArgumentError(
                f"attention kernel {config.kernel!r} is not in this build: use 'cuda' or 'triton'"
            )
        key = (problem, config, budget)
        if key not in self._triton:
            from smkern.kernels.attention_triton_launch import prepare_triton

            self._triton[key] = prepare_triton(problem, config, budget, self.capability)
            ledger().append(key)
        return self._triton[key]
