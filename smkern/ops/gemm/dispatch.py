"""From a GEMM's numbers to a launch plan: table or cost model, then the kernels of one device."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from smkern.errors import ArgumentError, DeviceError, WarmupError
from smkern.ops.bounded_cache import MAX_CHOICES, keep, model_rows
from smkern.ops.gemm.explanation import Explanation
from smkern.ops.gemm.extras import Extras
from smkern.ops.gemm.plans import Plan
from smkern.ops.operator_dispatch import absent_kernels
from smkern.tuning import constraints, cost_model
from smkern.tuning.config import Budget, Epilogue, GemmConfig, GemmProblem, Kernel
from smkern.tuning.cost_constants import DEFAULTS, CostConstants, load_constants
from smkern.tuning.select import Selection, is_librarys, rank, select_gemm, select_near
from smkern.tuning.table import never

if TYPE_CHECKING:
    from smkern.kernels.cublaslt import CublasLt
    from smkern.kernels.gemm_launch import GemmKernels
    from smkern.ops.swiglu.unfused import RowsSilu
    from smkern.profile import Profile
    from smkern.tuning.table import Table


_CLOSE, _CLOSE_WITHIN = 4, 1.1
"""How many of the model's best are worth measuring, and how much slower than the first they may be
by the model: its own error."""


def workspace_bytes(problem: GemmProblem, config: GemmConfig, budget: Budget) -> int:
    """What a launch needs, counters included, as its plan says too. No GPU needed."""
    from smkern.kernels.cublaslt import WORKSPACE_BYTES
    from smkern.kernels.gemm_schedule import make_schedule

    if config.kernel == "cublaslt":
        return constraints.COUNTER_BYTES + WORKSPACE_BYTES
    slots = make_schedule(problem, config, budget).partial_slots
    return constraints.COUNTER_BYTES + 4 * slots * config.block_m * config.block_n if slots else 0


class Dispatcher:
    """Chooses and prepares GEMM launches for one device, each combination of numbers once.

    Args:
        profile: The device's facts and ceilings.
        tables: Tuned cells, or None.
        kernels: Makes the kernels of this device on first need; not called to choose only.
        library: Makes the binding of cuBLASLt on first need.
        constants: The cost model's, as fitted on this GPU.
        silu: Makes what follows the plain GEMM where SwiGLU runs unfused, on first need.
    """

    def __init__(
        self,
        profile: Profile,
        tables: Table | None,
        kernels: Callable[[], GemmKernels],
        library: Callable[[], CublasLt],
        constants: CostConstants = DEFAULTS,
        silu: Callable[[], RowsSilu] | None = None,
    ) -> None:
        self.profile = profile
        self.constants = constants
        self.tables = tables
        self._kernels = cache(kernels)
        self._library = cache(library)
        self._silu = cache(silu) if silu is not None else None
        self._selections: dict[tuple[Any, ...], Selection] = {}
        # apart, as they cost 10 times as much and prompts of all lengths would drive them out
        self._steps: dict[tuple[Any, ...], Selection] = {}
        self._measured: dict[tuple[GemmProblem, Budget], Selection] = {}
        self._extras = Extras(profile)
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._lock = threading.RLock()

    def select(self, problem: GemmProblem, budget: Budget, backend: str | None = None) -> Selection:
        """The configuration for a problem in a budget.

        Args:
            problem: Sizes, dtype, epilogue.
            budget: Realised SMs and what confines them.
            backend: None for tables, then model; "own" by our GEMM kernels alone, without those
                that need an extra; "model" without tables; a kernel's name for the model's best
                configuration of it.

        Raises:
            ArgumentError: `backend` names a kernel that cannot run this problem here.
        """
        key = (problem, budget, backend)
        found = self._selections.get(key)
        if found is None:
            found = self._select(problem, budget, backend)
            is_tuned = self.tables is not None and self.tables.has(problem, budget)
            if backend is None and not is_tuned:
                best_of = partial(self._modelled, problem, budget)
                found = self._extras.faster(problem, found, best_of)
            keep(self._selections, key, found)
        return found

    def close_choices(self, problem: GemmProblem, budget: Budget) -> tuple[GemmConfig, ...]:
        """What the model chose, then the best of other tiles that it holds for about as fast.

        The choice alone, or nothing, where it is not the model's, or must not turn with a
        measurement (`batch_invariant`).
        """
        found = self.select(problem, budget)
        if problem.batch_invariant or found.source not in ("model", "near"):
            return ()
        best = {_tile(found.config): found.config}
        for item in rank(of_step(problem), budget, self.profile, constants=self.constants):
            if len(best) == _CLOSE or item.predicted_us > _CLOSE_WITHIN * found.predicted_us:
                break
            config = item.config()
            best.setdefault(_tile(config), config)
        return tuple(best.values())

    def keep_measured(self, problem: GemmProblem, budget: Budget, config: GemmConfig) -> None:
        """From now on a problem's step of rows runs by a configuration, where no table serves it.

        Raises:
            ArgumentError: the problem is batch-invariant, or the configuration is not for it.
        """
        problem = of_step(problem)
        if problem.batch_invariant or not constraints.is_legal(
            problem, config, budget, self.profile.info.capability
        ):
            raise ArgumentError(
                f"{config} cannot be kept for {problem}: give a legal configuration of a problem "
                "whose choice may follow a measurement (batch_invariant=False)"
            )
        with self._lock:
            predicted_us = self._predict(problem, config, budget)
            self._measured[problem, budget] = Selection(config, "warmup", predicted_us)
            self._selections.clear()
            # not all of them: a capture may have what cuBLASLt planned before it, and nothing else
            for key in [k for k in self._plans if k[1] == budget and of_step(k[0]) == problem]:
                self._plans.pop(key, None)

    def plan(
        self,
        problem: GemmProblem,
        budget: Budget,
        backend: str | None = None,
        *,
        capturing: bool = False,
    ) -> Plan:
        """A prepared launch for a problem in a budget.

        While a graph is captured nothing may be compiled or loaded: a cuBLASLt choice that never
        ran, or SwiGLU unfused by what is not loaded, gives way to our kernels, and a variant of
        ours that is not loaded raises.

        Raises:
            WarmupError: a capture needs a variant that is not loaded.
            ArgumentError: see `select`.
        """
        key = (problem, budget, backend)
        plan = self._plans.get(key)
        if plan is not None:
            return plan
        selection = self.select(problem, budget, backend)
        if capturing:
            if selection.config.kernel == "unfused":
                try:
                    return self._unfused(problem, budget, capturing=True)
                except WarmupError:
                    if backend is not None:
                        raise
            if selection.config.kernel in constraints.LIBRARIES and backend is None:
                return self.plan(problem, budget, "own", capturing=True)
            self._check_loaded(problem, selection.config, budget)
        with self._lock:
            try:
                plan = self.prepare(problem, selection.config, budget)
            except DeviceError as error:
                if selection.config.kernel not in constraints.OPTIONAL or backend is not None:
                    raise
                self._extras.refuse(error)
                self._selections.clear()
                return self.plan(problem, budget)
            keep(self._plans, key, plan)
        return plan

    def prepare(self, problem: GemmProblem, config: GemmConfig, budget: Budget) -> Plan:
        """Compile and load what `config` needs and plan its launch, uncached."""
        with self._lock:
            if config.kernel == "cublaslt":
                return self._library().plan(problem, budget)
            if config.kernel == "unfused":
                return self._unfused(problem, budget)
            return self._kernels().prepare(problem, config, budget)

    def is_loaded(self, problem: GemmProblem, config: GemmConfig) -> bool:
        """Whether preparing `config` for `problem` would compile and load nothing."""
        if config.kernel in constraints.LIBRARIES:
            return False
        return self._kernels().is_loaded(problem, config)

    def _unfused(self, problem: GemmProblem, budget: Budget, capturing: bool = False) -> Plan:
        """SwiGLU as the plain GEMM, which chooses for itself, and `silu_and_mul`."""
        from smkern.ops.swiglu.unfused import UnfusedPlan

        if self._silu is None:
            raise ArgumentError("this dispatcher has no silu_and_mul: leave backend at None")
        silu = self._silu()
        if capturing and not silu.is_loaded(problem):
            raise WarmupError("silu_and_mul is not loaded, and a graph capture cannot load it")
        gemm = self.plan(replace(problem, epilogue=Epilogue()), budget, capturing=capturing)
        return UnfusedPlan(problem, budget, gemm, silu)

    def _check_loaded(self, problem: GemmProblem, config: GemmConfig, budget: Budget) -> None:
        if self.is_loaded(problem, config):
            return
        raise WarmupError(
            f"gemm {problem.m}x{problem.n}x{problem.k} {problem.dtype} on {budget.num_sms} SMs "
            f"needs kernel {config.kernel!r}, which is not loaded, and a graph capture cannot load "
            "one: call smkern.warmup(shapes=[(n, k)], budgets=[...]), or this GEMM once, before"
        )

    def explain(
        self, problem: GemmProblem, budget: Budget, backend: str | None = None
    ) -> Explanation:
        """The choice for a problem in a budget, with its reasons. Needs no GPU."""
        selection = self.select(problem, budget, backend)
        config = selection.config
        tiles = constraints.num_tiles(problem, config)
        source = selection.source if backend in (None, "own", "model") else "forced"
        return Explanation(
            problem,
            budget,
            config,
            source,
            selection.predicted_us,
            self._workspace_bytes(problem, config, budget),
            tiles,
            tiles / constraints.num_ctas(config, budget),
            self.profile.info.name,
        )

    def _workspace_bytes(self, problem: GemmProblem, config: GemmConfig, budget: Budget) -> int:
        if config.kernel != "unfused":
            return workspace_bytes(problem, config, budget)
        gemm = self.explain(replace(problem, epilogue=Epilogue()), budget)
        return constraints.gate_up_at(gemm.workspace_bytes) + constraints.gate_up_bytes(problem)

    def _select(self, problem: GemmProblem, budget: Budget, backend: str | None) -> Selection:
        if backend not in (None, "own", "model"):
            return self._forced(problem, budget, backend)
        found = self._choose(problem, budget, backend)
        librarys = backend is None and is_librarys(problem, budget, self.profile, self.tables)
        if librarys and found.source != "warmup":
            return Selection(constraints.CUBLASLT, "library", found.predicted_us)
        return found

    def _choose(self, problem: GemmProblem, budget: Budget, backend: str | None) -> Selection:
        tables = None if backend == "model" else self.tables
        swiglu = problem.epilogue.swiglu  # where unfused, its GEMM asks for itself
        allow_cublaslt = backend is None and (swiglu or self._library_may_run(problem, budget))
        if tables is not None:
            capability = self.profile.info.capability
            served = self._extras.serve if backend is None else never
            config = tables.lookup(problem, budget, allow_cublaslt, capability, served)
            if config is not None:
                measured_us = tables.library_us(problem, budget, config)
                us = measured_us or self._predict(problem, config, budget)
                return Selection(config, "table", us)
        if self._measured and backend != "model":
            measured = self._measured.get((of_step(problem), budget))
            if measured is not None:
                return measured
        return self._modelled(problem, budget, tables=tables)

    def _modelled(
        self,
        problem: GemmProblem,
        budget: Budget,
        kernels: tuple[Kernel, ...] = constraints.AVAILABLE,
        tables: Table | None = None,
    ) -> Selection:
        """The model's choice (among `kernels`), or that of cells beside it in `tables`.

        Made once for all M of a step (`model_rows`).
        """
        rounded = of_step(problem)
        key = (rounded, budget, kernels, tables is None)
        found = self._steps.get(key)
        if found is None:
            found = select_gemm(
                rounded, budget, self.profile, kernels=kernels, constants=self.constants
            )
            if tables is not None and not problem.batch_invariant:
                constants = self.constants
                near = select_near(rounded, budget, self.profile, tables, found, constants)
                found = near or found
            keep(self._steps, key, found, MAX_CHOICES)
        return found

    def _library_may_run(self, problem: GemmProblem, budget: Budget) -> bool:
        """cuBLASLt takes its SM count as a hint, so only where it cannot leave the budget."""
        whole = budget.confined == "mask" or budget.num_sms == self.profile.info.num_sms
        return whole and budget.clusters and not problem.batch_invariant

    def _forced(self, problem: GemmProblem, budget: Budget, kernel: Any) -> Selection:
        capability = self.profile.info.capability
        where = f"{problem.m}x{problem.n}x{problem.k} {problem.dtype}"
        if kernel in constraints.LIBRARIES:
            config = constraints.CUBLASLT if kernel == "cublaslt" else constraints.UNFUSED
            broken = constraints.violations(problem, config, budget, capability)
            confined = kernel == "unfused" or self._library_may_run(problem, budget)
            if broken or not confined:
                reasons = ", ".join(broken) or "the budget is not enforced by a mask"
                raise ArgumentError(
                    f"backend={kernel!r} cannot run {where} with epilogue {problem.epilogue.key} "
                    f"on {budget.num_sms} SMs ({reasons}): leave backend at None"
                )
            return Selection(config, "model", self._predict(problem, config, budget))
        try:
            if kernel not in constraints.AVAILABLE + constraints.OPTIONAL:
                raise ArgumentError(f"this build has the kernels {list(constraints.AVAILABLE)}")
            found = self._modelled(problem, budget, (kernel,))
        except ArgumentError as error:
            raise ArgumentError(
                f"backend={kernel!r} cannot run {where} (16-byte aligned: {problem.aligned}) on "
                f"compute capability {capability[0]}.{capability[1]}: leave backend at None"
            ) from error
        self._extras.check(problem, found.config)
        return found

    def _predict(self, problem: GemmProblem, config: GemmConfig, budget: Budget) -> float:
        return cost_model.predict_us(problem, config, budget, self.profile, self.constants)


def of_step(problem: GemmProblem) -> GemmProblem:
    """The problem with the rows that the choice of a whole step is made for."""
    return replace(problem, m=model_rows(problem.m))


def _tile(config: GemmConfig) -> tuple[Any, ...]:
    return config.kernel, config.block_m, config.block_n, config.swap, config.split == 1


def offline_dispatcher(profile: Profile, tables: Table | None) -> Dispatcher:
    """A dispatcher that chooses for a device that may be absent; it cannot prepare launches."""
    constants = load_constants(profile.info.name, profile.info.capability)

    return Dispatcher(profile, tables, absent_kernels, absent_kernels, constants)


@cache
def gemm_dispatcher(index: int) -> Dispatcher:
    """The dispatcher of a device that is present: its profile, its tables, its kernels."""
    from smkern.profile import load_profile
    from smkern.tuning.select import GEMM_FAMILY

    profile = load_profile(index)

    def kernels() -> Any:
        from smkern.kernels.gemm_launch import GemmKernels

        return GemmKernels(index, profile.info.sm)

    def library() -> Any:
        from smkern.kernels.cublaslt import library_of

        return library_of(index)

    def silu() -> Any:
        from smkern.ops.rows.dispatch import rows_dispatcher
        from smkern.ops.swiglu.unfused import RowsSilu

        return RowsSilu(rows_dispatcher(index))

    gpu = profile.info.name
    return Dispatcher(
        profile,
        GEMM_FAMILY.load(profile),
        kernels,
        library,
        load_constants(gpu, profile.info.capability),
        silu,
    )
