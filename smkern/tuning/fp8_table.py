"""Tuned cells of GEMMs of e4m3: one serves its budget, and rows that make as many tiles."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from smkern.device import Confinement, check_budget
from smkern.tuning import constraints, fp8
from smkern.tuning.cells import Cells
from smkern.tuning.config import Budget, GemmConfig
from smkern.tuning.constraints import Capability
from smkern.tuning.family import Family
from smkern.tuning.fp8 import ScaledProblem
from smkern.tuning.table import Cell, CellCodec, never

if TYPE_CHECKING:
    from smkern.profile import Profile


@dataclass(frozen=True, slots=True, order=True)
class ScaledKey:
    """Key of a tuned cell. Epilogues share it: the loop over K is theirs all."""

    n: int
    k: int
    blocks: bool
    num_sms: int
    confined: Confinement
    m: int

    @classmethod
    def of(cls, problem: ScaledProblem, budget: Budget) -> ScaledKey:
        return cls(problem.n, problem.k, problem.blocks, budget.num_sms, budget.confined, problem.m)

    @property
    def problem(self) -> ScaledProblem:
        """The problem that was tuned."""
        scales: fp8.Scales = "block" if self.blocks else "row"
        return ScaledProblem(self.m, self.n, self.k, scales=scales)

    @property
    def series(self) -> tuple[Any, ...]:
        """All but the rows."""
        return astuple(self)[:-1]


ScaledCells = Mapping[ScaledKey, Cell]
Served = Callable[[ScaledProblem, GemmConfig], bool]
"""Whether a configuration of a kernel that needs an extra can run."""


@dataclass(slots=True)
class ScaledTable:
    """Tuned cells in memory, looked up by problem and budget."""

    cells: ScaledCells
    _rows: dict[tuple[Any, ...], list[int]] = field(default_factory=dict)

    has_extras: bool = field(init=False)
    """Whether kernels that need an extra were at hand where it was tuned."""

    def __post_init__(self) -> None:
        self.has_extras = any(x.config.kernel in constraints.OPTIONAL for x in self.cells.values())
        for key in sorted(self.cells):
            self._rows.setdefault(key.series, []).append(key.m)

    def lookup(
        self,
        problem: ScaledProblem,
        budget: Budget,
        capability: Capability,
        served: Served = never,
    ) -> GemmConfig | None:
        """The configuration of the next tuned rows that make as many row tiles, or None.

        A kernel that needs an extra gives way to the best of the others where it is not `served`.
        A batch-invariant choice sees no table, so that new measurements change no bits.
        """
        if problem.batch_invariant or problem.epilogue.swiglu:
            return None
        if problem.kernel in ("model", "cutlass"):
            return None
        if not fp8.serves_ws(problem, capability):
            return None
        key = ScaledKey.of(problem, budget)
        rows = self._rows.get(key.series, [])
        at = bisect_left(rows, problem.m)
        if at == len(rows) or rows[at] > 2 * problem.m:
            return None
        cell = self.cells[replace(key, m=rows[at])]
        extra = cell.config.kernel in constraints.OPTIONAL
        config = cell.own if extra and not served(problem, cell.config) else cell.config
        if -(-problem.m // config.block_m) != -(-rows[at] // config.block_m):
            return None
        return fitting(problem, config, budget, capability)


def fitting(
    problem: ScaledProblem, config: GemmConfig, budget: Budget, capability: Capability
) -> GemmConfig | None:
    """The configuration with as many stages as leave the epilogue room; None if it cannot run."""
    tile = (config.block_m, config.block_n, config.num_warps, config.swap, config.ctas_per_sm)
    masked = budget.confined == "mask"
    for x in fp8.variants_for(problem, masked, capability, config.kernel):
        if tile == (x.block_m, x.block_n, x.num_warps, x.swap, x.ctas_per_sm):
            found = replace(config, num_stages=x.num_stages)
            ctas = constraints.num_ctas(found, budget)
            return found if fp8.can_split(problem.twin, found, ctas) else None
    return None


class ScaledFamily(Family[ScaledProblem, GemmConfig]):
    """GEMMs of e4m3."""

    name = "gemm_fp8"
    key = ScaledKey
    codec = CellCodec(ScaledKey)

    def table_of(self, found: Cells[ScaledKey, Cell]) -> ScaledTable:
        return ScaledTable(found.cells)

    def broken(self, key: ScaledKey, cell: Cell, profile: Profile) -> str:
        budget, twin = Budget(key.num_sms, key.confined), key.problem.twin
        for config in dict.fromkeys((cell.config, cell.own)):
            if min(key.n, key.k, key.m, config.group_m) < 1:
                return "positive sizes"
            if fitting(key.problem, config, budget, profile.info.capability) is None:
                return "every variant's tile"
            if not constraints.has_pieces(twin, config):
                return "has_pieces"
        return "own" if cell.own.kernel in constraints.OPTIONAL else ""

    def config(
        self,
        problem: ScaledProblem,
        budget: Budget,
        profile: Profile,
        table: Any = None,
        served: Served = never,
    ) -> GemmConfig:
        check_budget(budget)
        if fp8.is_librarys(problem, budget, profile):
            return constraints.CUBLASLT
        found = None
        if table is not None:
            found = table.lookup(problem, budget, profile.info.capability, served)
        return found or fp8.choose(problem, budget, profile)


FP8_FAMILY = ScaledFamily()
