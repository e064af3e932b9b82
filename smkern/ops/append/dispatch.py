"""From an append problem to its launch: table or cost model, then the kernels of one device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

from smkern.errors import WarmupError
from smkern.ops.bounded_cache import keep, model_rows
from smkern.tuning.append import APPEND, AppendConfig, AppendProblem, Budget
from smkern.tuning.family import Selection

if TYPE_CHECKING:
    from smkern.kernels.append_launch import AppendArguments
    from smkern.profile import Profile

Launch = Callable[["AppendArguments", int], None]


class Kernels(Protocol):
    """Compiles, loads and prepares append launches on one device."""

    def is_loaded(self, problem: AppendProblem) -> bool: ...

    def prepare(self, problem: AppendProblem, config: AppendConfig, budget: Budget) -> Launch: ...


class AppendDispatcher:
    """Chooses and prepares append launches for one device, each combination once.

    Args:
        profile: The device's facts and ceilings.
        kernels: Makes the kernels of this device on first need.
        table: Tuned cells, or None.
    """

    def __init__(self, profile: Profile, kernels: Callable[[], Kernels], table: Any = None) -> None:
        self.profile = profile
        self.table = table
        self._kernels = cache(kernels)
        self._selections: dict[tuple[AppendProblem, Budget], Selection[AppendConfig]] = {}
        self._launches: dict[tuple[Any, ...], Launch] = {}
        self._lock = threading.RLock()

    def select(self, problem: AppendProblem, budget: Budget) -> Selection[AppendConfig]:
        """The configuration for a problem in a budget, and where it came from.

        It is the same for all tokens of a step (`model_rows`).
        """
        key = (replace(problem, tokens=model_rows(problem.tokens)), budget)
        found = self._selections.get(key)
        if found is None:
            found = APPEND.select(*key, self.profile, self.table)
            keep(self._selections, key, found)
        return found

    def launch(self, problem: AppendProblem, budget: Budget, *, capturing: bool = False) -> Launch:
        """The launch of a problem in a budget; compiles and loads it unless in a capture.

        Raises:
            WarmupError: a capture needs a kernel that is not loaded.
        """
        return self.launch_by(self.select(problem, budget).config, problem, budget, capturing)

    def launch_by(
        self, config: AppendConfig, problem: AppendProblem, budget: Budget, capturing: bool
    ) -> Launch:
        """The launch of a problem by a configuration."""
        key = (problem, config, budget)
        found = self._launches.get(key)
        if found is not None:
            return found
        if capturing and not self._kernels().is_loaded(problem):
            raise WarmupError(
                f"{problem.op} of {problem.num_q_heads} query and {problem.num_kv_heads} KV heads, "
                f"head_dim {problem.head_dim}, {problem.dtype} with a {problem.cache_dtype} cache "
                "needs kernels that are not loaded, and a graph capture cannot load any: call "
                "smkern.warmup(append=[...]), or this operator once before with the same heads and "
                "options"
            )
        with self._lock:
            found = self._kernels().prepare(problem, config, budget)
            keep(self._launches, key, found)
        return found


def load_append_dispatcher(index: int) -> AppendDispatcher:
    """The dispatcher of a device that is present: its profile, its tables, its kernels."""
    from smkern.profile import load_profile

    profile = load_profile(index)
    major, minor = profile.info.capability

    def kernels() -> Any:
        from smkern.kernels.append_launch import AppendKernels

        return AppendKernels(index, 10 * major + minor)

    return AppendDispatcher(profile, kernels, APPEND.load(profile.info.name))
