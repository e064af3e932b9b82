"""From a small operator's problem to its launch: a choice, then the kernels of one device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from smkern.device import Budget
from smkern.errors import ArgumentError, WarmupError
from smkern.ops.bounded_cache import MAX_CHOICES, keep

if TYPE_CHECKING:
    from smkern.profile import Profile

P = TypeVar("P", bound=Hashable)
C = TypeVar("C", bound=Hashable)
P_contra = TypeVar("P_contra", bound=Hashable, contravariant=True)
C_contra = TypeVar("C_contra", bound=Hashable, contravariant=True)

Launch = Callable[..., None]
"""launch(stream, *addresses, *numbers), as `smkern.kernels.aot.LoadedKernel.bind` makes one."""


class Variant(Protocol):
    """A kernel as what chooses its code: hashable, and picklable for the compiling processes."""

    def compile(self) -> object:
        """Compile it into this user's cache; needs no GPU."""
        ...


class Kernels(Protocol[P_contra, C_contra]):
    """Compiles, loads and prepares a family's launches on one device."""

    def variants(self, problem: P_contra, /) -> Sequence[Variant]:
        """All kernels that a problem's kind can need: of every configuration, budget and size."""
        ...

    def is_loaded(self, problem: P_contra, /) -> bool:
        """Whether `prepare` would compile and load nothing."""
        ...

    def prepare(self, problem: P_contra, config: C_contra, budget: Budget, /) -> Launch:
        """The launch by a configuration; loads all `variants` of the problem that are new."""
        ...


class OperatorDispatcher(Generic[P, C]):
    """Chooses and prepares a family's launches for one device, each combination once.

    Args:
        profile: The device's facts and ceilings.
        kernels: Makes the kernels of this device on first need.
        select: The configuration for a problem in a budget: table, else model.
        step: Rounds a problem up to the one that `select` is asked about, so that its answer holds
            for a step of rows; None: every problem is asked about itself.
    """

    def __init__(
        self,
        profile: Profile,
        kernels: Callable[[], Kernels[P, C]],
        select: Callable[[P, Budget], C],
        step: Callable[[P], P] | None = None,
    ) -> None:
        self.profile = profile
        self.kernels = cache(kernels)
        self._select, self._step = select, step
        self._choices: dict[tuple[P, Budget], C] = {}
        self._launches: dict[tuple[Any, ...], Launch] = {}
        self._lock = threading.RLock()

    @property
    def capability(self) -> int:
        """90 and the like."""
        return self.profile.info.sm

    def select(self, problem: P, budget: Budget) -> C:
        """The configuration for a problem in a budget, the same for all rows of a step."""
        key = (problem if self._step is None else self._step(problem), budget)
        found = self._choices.get(key)
        if found is None:
            found = self._select(*key)
            keep(self._choices, key, found, MAX_CHOICES)
        return found

    def launch(self, problem: P, budget: Budget, *, capturing: bool = False) -> Launch:
        """The launch of a problem in a budget; compiles and loads it unless in a capture.

        Raises:
            WarmupError: a capture needs a kernel that is not loaded.
        """
        return self.launch_by(self.select(problem, budget), problem, budget, capturing)

    def launch_by(self, config: C, problem: P, budget: Budget, capturing: bool) -> Launch:
        """The launch of a problem by a configuration."""
        key = (problem, config, budget)
        found = self._launches.get(key)
        if found is not None:
            return found
        if capturing and not self.kernels().is_loaded(problem):
            raise WarmupError(
                f"{problem} needs kernels that are not loaded, and a graph capture cannot load "
                "any: call smkern.warmup(calls=[...]), or this operator once before with the same "
                "widths, dtypes and options"
            )
        with self._lock:
            found = self.kernels().prepare(problem, config, budget)
            keep(self._launches, key, found)
        return found


def load_dispatcher(
    index: int,
    kernels: Callable[[int], Kernels[P, C]],
    selector: Callable[[Profile], Callable[[P, Budget], C]],
    step: Callable[[P], P] | None = None,
) -> OperatorDispatcher[P, C]:
    """The dispatcher of a device that is present.

    Args:
        index: GPU index.
        kernels: Capability (90 and the like) to the family's kernels; called on first need.
        selector: The device's profile to what chooses a configuration there.
        step: As in `OperatorDispatcher`.
    """
    from smkern.profile import load_profile

    profile = load_profile(index)
    made = partial(kernels, profile.info.sm)
    return OperatorDispatcher(profile, made, selector(profile), step)


def absent_kernels() -> Any:
    """The kernels of a dispatcher for a device that may be absent."""
    raise ArgumentError("this dispatcher only chooses: use one of a device to launch")


@dataclass(frozen=True, slots=True)
class Compile:
    """A kernel to compile into this user's cache, in another process."""

    variant: Variant

    def __call__(self) -> None:
        self.variant.compile()
