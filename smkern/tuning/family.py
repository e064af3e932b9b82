"""Operator families: key, candidates and cost model of each, and how a configuration is chosen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from smkern.device import Budget, check_budget
from smkern.tuning import cells
from smkern.tuning.bucket_table import BucketTable, Key
from smkern.tuning.cells import CellFile, Cells, Codec, FlatCodec, Tuned

if TYPE_CHECKING:
    from smkern.profile import Profile

P = TypeVar("P")
C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Selection(Generic[C]):
    """A configuration and its source: a tuned cell, the cost model, or a named kernel."""

    config: C
    source: Literal["table", "model", "forced"]


class Family(ABC, Generic[P, C]):
    """Operators that share a tuned table.

    Attributes:
        name: Name of the table's file, without its suffix.
        key: Key class of the cells.
        codec: Codec of the table's lines.
    """

    name: str
    key: Any

    @property
    @abstractmethod
    def codec(self) -> Codec[Any, Any]: ...

    def key_of(self, problem: P, budget: Budget) -> Any:
        """The key of a problem's cell."""
        return self.key.of(problem, budget)

    @abstractmethod
    def table_of(self, found: Cells[Any, Any]) -> Any:
        """The table for `config`, made of a file's cells."""

    @abstractmethod
    def config(self, problem: P, budget: Budget, profile: Profile, table: Any = None) -> C:
        """The configuration that dispatch uses: the table's if it has one, else the model's.

        Raises:
            BudgetError: a budget below one SM.
        """

    def file(self, path: Path) -> CellFile[Any, Any]:
        """The table's file at a path."""
        return CellFile(path, self.codec)

    @abstractmethod
    def broken(self, key: Any, cell: Any, profile: Profile) -> str:
        """Name of a constraint that a cell breaks, so that it must not be launched; "" if none."""

    def load(self, profile: Profile) -> Any:
        """The shipped table for the profile's GPU, overridden by the user's own; may be empty.

        Raises:
            TableError: as `cells_of`.
        """
        shipped, own = (
            self.cells_of(path_of(profile.info.name, self.name), profile)
            for path_of in (cells.shipped_path, cells.user_path)
        )
        return self.table_of(shipped.merged(own))

    def cells_of(self, path: Path, profile: Profile) -> Cells[Any, Any]:
        """A file's cells, all of which may be launched on the profile's GPU.

        Raises:
            TableError: the file is corrupt, from another GPU or of another version, or has a cell
                that breaks a constraint of the tuner's.
        """

        def broken(key: Any, cell: Any) -> str:
            return "num_sms" if key.num_sms < 1 else self.broken(key, cell, profile)

        return self.file(path).load(profile.info.name, broken)


@dataclass(frozen=True, kw_only=True)
class BucketFamily(Family[P, C]):
    """Operators whose cells also serve nearby sizes.

    No configuration changes a result's bits, so a neighbour's cell serves as well.

    Args:
        name: Name of the table's file, without its suffix.
        key: Key class of the cells.
        problems: The problems at both ends of a key's buckets: what one of them may run is legal.
        default: Default configuration; a line holds its first field and those that differ from it.
        candidates: The configurations to measure and to choose from.
        predict_us: The model's time for a configuration with cold caches, us.
        overlap: Fields that do not select a kernel, with the values that candidates have.
        legal: Whether a configuration may run, if candidates do not decide it.
        modelled: The model's choice, if it is not simply the fastest.
    """

    name: str
    key: type[Key]
    problems: Callable[[Any], Sequence[P]]
    default: C
    candidates: Callable[[P, Budget, Profile], Sequence[C]]
    predict_us: Callable[[P, C, Budget, Profile], float]
    overlap: Mapping[str, Any] = field(default_factory=lambda: {"pdl": True})
    legal: Callable[[P, C, Budget, Profile], bool] | None = None
    modelled: Callable[[P, Budget, Profile], C] | None = None

    @property
    def codec(self) -> FlatCodec[Any, C]:
        return FlatCodec(self.key, self.default)

    def table_of(self, found: Cells[Any, Tuned[C]]) -> BucketTable[Any, C]:
        return BucketTable(found.meta, found.cells)

    def broken(self, key: Any, cell: Tuned[C], profile: Profile) -> str:
        for name in key.BUCKETED:
            if getattr(key, name) < 1:  # a key's bucket is a power of two, of nothing 1
                return f"{name} of at least 1"
        budget = Budget(key.num_sms, key.confined)
        served = (self.is_legal(x, cell.config, budget, profile) for x in self.problems(key))
        return "" if any(served) else "every candidate's constraints"

    def is_legal(self, problem: P, config: C, budget: Budget, profile: Profile) -> bool:
        """Whether kernels exist for a configuration in this budget."""
        if self.legal is not None:
            return self.legal(problem, config, budget, profile)
        plain: Any = config
        return replace(plain, **self.overlap) in self.candidates(problem, budget, profile)

    def lookup(
        self, problem: P, budget: Budget, profile: Profile, table: BucketTable[Any, C]
    ) -> C | None:
        """The configuration of the nearest cell in exactly `budget`, or None."""
        return table.nearest(
            self.key.of(problem, budget),
            lambda config: self.is_legal(problem, config, budget, profile),
        )

    def choose(self, problem: P, budget: Budget, profile: Profile) -> C:
        """The configuration that the model predicts to be fastest; the smallest among equals."""
        if self.modelled is not None:
            return self.modelled(problem, budget, profile)
        return min(
            self.candidates(problem, budget, profile),
            key=lambda config: (self.predict_us(problem, config, budget, profile), config),
        )

    def select(
        self, problem: P, budget: Budget, profile: Profile, table: BucketTable[Any, C] | None = None
    ) -> Selection[C]:
        """The configuration for `problem` in `budget`, with its source; pure, needs no GPU.

        Raises:
            BudgetError: a budget below one SM.
        """
        check_budget(budget)
        found = None if table is None else self.lookup(problem, budget, profile, table)
        if found is not None:
            return Selection(found, "table")
        return Selection(self.choose(problem, budget, profile), "model")

    def config(self, problem: P, budget: Budget, profile: Profile, table: Any = None) -> C:
        return self.select(problem, budget, profile, table).config

    def selector(self, profile: Profile) -> Callable[[P, Budget], C]:
        """`config` for a device, with the tables available for it.

        Raises:
            TableError: a file is corrupt, from another GPU or of another version.
        """
        table = self.load(profile)
        return lambda problem, budget: self.config(problem, budget, profile, table)
