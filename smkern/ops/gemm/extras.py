"""Kernels that need an extra: whether one is there, and where it is chosen."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

from smkern.errors import ArgumentError, DeviceError
from smkern.kernels.cute import compile as cute
from smkern.tuning.config import GemmConfig, GemmProblem, Kernel
from smkern.tuning.constraints import OPTIONAL, Capability
from smkern.tuning.select import Selection

MUST_GAIN = 1.05
"""How much faster by the model one must be to be chosen without having been measured: of 118 cells
of an H200, all 53 that were predicted faster by 6% or more were faster."""


@dataclass(slots=True)
class Extras:
    """Those of a device; `kernels` is empty once one of them has failed."""

    capability: Capability
    kernels: tuple[Kernel, ...] = OPTIONAL

    def serve(self, problem: GemmProblem, config: GemmConfig) -> bool:
        """Whether a configuration's kernel can be compiled here, or was."""
        return config.kernel in self.kernels and cute.serves(self.capability, problem, config)

    def faster(
        self,
        problem: GemmProblem,
        found: Selection,
        best_of: Callable[[tuple[Kernel, ...]], Selection],
    ) -> Selection:
        """`found`, or the best of these by the model if that is clearly faster.

        What was measured at warmup, or must be the same for every M, stays.
        """
        fixed = found.source == "warmup" or problem.batch_invariant
        runs = problem.aligned and problem.dtype != "fp32" and self.capability[0] == 9
        if fixed or not runs or not self.kernels or not cute.is_there():
            return found
        best = best_of(self.kernels)
        slow = MUST_GAIN * best.predicted_us > found.predicted_us
        return found if slow or not self.serve(problem, best.config) else best

    def check(self, problem: GemmProblem, config: GemmConfig) -> None:
        """Raise ArgumentError, with the remedy, unless a kernel that was asked for is there."""
        if config.kernel in OPTIONAL and not self.serve(problem, config):
            raise ArgumentError(f"backend={config.kernel!r} cannot run {problem}: {cute.absent()}")

    def refuse(self, error: DeviceError) -> None:
        """Go on without them, as one failed."""
        self.kernels = ()
        warnings.warn(f"{error}; other kernels serve from now on", RuntimeWarning, stacklevel=4)
