"""Kernels that need an extra: whether one is there, and where it is chosen."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smkern.errors import ArgumentError, DeviceError
from smkern.kernels.cute import compile as cute
from smkern.tuning.config import GemmConfig, GemmProblem, Kernel
from smkern.tuning.constraints import OPTIONAL, may_serve_extras
from smkern.tuning.fp8 import ScaledProblem
from smkern.tuning.select import Selection

if TYPE_CHECKING:
    from smkern.profile import Profile

Product = GemmProblem | ScaledProblem
MUST_GAIN = 1.05
"""How much faster by the model one must be to replace what was tuned for other rows, or for few."""
FEW = 32
"""Rows up to which the model is not good enough to do without that."""


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
        found: Selection,
        best_of: Callable[[tuple[Kernel, ...]], Selection],
    ) -> Selection:
        """`found`, or the best of these if it is faster by the model, clearly so where something
        was tuned.

        What was measured at warmup, or must be the same for every M, stays; and cuBLASLt, whose
        time the model does not know: it won 42 of 98 cells of 65 to 999 plain rows of all of an
        H200, in 39 of which one of these is told faster than our own.
        """
        fixed = found.source in ("warmup", "library") or problem.batch_invariant
        runs = may_serve_extras(problem, self.profile.info.capability)
        if fixed or not runs or not self.kernels or not cute.is_there():
            return found
        best = best_of(self.kernels)
        sure = found.source != "table" and problem.m > FEW
        slow = (1.0 if sure else MUST_GAIN) * best.predicted_us > found.predicted_us
        return found if slow or not self.serve(problem, best.config) else best

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
