"""The attention kernels of one device, CUDA and Triton: loaded once each, and counted."""

from __future__ import annotations

from smkern.errors import ArgumentError
from smkern.kernels.aot import KernelSet
from smkern.kernels.attention.args import Bind
from smkern.kernels.attention.cuda import (
    CudaVariant,
    PlanLaunch,
    PlanVariant,
    prepare_cuda,
    prepare_plan,
    variant_of,
)
from smkern.kernels.attention.triton_compile import AttentionVariant, variants_of
from smkern.kernels.attention.triton_launch import prepare_triton
from smkern.tuning.attention.shapes import AttentionConfig, AttentionProblem, AttentionShape, Budget


class AttentionKernels:
    """Prepares launches of plans and of attention on one device.

    Args:
        capability: Compute capability, such as 90.
    """

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self._set = KernelSet()

    def plan(self, shape: AttentionShape, budget: Budget) -> PlanLaunch:
        """The launch that makes a plan of `shape` for `budget`; see `PlanLaunch`."""
        return prepare_plan(shape, budget, self.capability, self._set)

    def is_plan_loaded(self) -> bool:
        """Whether `plan` would compile and load nothing."""
        return self._set.is_loaded(PlanVariant(self.capability))

    def variants(
        self, problem: AttentionProblem, config: AttentionConfig, aligned: bool = True
    ) -> tuple[CudaVariant | AttentionVariant, ...]:
        """The kernels of a launch; `aligned` matters to Triton only."""
        if config.kernel == "cuda":
            return (variant_of(problem, config, self.capability),)
        return variants_of(problem, config, self.capability, aligned)

    def is_loaded(
        self, problem: AttentionProblem, config: AttentionConfig, aligned: bool = True
    ) -> bool:
        """Whether `prepare` would compile and load nothing."""
        return all(map(self._set.is_loaded, self.variants(problem, config, aligned)))

    def prepare(
        self,
        problem: AttentionProblem,
        config: AttentionConfig,
        budget: Budget,
        aligned: bool = True,
    ) -> Bind:
        """Returns bind(sizes) for launches of a problem within a budget; loads new kernels.

        Args:
            problem: Attention problem.
            config: Configuration that runs it.
            budget: SMs and what confines them.
            aligned: Whether the calls' addresses and strides are multiples of 16 bytes.

        Raises:
            ArgumentError: this build lacks the kernel.
        """
        if config.kernel == "cuda":
            return prepare_cuda(problem, config, budget, self.capability, self._set)
        if config.kernel != "triton":
            raise ArgumentError(
                f"attention kernel {config.kernel!r} is not in this build: use 'cuda' or 'triton'"
            )
        return prepare_triton(problem, config, budget, self.capability, self._set, aligned)
