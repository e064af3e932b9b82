"""Selects a GEMM's configuration: from the tuned table if it has the cell, else by the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import exp, log
from typing import TYPE_CHECKING, Any, Literal

from smkern.device import check_budget
from smkern.errors import ArgumentError
from smkern.tuning import candidates, constraints, cost_model
from smkern.tuning.cells import Cells
from smkern.tuning.config import (
    Budget,
    Confinement,
    Dtype,
    Epilogue,
    GemmConfig,
    GemmProblem,
    Kernel,
)
from smkern.tuning.cost_constants import DEFAULTS, CostConstants, load_constants
from smkern.tuning.family import Family
from smkern.tuning.table import Cell, CellCodec, CellKey, Table

if TYPE_CHECKING:
    from smkern.profile import Profile

OWN_ROWS = 64
"""Up to so many rows our kernels serve the whole device unmeasured, too; cuBLASLt from there on."""
INVARIANT_ROWS = (8, 64, 256, 2048)
INVARIANT_BUDGETS = (16, 60, 132)
"""Rows and SM counts over which a batch-invariant configuration is optimised."""


Source = Literal["table", "near", "model", "warmup", "library"]
"""table: a tuned cell. near: a cell of the same weights with a nearby budget or number of rows.
model: the cost model. warmup: measured by `warmup(tune=True)`. library: cuBLASLt, on the whole
device where no cell has these very rows."""

NEAR_MUST_GAIN = 0.97
"""The model's choice beats a neighbouring cell's only if predicted faster by more than this: the
neighbour was measured, and the best of many predictions is optimistic by a few percent."""


@dataclass(frozen=True, slots=True)
class Selection:
    """A configuration, its source, and its predicted time, us."""

    config: GemmConfig
    source: Source
    predicted_us: float


def select_gemm(
    problem: GemmProblem,
    budget: Budget,
    profile: Profile,
    tables: Table | None = None,
    *,
    kernels: tuple[Kernel, ...] = constraints.AVAILABLE,
    constants: CostConstants | None = None,
) -> Selection:
    """The configuration for `problem` in `budget`; pure, needs no GPU.

    A tuned entry is used only for exactly this budget, confinement and cluster permission, and only
    for rows that make the same number of tiles; otherwise the cost model decides. With
    `batch_invariant` the choice depends on (n, k, dtype, alignment) only and no table is used.
    `constants` default to those fitted on the profile's GPU.

    Raises:
        BudgetError: a budget below one SM.
        ArgumentError: no kernel of `kernels` can serve the problem.
    """
    check_budget(budget)
    constants = constants or load_constants(profile.info.name, profile.info.capability)
    capability = profile.info.capability
    source: Source = "model"
    if problem.batch_invariant:
        config = invariant_config(
            problem.n, problem.k, problem.dtype, problem.aligned, capability, kernels,
            problem.epilogue.swiglu,
        )  # fmt: skip
    elif tables is not None and (found := tables.lookup(problem, budget, capability=capability)):
        config, source = found, "table"
    else:
        ranked = rank(problem, budget, profile, kernels=kernels, constants=constants, prune=True)
        return Selection(ranked[0].config(), "model", ranked[0].predicted_us)
    predicted_us = cost_model.predict_us(problem, config, budget, profile, constants)
    return Selection(config, source, predicted_us)


def is_librarys(
    problem: GemmProblem, budget: Budget, profile: Profile, tables: Table | None
) -> bool:
    """Whether cuBLASLt serves a problem that has no cell of its own: on the whole device.

    There it can launch whatever it picks. Of 356 such problems of more than `OWN_ROWS` rows on an
    H100 what cells of other rows and the cost model chose took 1.07 times its time, 1.73 at worst.
    """
    whole = budget.num_sms == profile.info.num_sms and not problem.batch_invariant
    if not whole or problem.m <= OWN_ROWS:
        return False
    if tables is not None and tables.has(problem, budget):
        return False
    return constraints.is_legal(problem, constraints.CUBLASLT, budget, profile.info.capability)


def select_near(
    problem: GemmProblem,
    budget: Budget,
    profile: Profile,
    tables: Table,
    modelled: Selection,
    constants: CostConstants,
) -> Selection | None:
    """The best configuration of neighbouring cells of the same weights, or None.

    A neighbour's configuration is predicted for this problem and corrected by the model's error at
    the neighbour; one from fewer SMs, on as many CTAs, takes no longer than measured there.
    `modelled` is corrected by all of the neighbours. None if `modelled` is better, or if there are
    no neighbours. Those on more SMs than are here, as a process may be given fewer of a GPU's, are
    passed over.
    """
    capability = profile.info.capability
    found: list[tuple[float, GemmConfig]] = []
    ratios: list[float] = []
    for key, cell in tables.neighbours(problem, budget):
        if key.num_sms > profile.info.num_sms:
            continue
        there, other = Budget(key.num_sms, budget.confined, key.clusters), replace(problem, m=key.m)
        ratio = cell.own_us / cost_model.predict_us(other, cell.own, there, profile, constants)
        ratios.append(ratio)
        group = candidates.group_m(problem.m, cell.own, budget.num_sms)
        config = replace(cell.own, group_m=group)
        if constraints.is_legal(problem, config, budget, capability):
            predicted_us = cost_model.predict_us(problem, config, budget, profile, constants)
            found.append((predicted_us * ratio, config))
        as_there = replace(cell.own, max_ctas=constraints.num_ctas(cell.own, there))
        no_longer = there.num_sms < budget.num_sms and key.m >= problem.m
        if no_longer and constraints.is_legal(problem, as_there, budget, capability):
            found.append((cell.own_us, as_there))
    if not found:
        return None
    predicted_us, config = min(found, key=lambda item: item[0])
    off = exp(sum(map(log, ratios)) / len(ratios))
    if modelled.predicted_us * off < NEAR_MUST_GAIN * predicted_us:
        return None
    return Selection(config, "near", predicted_us)


@dataclass(slots=True)
class Ranked:
    """One candidate and its predicted time; `config()` makes the configuration."""

    predicted_us: float
    variant: GemmConfig
    split: int
    group_m: int
    max_ctas: int
    overlap: bool = True

    def config(self) -> GemmConfig:
        return replace(
            self.variant,
            split=self.split,
            group_m=self.group_m,
            max_ctas=self.max_ctas,
            overlap=self.overlap,
        )


def rank(
    problem: GemmProblem,
    budget: Budget,
    profile: Profile,
    *,
    kernels: tuple[Kernel, ...] = constraints.AVAILABLE,
    constants: CostConstants = DEFAULTS,
    prune: bool = False,
) -> list[Ranked]:
    """Candidates by predicted time, best first; stream-K grids capped where that helps.

    `prune` drops variants whose lower bound exceeds the best time so far; the best stays the same.

    Raises:
        ArgumentError: no kernel of `kernels` can serve the problem.
    """
    ceilings = cost_model.Ceilings(budget, profile, constants)
    capability = profile.info.capability
    bounded: list[tuple[float, int, GemmConfig, cost_model.Estimate]] = []
    sensible = candidates.sensible_variants(problem, budget, capability, kernels)
    for variant in tuple(filter(constants.knows, sensible)) or sensible:
        group = candidates.group_m(problem.m, variant, budget.num_sms)
        estimate = cost_model.Estimate(problem, variant, ceilings, constants, group)
        bounded.append((estimate.at_least_us(), group, variant, estimate))
    bounded.sort(key=lambda item: item[0])
    found: list[Ranked] = []
    best = float("inf")
    for bound, group, variant, estimate in bounded:
        if prune and bound > best:
            break
        splits = candidates.splits(estimate.tiles, estimate.ctas, estimate.steps)
        crowded = candidates.is_crowded(problem.m, variant)
        over = candidates.SWAPPED_MANY if crowded else 1.0
        for split in (1,) if crowded or variant.kernel == "cutlass" else splits:
            for cap in estimate.grids(split):
                if not constraints.partials_fit(
                    variant, split, estimate.tiles, cap or estimate.ctas
                ):
                    continue
                predicted_us, overlap = estimate.fastest_us(split, cap)
                predicted_us *= over
                if predicted_us < best:
                    best = predicted_us
                elif prune:
                    continue
                found.append(Ranked(predicted_us, variant, split, group, cap, overlap))
    if not found:
        raise ArgumentError(
            f"no kernel of {kernels} serves {problem} on capability {capability}; "
            "leave the choice of kernel to dispatch"
        )
    found.sort(key=lambda item: item.predicted_us)
    return found


@dataclass(frozen=True, slots=True)
class Nominal:
    """Ceilings of a nominal device: a batch-invariant choice must not change with measurements."""

    sm_clock_mhz: int = 1980
    flops_per_clock: int = 4096
    l2_bytes: int = 50 * 2**20

    @property
    def info(self) -> Nominal:
        return self

    def bandwidth(self, num_sms: int, *, confined: Confinement) -> float:
        return min(0.2 * num_sms, 4.4)

    def flops(self, num_sms: int) -> float:
        return 6.5 * num_sms


@lru_cache(maxsize=1024)
def invariant_config(
    n: int,
    k: int,
    dtype: Dtype,
    aligned: bool,
    capability: constraints.Capability,
    kernels: tuple[Kernel, ...],
    swiglu: bool,
) -> GemmConfig:
    """The one configuration for (n, k, dtype): the best geomean over a few rows and budgets.

    K is not split: the workspace of a fixed split would grow with the batch. Tables, profiles and
    fitted constants are not used, so that new measurements do not change a result's bits.
    """
    epilogue = Epilogue(swiglu=swiglu)
    problems = [
        GemmProblem(m, n, k, dtype, epilogue, aligned, batch_invariant=True) for m in INVARIANT_ROWS
    ]
    constants = DEFAULTS
    budgets = [
        cost_model.Ceilings(Budget(num_sms, "mask", False), Nominal(), constants)
        for num_sms in INVARIANT_BUDGETS
    ]
    best, chosen = float("inf"), None
    kernels = candidates.kernels_for(problems[0], capability, kernels)
    # leaves room for a residual, so that one configuration serves every epilogue but SwiGLU
    for variant in candidates.variants(dtype, aligned, capability, kernels, not swiglu, swiglu):
        total = 0.0
        for problem, ceilings in product(problems, budgets):
            group = candidates.group_m(problem.m, variant, ceilings.budget.num_sms)
            estimate = cost_model.Estimate(problem, variant, ceilings, constants, group)
            total += log(estimate.fastest_us(1, 0)[0])
        if total < best:
            best, chosen = total, variant
    if chosen is None:
        raise ArgumentError(f"no kernel of {kernels} serves {dtype} on capability {capability}")
    return chosen


class GemmFamily(Family[GemmProblem, GemmConfig]):
    """GEMMs, also with SwiGLU. A cell serves its exact budget and rows that make as many tiles."""

    name = "gemm"
    key = CellKey
    codec = CellCodec(CellKey)

    def broken(self, key: CellKey, cell: Cell, profile: Profile) -> str:
        problem, budget, capability = key.problem, key.budget, profile.info.capability
        for config in dict.fromkeys((cell.config, cell.own)):
            for constraint in constraints.CONSTRAINTS:
                if not constraint(problem, config, budget, capability):
                    return constraint.__name__
        optional = constraints.LIBRARIES + constraints.OPTIONAL
        return "own" if cell.own.kernel in optional else ""

    def table_of(self, found: Cells[CellKey, Cell]) -> Table:
        return Table(found.meta, found.cells)

    def config(
        self, problem: GemmProblem, budget: Budget, profile: Profile, table: Any = None
    ) -> GemmConfig:
        return select_gemm(problem, budget, profile, table).config


GEMM_FAMILY = GemmFamily()
