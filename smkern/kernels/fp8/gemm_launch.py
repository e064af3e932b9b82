"""From a GEMM of e4m3 to its launch: kernels loaded once, tensor maps, parameters of a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from smkern.kernels.aot import KernelSet, LoadedKernel, Mapped
from smkern.kernels.driver import may_overlap
from smkern.kernels.fp8.gated_launch import GatedPlan, GatedVariant
from smkern.kernels.fp8.gemm_compile import PAIRS, UNIT, ScaledVariant, variant_of
from smkern.kernels.fp8.library_launch import LibraryPlan, library_plan
from smkern.kernels.gemm_schedule import Schedule, make_schedule
from smkern.tuning import constraints, fp8
from smkern.tuning.config import Budget, GemmConfig
from smkern.tuning.constraints import COUNTER_BYTES
from smkern.tuning.fp8 import ScaledProblem

Launch = Callable[[int, int, int, int, int, int, int, int, int], None]
"""launch(a, w, a_scale, w_scale, out, bias, residual, workspace, stream): addresses."""


class Strides(NamedTuple):
    """Elements between rows of matrices, and between scales; see `smkern.ops.fp8.scales`."""

    a: int
    w: int
    out: int
    residual: int
    a_step: int
    a_block_step: int
    w_step: int


@dataclass(frozen=True, slots=True, eq=False)
class ScaledPlan:
    """One problem, configuration and budget with its loaded kernel; `bind` makes launches."""

    problem: ScaledProblem
    config: GemmConfig
    budget: Budget
    variant: ScaledVariant
    loaded: LoadedKernel

    @property
    def overlap(self) -> bool:
        """Whether launches may begin before the previous kernel has ended."""
        return may_overlap(self.config.overlap, self.budget, self.variant.capability)

    @property
    def workspace_bytes(self) -> int:
        """Counters and partial tiles, bytes."""
        if self.variant.kernel != "ws":
            return 0
        slots = self._schedule.partial_slots
        each = 4 * self.config.block_m * self.config.block_n
        return COUNTER_BYTES + slots * each if slots else 0

    @property
    def _schedule(self) -> Schedule:
        return make_schedule(self.problem.twin, self.config, self.budget, turns=fp8.TURNS)

    def bind(self, strides: Strides, *, static_weights: bool = False) -> Launch:
        """The launch for operands that lie so; thread-safe.

        Args:
            strides: Of all operands.
            static_weights: No running kernel writes w, so its first stages are fetched at once.
        """
        if self.variant.kernel == "pointer":
            return self._bind_pointer(strides)
        early = self.config.num_stages if static_weights and self.overlap else 0
        if self.variant.kernel == "cutlass":
            return self._bind_cutlass(strides, early)
        return self._bind_ws(strides, early)

    def _bind_pointer(self, strides: Strides) -> Launch:
        p, config, unit = self.problem, self.config, self.variant.unit
        ctas = fp8.num_ctas(p, config, self.budget)
        tiles = (-(-p.m // config.block_m), -(-p.n // config.block_n))
        numbers = (
            p.m, p.n, p.k // unit, strides.a // unit, strides.w // unit, *strides[2:], *tiles,
            min(config.group_m, tiles[0]),
        )  # fmt: skip
        run = self.loaded.bind("7Q13q", ctas, overlap=self.overlap)

        def launch(
            a: int, w: int, a_scale: int, w_scale: int, out: int, bias: int, residual: int,
            workspace: int, stream: int,
        ) -> None:  # fmt: skip
            run(stream, a, w, out, bias, residual, a_scale, w_scale, *numbers)

        return launch

    def _maps(self, strides: Strides) -> tuple[Mapped, Mapped]:
        p, swap = self.problem, self.variant.swap
        return (
            Mapped(PAIRS, (p.k // 2, p.m), (strides.a,), int(swap)),
            Mapped(PAIRS, (p.k // 2, p.n), (strides.w,), int(not swap)),
        )

    def _bind_cutlass(self, strides: Strides, early: int) -> Launch:
        p, s = self.problem, self._schedule
        numbers = (
            p.m, p.n, *strides[2:], s.tiles_x, s.tiles_y, s.k_iters, s.group, early,
        )  # fmt: skip
        run = self.loaded.bind_mapped(
            s.num_ctas, *self._maps(strides), 5, numbers, what=f"{s} of {self.variant}",
            overlap=self.overlap, bare=True,
        )  # fmt: skip

        def launch(
            a: int, w: int, a_scale: int, w_scale: int, out: int, bias: int, residual: int,
            workspace: int, stream: int,
        ) -> None:  # fmt: skip
            run(stream, a, w, out, bias, residual, a_scale, w_scale)

        return launch

    def _bind_ws(self, strides: Strides, early: int) -> Launch:
        p, variant = self.problem, self.variant
        s = self._schedule
        numbers = (
            p.m, p.n // UNIT, strides.out // UNIT, strides.residual // UNIT, strides.a_step,
            strides.a_block_step, strides.w_step, s.tiles_x, s.tiles_y, s.k_iters, s.whole_tiles,
            s.stream_iters, s.quantum, s.group, early,
        )  # fmt: skip
        run = self.loaded.bind_mapped(
            s.num_ctas,
            *self._maps(strides),
            7,  # out, bias, residual, partials, counters, a's scales, w's
            numbers,
            what=f"{s} of {variant}",
            overlap=self.overlap,
        )

        def launch(
            a: int, w: int, a_scale: int, w_scale: int, out: int, bias: int, residual: int,
            workspace: int, stream: int,
        ) -> None:  # fmt: skip
            partials = workspace + COUNTER_BYTES
            run(stream, a, w, out, bias, residual, partials, workspace, a_scale, w_scale)

        return launch


class ScaledGemmKernels:
    """The GEMMs of e4m3 of one device; each is compiled and loaded once, and counted.

    Args:
        capability: Compute capability, such as 90.
        index: GPU index.
    """

    def __init__(self, capability: int, index: int) -> None:
        self.capability, self.index = capability, index
        self._set = KernelSet()

    def variants(self, problem: ScaledProblem) -> tuple[ScaledVariant | GatedVariant, ...]:
        """All kernels for a problem's kind, for any number of rows and budget."""
        if problem.epilogue.swiglu:
            return (GatedVariant(problem.out_dtype, self.capability),)
        found: dict[ScaledVariant, None] = {}
        capability = divmod(self.capability, 10)
        if fp8.serves_ws(problem, capability):
            for confined in (True, False):
                for config in fp8.variants(
                    problem.epilogue.residual, confined, capability, problem.blocks
                ):
                    for split in (1, 0):
                        named = replace(config, split=split)
                        found[variant_of(problem, named, self.capability)] = None
            return tuple(found)
        config = fp8.pointer_config(problem, Budget(1, "grid"))
        return (variant_of(problem, config, self.capability),)

    def variant(self, problem: ScaledProblem, config: GemmConfig) -> ScaledVariant | GatedVariant:
        """The kernel that runs a configuration."""
        if problem.epilogue.swiglu:
            return GatedVariant(problem.out_dtype, self.capability)
        return variant_of(problem, config, self.capability)

    def is_loaded(self, problem: ScaledProblem, config: GemmConfig | None = None) -> bool:
        """Whether `prepare` would compile and load nothing; None: by any configuration."""
        if config is not None:
            return self._set.is_loaded(self.variant(problem, config))
        return all(self._set.is_loaded(x) for x in self.variants(problem))

    def prepare(
        self, problem: ScaledProblem, config: GemmConfig, budget: Budget
    ) -> ScaledPlan | GatedPlan | LibraryPlan:
        """The plan of a problem by a configuration; loads its kernel on first use."""
        if config == constraints.CUBLASLT:
            return library_plan(problem, budget, self.index)
        variant = self.variant(problem, config)
        loaded = self._set.load(variant, variant.compile)
        if isinstance(variant, GatedVariant):
            return GatedPlan(problem, config, budget, loaded)
        return ScaledPlan(problem, config, budget, variant, loaded)
