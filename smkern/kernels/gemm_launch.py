"""From a GEMM configuration to its launch: variants are loaded once, a plan serves one problem."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from functools import partial

from smkern.kernels.compile import Artifact
from smkern.kernels.driver import load_function, may_overlap
from smkern.kernels.gemm_compile import compile_variant
from smkern.kernels.gemm_frame import Frame, Launch, Operands
from smkern.kernels.gemm_schedule import make_schedule
from smkern.kernels.gemm_variants import Variant, variant_of
from smkern.kernels.ledger import ledger
from smkern.tuning.config import Budget, GemmConfig, GemmProblem
from smkern.tuning.constraints import COUNTER_BYTES

_MAX_FRAMES = 1024


class GemmPlan:
    """One problem, configuration and budget, ready to launch; thread-safe.

    Only a schedule and a few bytes per binding depend on M; the rest is in the `Frame` that
    `frame_of` returns.
    """

    __slots__ = (
        "_frame_of", "_problem", "config", "num_ctas", "overlap", "schedule", "variant",
        "workspace_bytes",
    )  # fmt: skip

    def __init__(
        self, problem: GemmProblem, config: GemmConfig, budget: Budget, variant: Variant,
        frame_of: Callable[[Operands], Frame],
    ) -> None:  # fmt: skip
        schedule = make_schedule(problem, config, budget)
        wanted = config.overlap and config.kernel in ("ws", "cutlass")
        self.overlap = may_overlap(wanted, budget, variant.capability)
        self.config, self.schedule, self.variant = config, schedule, variant
        self.num_ctas = schedule.num_ctas
        partial_bytes = schedule.partial_slots * 4 * variant.block_x * variant.block_y
        self.workspace_bytes = COUNTER_BYTES + partial_bytes if partial_bytes else 0
        self._problem, self._frame_of = problem, frame_of

    def bind(
        self, a_stride: int, w_stride: int, out_stride: int, residual_stride: int,
        static_weights: bool = False,
    ) -> Launch:  # fmt: skip
        """The launch for operands with these row strides, in elements: 3 us of host time.

        It takes device addresses and a stream; the counters at the workspace's beginning are zero.
        `static_weights` promises that no running kernel writes w: a launch that overlaps the
        previous kernel then fetches its first weights at once.
        """
        problem = self._problem
        early = self.config.num_stages if static_weights and self.overlap else 0
        frame = self._frame_of(Operands(
            problem.n, problem.k, a_stride, w_stride, out_stride, residual_stride, self.overlap,
            early,
        ))  # fmt: skip
        return frame.bind(problem.m, self.schedule)


class GemmKernels:
    """The GEMM kernels of one device; each variant is compiled and loaded once, and counted."""

    def __init__(self, device_index: int, capability: int) -> None:
        self.device_index, self.capability = device_index, capability
        self._loaded: dict[Variant, tuple[Artifact, ctypes.c_void_p]] = {}
        self._frames: dict[tuple[Variant, Operands], Frame] = {}
        self._lock = threading.Lock()

    def is_loaded(self, problem: GemmProblem, config: GemmConfig) -> bool:
        """Whether `prepare` would compile and load nothing."""
        return variant_of(problem, config, self.capability) in self._loaded

    def prepare(self, problem: GemmProblem, config: GemmConfig, budget: Budget) -> GemmPlan:
        """The plan to run `problem` with `config` within `budget`; loads its variant if new."""
        variant = variant_of(problem, config, self.capability)
        with self._lock:
            if variant not in self._loaded:
                artifact = compile_variant(variant)
                function = load_function(artifact.cubin, artifact.name, artifact.shared_bytes)
                self._loaded[variant] = artifact, function
                ledger().append(variant)
        return GemmPlan(problem, config, budget, variant, partial(self._frame, variant))

    def _frame(self, variant: Variant, operands: Operands) -> Frame:
        """The frame shared by all launches of a loaded variant with such operands, for any M."""
        key = (variant, operands)
        with self._lock:
            found = self._frames.get(key)
            if found is None:
                if len(self._frames) >= _MAX_FRAMES:
                    self._frames.clear()
                found = self._frames[key] = Frame(variant, *self._loaded[variant], operands)
        return found
