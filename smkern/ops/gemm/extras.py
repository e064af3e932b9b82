"""Kernels that need an extra: whether one is there, and where it is chosen."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smkern.errors import ArgumentError, DeviceError
from smkern.kernels.cute import compile as cute
from smkern.tuning.config import Budget, GemmConfig, GemmProblem, Kernel
from smkern.tuning.constraints import OPTIONAL, may_serve_extras
from smkern.tuning.fp8 import ScaledProblem
from smkern.tuning.select import Selection

if TYPE_CHECKING:
    from smkern.profile import Profile

Product = GemmProblem | ScaledProblem
MUST_GAIN, MUST_GAIN_OF_MEMORY = 1.05, 1.08
"""How much faster by the model one must be, where arithmetic takes longer than memory, and where
not, to replace a tuned cell, of few rows, or on more of the device than `MOST`. Of 729 cells of an
H200 these were 290, of which 4 were slower, the worst by 6%."""
AS_GOOD = 0.98
"""The same elsewhere: the model says 2% too much of their times.

Of 549 such cells of an H200 the choice takes 1.004 of the better of both in geomean, 1.03 at worst,
where by the margins above it took 1.021; of 345 whose neighbours were tuned, timed in other
sittings, 1.018 for 1.043."""
FEW = 32
"""Rows up to which the model is not good enough for that."""
MOST, MOST_OF_MEMORY = 0.9, 0.5
"""Shares of the device up to which it is."""


@dataclass(slots=True)
class Extras:
    """Those of a device, with its ceilings; `kernels` is empty once one of them has failed."""

    profile: Profile
    kernels: tuple[Kernel, ...] = OPTIONAL

    def serve(self, problem: Product, config: GemmConfig) -> bool:
        """Whether a configuration's kernel can be compiled here, or was."""
        capability = self.profile.info.capability
        there = config.kernel in self.kernels and cute.is_there()
        return there and cute.serves(capability, problem, config)

    def faster(
        self,
        problem: Product,
        budget: Budget,
        found: Selection,
        best_of: Callable[[tuple[Kernel, ...]], Selection],
    ) -> Selection:
        """`found`, or the best of these by the model if that is clearly faster.

        What was measured at warmup, or must be the same for every M, stays.
        """
        fixed = found.source == "warmup" or problem.batch_invariant
        runs = may_serve_extras(problem, self.profile.info.capability)
        if fixed or not runs or not self.kernels or not cute.is_there():
            return found
        best = best_of(self.kernels)
        gain = self._must_gain(problem, budget, found.source == "table")
        slow = gain * best.predicted_us > found.predicted_us
        return found if slow or not self.serve(problem, best.config) else best

    def _must_gain(self, problem: Product, budget: Budget, is_tuned: bool) -> float:
        moved = problem.bytes_moved / self.profile.bandwidth(
            budget.num_sms, confined=budget.confined
        )
        for_memory = problem.flops / self.profile.flops(budget.num_sms) <= moved
        most = MOST_OF_MEMORY if for_memory else MOST
        if not is_tuned and problem.m > FEW and budget.num_sms <= most * self.profile.info.num_sms:
            return AS_GOOD
        return MUST_GAIN_OF_MEMORY if for_memory else MUST_GAIN

    def check(self, problem: Product, config: GemmConfig) -> None:
        """Raise ArgumentError, with the remedy, unless a kernel that was asked for is there."""
        if config.kernel in OPTIONAL and not self.serve(problem, config):
            reason = cute.absent() or "one of its kernels failed in this process before"
            shape = f"{problem.m}x{problem.n}x{problem.k} in {problem.dtype}"
            raise ArgumentError(f"backend={config.kernel!r} cannot run {shape}: {reason}")

    def refuse(self, error: DeviceError) -> None:
        """Go on without them, as one failed."""
        self.kernels = ()
        warnings.warn(f"{error}; other kernels serve from now on", RuntimeWarning, stacklevel=4)
