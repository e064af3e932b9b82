"""Tuned tables: JSON files with a cell a line, sorted, with their provenance.

`TableStore` writes them whole (temporary file, fsync, rename, under a file lock), so that a reader
sees the old table or the new one; `Table` answers look-ups.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

from smkern.errors import TableError
from smkern.tuning import space
from smkern.tuning.config import Budget, Dtype, GemmConfig, GemmProblem, Kernel
from smkern.tuning.cost_model import DEFAULTS, CostConstants

FORMAT = "smkern-table"
VERSION = 1
PROVENANCE = ("gpu", "driver", "torch", "triton", "smkern_commit", "date", "command")
_SHIPPED = Path(__file__).parent / "tables"
_DEFAULT_CONFIG = GemmConfig("tma", 0, 0, 0)
_REMEDY = "delete it or tune again: smkern autotune --out {path}"

_Cells = dict["CellKey", "Cell"]


@dataclass(frozen=True, slots=True, order=True)
class CellKey:
    """What a tuned cell is looked up by."""

    op: str
    n: int
    k: int
    m: int
    dtype: str
    epilogue: str
    num_sms: int
    confined: str
    clusters: bool

    @classmethod
    def of(cls, problem: GemmProblem, budget: Budget) -> CellKey:
        return cls(
            "gemm",
            problem.n,
            problem.k,
            problem.m,
            problem.dtype,
            problem.epilogue.key,
            budget.num_sms,
            budget.confined,
            budget.clusters,
        )


@dataclass(frozen=True, slots=True)
class Cell:
    """The fastest configuration of a cell, and the fastest of our own where a library won.

    Args:
        us: median time of `config`, microseconds.
        own: our fastest configuration; equals `config` unless that is cuBLASLt's.
        own_us: its time.
    """

    config: GemmConfig
    us: float
    own: GemmConfig
    own_us: float


INVARIANT = ("ws", "tma")
"""Kernels whose sums do not depend on the tile: wgmma over K in steps of 16, in order."""


@dataclass(slots=True)
class Table:
    """Tuned cells in memory, looked up by problem and budget."""

    meta: dict[str, Any] = field(default_factory=dict)
    cells: _Cells = field(default_factory=dict)
    _rows: dict[tuple[Any, ...], list[int]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for key in sorted(self.cells):
            self._rows.setdefault(_without_m(key), []).append(key.m)

    def lookup(
        self, problem: GemmProblem, budget: Budget, allow_cublaslt: bool = True
    ) -> GemmConfig | None:
        """The tuned configuration for `problem` in exactly `budget`, or None.

        A cell tuned at M serves the rows above the next smaller tuned M with as many row tiles.
        With `batch_invariant` only one with whole K loops does: ws and tma add products in the same
        order whatever the tile (held bit for bit by the GPU tests), and the split alone is what
        would make a row's bits turn with M or the budget.
        """
        key = CellKey.of(problem, budget)
        rows = self._rows.get(_without_m(key))
        if rows is None or (at := bisect_left(rows, problem.m)) == len(rows):
            return None
        tuned_m = rows[at]
        cell = self.cells[_with_m(key, tuned_m)]
        own = problem.batch_invariant or not allow_cublaslt
        config = cell.own if own else cell.config
        if problem.batch_invariant and (config.split != 1 or config.kernel not in INVARIANT):
            return None
        if -(-problem.m // config.block_m) != -(-tuned_m // config.block_m):
            return None
        serves = space.serves_alignment(problem, config, budget, (9, 0))
        return config if serves and space.serves_library(problem, config, budget, (9, 0)) else None

    def merged(self, other: Table) -> Table:
        """Both tables' cells and provenance; the other's count where both have a cell."""
        return Table({**self.meta, **other.meta}, {**self.cells, **other.cells})


def _without_m(key: CellKey) -> tuple[Any, ...]:
    return (key.n, key.k, key.dtype, key.epilogue, key.num_sms, key.confined, key.clusters)


def _with_m(key: CellKey, m: int) -> CellKey:
    return CellKey(
        key.op,
        key.n,
        key.k,
        m,
        key.dtype,
        key.epilogue,
        key.num_sms,
        key.confined,
        key.clusters,
    )


class TableStore:
    """One table file. Writers may be several: each merges its cells under a lock."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def load(self, gpu: str | None = None) -> Table:
        """The file's table, or an empty one when there is no file.

        Raises:
            TableError: no valid table, of another version, or with `gpu` given, of another GPU.
        """
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return Table()
        except (OSError, UnicodeDecodeError) as error:
            raise self._error(f"cannot be read ({error})") from error
        return self._parse(text, gpu)

    def merge(self, cells: Mapping[CellKey, Cell], meta: Mapping[str, Any]) -> Table:
        """Add `cells` (they replace those of the same key) and write the file whole.

        Raises:
            TableError: the file that is there is no valid table, or of another GPU than `meta`'s.
        """
        from filelock import FileLock

        missing = [name for name in PROVENANCE if name not in meta]
        if missing:
            raise self._error(f"was to be written without its provenance: {missing}")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(str(self.path) + ".lock"):
            table = self.load(meta["gpu"]).merged(Table(dict(meta), dict(cells)))
            self._write(dump(table))
        return table

    def _write(self, text: str) -> None:
        """Replace the file at once; under the lock, other temporary files are dead writers.."""
        for left in self.path.parent.glob(f".{self.path.name}.*.part"):
            left.unlink(missing_ok=True)
        temporary = self.path.parent / f".{self.path.name}.{os.getpid()}.part"
        try:
            with open(temporary, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        finally:
            temporary.unlink(missing_ok=True)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _parse(self, text: str, gpu: str | None) -> Table:
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise self._error(f"is no JSON, perhaps half-written ({error})") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise self._error(f"is not a table of smkern: its format is not {FORMAT!r}")
        if data.get("version") != VERSION:
            raise self._error(f"has version {data.get('version')!r}; this smkern reads {VERSION}")
        meta, rows = data.get("meta"), data.get("cells")
        if not isinstance(meta, dict) or not isinstance(rows, list):
            raise self._error("lacks its provenance or its cells")
        if gpu is not None and meta.get("gpu") != gpu:
            raise self._error(f"was tuned on {meta.get('gpu')!r}, and this is {gpu!r}")
        cells: _Cells = {}
        for row in rows:
            try:
                key, cell = _parse_row(row)
            except (KeyError, TypeError, ValueError) as error:
                raise self._error(f"has a cell that is none ({error}): {row!r:.120}") from error
            cells[key] = cell
        return Table(meta, cells)

    def _error(self, what: str) -> TableError:
        return TableError(f"{self.path} {what}; {_REMEDY.format(path=self.path)}")


def dump(table: Table) -> str:
    """The table as text: sorted, a cell a line, so that a diff shows the cells that changed."""
    lines = [json.dumps(_row(key, table.cells[key])) for key in sorted(table.cells)]
    head = {"format": FORMAT, "version": VERSION, "meta": table.meta}
    return json.dumps(head)[:-1] + ', "cells": [\n' + ",\n".join(lines) + "\n]}\n"


def config_to_json(config: GemmConfig) -> dict[str, Any]:
    """The configuration's fields that are not the default."""
    return {
        name: value
        for name, value in asdict(config).items()
        if value != getattr(_DEFAULT_CONFIG, name) or name == "kernel"
    }


def config_from_json(values: Mapping[str, Any]) -> GemmConfig:
    """Inverse of `config_to_json`; KeyError, TypeError or ValueError when it is none."""
    for name, value in values.items():
        wanted = type(getattr(_DEFAULT_CONFIG, name, None))
        if type(value) is not wanted:
            raise ValueError(f"{name} is {value!r}")
    config = GemmConfig(**values)
    if config.kernel not in get_args(Kernel) or min(config.block_m, config.block_n) < 1:
        raise ValueError(f"{config} names no kernel of smkern")
    return config


def _row(key: CellKey, cell: Cell) -> dict[str, Any]:
    row = {**asdict(key), "us": round(cell.us, 3), "config": config_to_json(cell.config)}
    if cell.own != cell.config:
        row |= {"own_us": round(cell.own_us, 3), "own": config_to_json(cell.own)}
    return row


def _parse_row(row: Mapping[str, Any]) -> tuple[CellKey, Cell]:
    values = [row[item.name] for item in fields(CellKey)]
    kinds = (str, int, int, int, str, str, int, str, bool)
    if [type(value) for value in values] != list(kinds) or row["dtype"] not in get_args(Dtype):
        raise ValueError("its key has values of other types")
    config, us = config_from_json(row["config"]), float(row["us"])
    own = config_from_json(row["own"]) if "own" in row else config
    if not us > 0:
        raise ValueError(f"us is {us}")
    return CellKey(*values), Cell(config, us, own, float(row.get("own_us", us)))


def gpu_folder(gpu: str) -> str:
    """Name of a GPU's folder of tables: "NVIDIA H200" -> "h200"."""
    words = [word for word in gpu.lower().split() if word != "nvidia"]
    return "-".join(words) or "unknown"


def user_path(gpu: str, op: str = "gemm") -> Path:
    """Where `smkern autotune` writes by default; its cells count before the shipped ones."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("smkern")) / "tables" / gpu_folder(gpu) / f"{op}.json"


def shipped_path(gpu: str, op: str = "gemm") -> Path:
    return _SHIPPED / gpu_folder(gpu) / f"{op}.json"


def load_tables(gpu: str, op: str = "gemm") -> Table:
    """The shipped table of the GPU of that name, with the user's own cells over it; may be empty.

    Raises:
        TableError: one of the files is corrupt, foreign or of another version.
    """
    shipped = TableStore(shipped_path(gpu, op)).load(gpu)
    return shipped.merged(TableStore(user_path(gpu, op)).load(gpu))


@lru_cache(maxsize=8)
def load_constants(gpu: str) -> CostConstants:
    """The cost model's constants as fitted on `gpu`, else the defaults.

    Raises:
        TableError: the file is there and holds no constants.
    """
    path = _SHIPPED / gpu_folder(gpu) / "cost_model.json"
    if not path.exists():
        return DEFAULTS
    try:
        return CostConstants.from_mapping(json.loads(path.read_text(encoding="utf-8"))["constants"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TableError(
            f"{path} holds no constants of the cost model ({error}); delete it, or fit it again: "
            "python -m smkern.autotune.fit RAW --out PATH"
        ) from error
