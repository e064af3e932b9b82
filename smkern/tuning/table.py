"""GEMM's tuned cells: the format of a line, and which cell serves a problem."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, Generic, TypeVar

from smkern.tuning.cells import checked, config_to_json, flat, key_of, time_us
from smkern.tuning.config import Budget, Confinement, Dtype, Epilogue, GemmConfig, GemmProblem
from smkern.tuning.constraints import (
    LIBRARIES,
    OPTIONAL,
    Capability,
    is_legal,
    serves_alignment,
    serves_library,
    serves_swiglu,
)

DEFAULT_CONFIG = GemmConfig("tma", 0, 0, 0)
"""A line holds the kernel and the fields that differ from these defaults."""
_Cells = dict["CellKey", "Cell"]
K = TypeVar("K")
EPILOGUES = {
    each.key: each
    for each in (
        Epilogue(swiglu=True),
        *(Epilogue(*of) for of in product((False, True), (False, True), (None, "silu", "gelu"))),
    )
}
"""All epilogues by the names that lines have."""


@dataclass(frozen=True, slots=True, order=True)
class CellKey:
    """Key of a tuned cell."""

    op: str
    n: int
    k: int
    m: int
    dtype: Dtype
    epilogue: str
    num_sms: int
    confined: Confinement
    clusters: bool

    @classmethod
    def of(cls, problem: GemmProblem, budget: Budget) -> CellKey:
        return cls(
            "gemm", problem.n, problem.k, problem.m, problem.dtype, problem.epilogue.key,
            budget.num_sms, budget.confined, budget.clusters,
        )  # fmt: skip

    @property
    def problem(self) -> GemmProblem:
        """The problem that was tuned; KeyError for an epilogue that is none."""
        return GemmProblem(self.m, self.n, self.k, self.dtype, EPILOGUES[self.epilogue])

    @property
    def budget(self) -> Budget:
        return Budget(self.num_sms, self.confined, self.clusters)


@dataclass(frozen=True, slots=True)
class Cell:
    """The fastest configuration of a cell, and the fastest of smkern's own that are always there.

    They differ where cuBLASLt, unfused SwiGLU or a kernel that needs an extra won.

    Args:
        us: median time of `config`, microseconds.
        own: smkern's fastest kernel that needs no extra; the same as `config` if that is one.
        own_us: median time of `own`, microseconds.
    """

    config: GemmConfig
    us: float
    own: GemmConfig
    own_us: float


Served = Callable[[GemmProblem, GemmConfig], bool]
"""Whether a configuration of a kernel that needs an extra can run."""


def never(problem: object, config: GemmConfig) -> bool:
    """None can."""
    return False


FAR = 1.6
"""Cells whose SMs or rows differ by more than this factor are not considered neighbours."""
INVARIANT = ("ws", "tma")
"""Kernels that sum in the same order with any tile: wgmma over K in steps of 16."""


@dataclass(slots=True)
class Table:
    """Tuned cells in memory, looked up by problem and budget."""

    meta: dict[str, Any] = field(default_factory=dict)
    cells: _Cells = field(default_factory=dict)
    _rows: dict[tuple[Any, ...], list[int]] = field(default_factory=dict, repr=False)
    _budgets: dict[tuple[Any, ...], list[tuple[int, bool]]] = field(
        default_factory=dict, repr=False
    )

    def __post_init__(self) -> None:
        for key in sorted(self.cells):
            self._rows.setdefault(_without_m(key), []).append(key.m)
        for n, k, dtype, epilogue, num_sms, confined, clusters in self._rows:
            weights = n, k, dtype, epilogue, confined
            self._budgets.setdefault(weights, []).append((num_sms, clusters))

    def neighbours(self, problem: GemmProblem, budget: Budget) -> Iterator[tuple[CellKey, Cell]]:
        """Cells of the same weights with the nearest budgets and rows on both sides of these.

        SMs and rows are within a factor of `FAR`. An epilogue without neighbours takes the plain
        GEMM's.
        """
        for epilogue in dict.fromkeys((problem.epilogue.key, Epilogue().key)):
            weights = problem.n, problem.k, problem.dtype, epilogue
            budgets = sorted(self._budgets.get((*weights, budget.confined), ()))
            found = False
            for num_sms, clusters in _beside(budgets, (budget.num_sms, budget.clusters)):
                rows = self._rows[*weights, num_sms, budget.confined, clusters]
                if not 1 / FAR <= num_sms / budget.num_sms <= FAR:
                    continue
                for m in _beside(rows, problem.m):
                    if 1 / FAR <= m / problem.m <= FAR:
                        found = True
                        n, k, dtype, plain = weights
                        confined = budget.confined
                        key = CellKey("gemm", n, k, m, dtype, plain, num_sms, confined, clusters)
                        yield key, self.cells[key]
            if found:
                return

    def has(self, problem: GemmProblem, budget: Budget) -> bool:
        """Whether these very rows were tuned."""
        return CellKey.of(problem, budget) in self.cells

    def lookup(
        self,
        problem: GemmProblem,
        budget: Budget,
        allow_cublaslt: bool = True,
        capability: Capability = (9, 0),
        served: Served = never,
    ) -> GemmConfig | None:
        """The tuned configuration for `problem` in exactly `budget`, or None.

        A cell tuned at M serves the rows above the next smaller tuned M and above M / 2 that make
        as many row tiles: for a batch of one, the best for 64 rows took a third longer, and for 32
        the model's choice is within 1% of the best.
        With `batch_invariant` only cells with whole K loops are used: ws and tma add products in
        the same order with any tile (the GPU tests check it bit for bit), so only a split would
        make a row's bits depend on M or the budget. An epilogue without a cell of its own uses the
        plain GEMM's, whose main loop is the same. A cell that cuBLASLt won holds for its M alone:
        it picks its kernels by M, and on 100 SMs took one for 136 rows that could not launch where
        that for 256 could. `served` says whether a kernel that needs an
        extra may run; the best of the others does where not.
        """
        runs = partial(served, problem)  # a plain cell's kernel is another without its epilogue
        found = self._lookup(problem, budget, allow_cublaslt, capability, runs)
        if found is None and problem.epilogue != Epilogue():
            plain = replace(problem, epilogue=Epilogue())
            config = self._lookup(plain, budget, False, capability, runs)
            if config is not None and is_legal(problem, config, budget, capability):
                return config
        return found

    def library_us(self, problem: GemmProblem, budget: Budget, config: GemmConfig) -> float | None:
        """What the tuner measured of a library's kernel at these very rows, us; else None.

        The cost model knows no library's tiles.
        """
        cell = self.cells.get(CellKey.of(problem, budget)) if config.kernel in LIBRARIES else None
        return cell.us if cell is not None and cell.config == config else None

    def _lookup(
        self,
        problem: GemmProblem,
        budget: Budget,
        allow_cublaslt: bool,
        capability: Capability,
        runs: Callable[[GemmConfig], bool],
    ) -> GemmConfig | None:
        key = CellKey.of(problem, budget)
        rows = self._rows.get(_without_m(key))
        if rows is None or (at := bisect_left(rows, problem.m)) == len(rows):
            return None
        tuned_m = rows[at]
        if 2 * problem.m <= tuned_m:
            return None
        cell = self.cells[replace(key, m=tuned_m)]
        own = problem.batch_invariant or not allow_cublaslt
        if cell.config.kernel == "cublaslt" and problem.m != tuned_m:
            own = True
        if cell.config.kernel in OPTIONAL:
            own = problem.batch_invariant or not runs(cell.config)
        config = cell.own if own else cell.config
        if problem.batch_invariant and (config.split != 1 or config.kernel not in INVARIANT):
            return None
        if -(-problem.m // config.block_m) != -(-tuned_m // config.block_m):
            return None
        fits = all(
            serves(problem, config, budget, capability)
            for serves in (serves_alignment, serves_library, serves_swiglu)
        )
        return config if fits else None


def _beside(values: Sequence[Any], value: Any) -> Sequence[Any]:
    """The neighbours of `value` among sorted values: the last below and the first above."""
    at = bisect_left(values, value)
    if at < len(values) and values[at] == value:
        return values[at : at + 1]
    return values[max(0, at - 1) : at + 1]


def _without_m(key: CellKey) -> tuple[Any, ...]:
    return (key.n, key.k, key.dtype, key.epilogue, key.num_sms, key.confined, key.clusters)


@dataclass(frozen=True, slots=True)
class CellCodec(Generic[K]):
    """A line of a GEMM's table: key, fastest configuration, and smkern's own if it is another.

    Args:
        key: class of the key; its fields are a line's first values.
    """

    key: type[K]

    def encode(self, key: K, value: Cell) -> dict[str, Any]:
        row = {
            **flat(key),
            "us": round(value.us, 3),
            "config": config_to_json(value.config, DEFAULT_CONFIG),
        }
        if value.own != value.config:
            own = config_to_json(value.own, DEFAULT_CONFIG)
            row |= {"own_us": round(value.own_us, 3), "own": own}
        return row

    def decode(self, row: Mapping[str, Any]) -> tuple[K, Cell]:
        key = key_of(self.key, row)
        config, us = checked(GemmConfig, row["config"]), time_us(row["us"])
        own = checked(GemmConfig, row["own"]) if "own" in row else config
        return key, Cell(config, us, own, time_us(row.get("own_us", us)))
