"""The attention kernels of one device, CUDA and Triton: loaded once each, and counted."""

from __future__ import annotations

from smkern.errors import ArgumentError
from smkern.kernels.aot import KernelSet
from smkern.kernels.attention.args import Bind
from smkern.kernels.attention.cuda import (
    CudaAttention,
    CudaVariant,
    PlanLaunch,
    compile_cuda_variant,
    compile_plan,
    variant_of,
)
from smkern.kernels.attention.triton_compile import AttentionVariant, compile_variant, variants_of
from smkern.kernels.attention.triton_launch import prepare_triton
from smkern.kernels.ledger import ledger
from smkern.tuning.attention.shapes import AttentionConfig, AttentionProblem, AttentionShape, Budget

Compiled = CudaVariant | AttentionVariant | None
"""A kernel compiled on its own; None is the plan's kernel."""


class AttentionKernels:
    """Prepares launches of plans and of attention on one device.

    Args:
        device_index: GPU index.
        capability: Compute capability, such as 90.
    """

    def __init__(self, device_index: int, capability: int) -> None:
        self.device_index, self.capability = device_index, capability
        self._cuda = CudaAttention(capability, ledger().append)
        self._triton = KernelSet()

    def plan(self, shape: AttentionShape, budget: Budget) -> PlanLaunch:
        """The launch that makes a plan of `shape` for `budget`; see `PlanLaunch`."""
        return self._cuda.plan(shape, budget)

    def is_plan_loaded(self, shape: AttentionShape) -> bool:
        """Whether `plan` would compile and load nothing."""
        return self._cuda.is_plan_loaded

    def variants(
        self, problem: AttentionProblem, config: AttentionConfig, aligned: bool = True
    ) -> tuple[CudaVariant | AttentionVariant, ...]:
        """The kernels of a launch; `aligned` matters to Triton only."""
        if config.kernel == "cuda":
            return (variant_of(problem, config),)
        return variants_of(problem, config, self.capability, aligned)

    def is_loaded(
        self, problem: AttentionProblem, config: AttentionConfig, aligned: bool = True
    ) -> bool:
        """Whether `prepare` would compile and load nothing."""
        if config.kernel == "cuda":
            return self._cuda.is_loaded(problem, config)
        wanted = variants_of(problem, config, self.capability, aligned)
        return all(self._triton.is_loaded(variant) for variant in wanted)

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
            return self._cuda.prepare(problem, config, budget)
        if config.kernel != "triton":
            raise ArgumentError(
                f"attention kernel {config.kernel!r} is not in this build: use 'cuda' or 'triton'"
            )
        return prepare_triton(problem, config, budget, self.capability, self._triton, aligned)


def compile_attention(variant: Compiled, capability: int) -> None:
    """Compile a kernel into the user's cache; needs no GPU."""
    if variant is None:
        compile_plan(capability)
    elif isinstance(variant, CudaVariant):
        compile_cuda_variant(variant, capability)
    else:
        compile_variant(variant)
