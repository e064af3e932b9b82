"""Files of tuned cells: JSON, one cell per line, sorted, with their provenance.

`CellFile` replaces a file atomically under a file lock. A `Codec` defines what a line holds;
`FlatCodec` serves keys and configurations that are flat dataclasses.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar, get_args, get_origin, get_type_hints

from smkern.atomic import LOCK_S, make_folder, read_whole, write_whole
from smkern.device import gpu_folder
from smkern.errors import TableError
from smkern.limits import MAX_SIZE
from smkern.strict_json import parse

FORMAT = "smkern-table"
VERSION = 1
PROVENANCE = ("gpu", "driver", "torch", "triton", "smkern_commit", "date", "command")
SHIPPED = Path(__file__).parent / "tables"
MIN_US, MAX_US = 1e-3, 1e10
"""Shorter and longer than any launch: a nanosecond, hours."""
_REMEDY = "delete it or tune again: smkern autotune --out {path}"

K = TypeVar("K")
V = TypeVar("V")
C = TypeVar("C")


class Codec(Protocol[K, V]):
    """Converts a cell to the values of a line and back."""

    def encode(self, key: K, value: V) -> dict[str, Any]: ...

    def decode(self, row: Mapping[str, Any]) -> tuple[K, V]:
        """Raises KeyError, TypeError or ValueError if the row is not a cell."""
        ...


@dataclass(slots=True)
class Cells(Generic[K, V]):
    """Tuned cells in memory, and their provenance."""

    meta: dict[str, Any] = field(default_factory=dict)
    cells: dict[K, V] = field(default_factory=dict)

    def merged(self, other: Cells[K, V]) -> Cells[K, V]:
        """Cells and provenance of both tables; `other` wins where both have a cell."""
        return Cells({**self.meta, **other.meta}, {**self.cells, **other.cells})


class CellFile(Generic[K, V]):
    """One file of cells. Several processes may write: each merges its cells under a lock."""

    def __init__(self, path: Path | str, codec: Codec[K, V], *, remedy: str = _REMEDY) -> None:
        self.path = Path(path)
        self.codec = codec
        self.remedy = remedy

    def load(
        self, gpu: str | None = None, broken: Callable[[K, V], str] | None = None
    ) -> Cells[K, V]:
        """The file's cells, or none when there is no file.

        Args:
            gpu: Name of the GPU that they are for. None: any.
            broken: Says which constraint a cell breaks, "" where none. None: nobody launches them.

        Raises:
            TableError: the file is not a valid table, has another version, belongs to another GPU,
                or has a cell that cannot run.
        """
        try:
            text = read_whole(self.path).decode()
        except FileNotFoundError:
            return Cells()
        except (OSError, UnicodeDecodeError) as error:
            raise self._error(f"cannot be read ({error})") from error
        return self._parse(text, gpu, broken)

    def merge(self, cells: Mapping[K, V], meta: Mapping[str, Any]) -> Cells[K, V]:
        """Add `cells`, replacing those with the same key, and rewrite the file atomically.

        Raises:
            TableError: the existing file is not a valid table, or its GPU is not `meta`'s.
        """
        from filelock import FileLock

        missing = [name for name in PROVENANCE if name not in meta]
        if missing:
            raise self._error(f"cannot be written without its provenance: {missing} missing")
        make_folder(self.path.parent)
        with FileLock(str(self.path) + ".lock", timeout=LOCK_S):
            table = self.load(meta["gpu"]).merged(Cells(dict(meta), dict(cells)))
            for left in self.path.parent.glob(f".{self.path.name}.*.part"):
                left.unlink(missing_ok=True)  # we hold the lock: left by a writer that died
            write_whole(self.path, self.dump(table))
        return table

    def dump(self, table: Cells[K, V]) -> str:
        """The table as text: sorted, one cell per line, so that a diff shows the changed cells.

        Words that are the same in all lines, such as the dtype, are told once in front of them.
        """
        keys = sorted(table.cells)  # type: ignore[type-var]
        rows = [self.codec.encode(key, table.cells[key]) for key in keys]
        shared = _words(rows)
        dense = (",", ":")  # thousands of lines in every wheel
        lines = [
            json.dumps({k: x for k, x in row.items() if k not in shared}, separators=dense)
            for row in rows
        ]
        head = {"format": FORMAT, "version": VERSION, "meta": table.meta}
        if shared:
            head["shared"] = shared
        return json.dumps(head)[:-1] + ', "cells": [\n' + ",\n".join(lines) + "\n]}\n"

    def _parse(
        self, text: str, gpu: str | None, broken: Callable[[K, V], str] | None
    ) -> Cells[K, V]:
        try:
            data = parse(text)
        except ValueError as error:
            raise self._error(f"is not valid JSON, perhaps half-written ({error})") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise self._error(f"is not a table of smkern: its format is not {FORMAT!r}")
        if data.get("version") != VERSION:
            raise self._error(f"has version {data.get('version')!r}; this smkern reads {VERSION}")
        meta, rows, shared = data.get("meta"), data.get("cells"), data.get("shared", {})
        if not isinstance(meta, dict) or not isinstance(rows, list) or not isinstance(shared, dict):
            raise self._error("lacks its provenance or its cells, or what they share is no object")
        if gpu is not None and meta.get("gpu") != gpu:
            raise self._error(f"was tuned on {meta.get('gpu')!r}, and this is {gpu!r}")
        cells: dict[K, V] = {}
        for row in rows:
            try:
                key, cell = self.codec.decode(shared | row)
                if broken is not None and (constraint := broken(key, cell)):
                    raise ValueError(f"it breaks {constraint}")
            except (KeyError, TypeError, ValueError, ArithmeticError) as error:
                raise self._error(f"has an invalid cell ({error}): {row!r:.1000}") from error
            cells[key] = cell
        return Cells(meta, cells)

    def _error(self, what: str) -> TableError:
        return TableError(f"{self.path} {what}; {self.remedy.format(path=self.path)}")


def _words(rows: list[dict[str, Any]]) -> dict[str, str]:
    """The words that all of several lines have."""
    if len(rows) < 2:
        return {}
    return {
        name: word
        for name, word in rows[0].items()
        if isinstance(word, str) and all(row.get(name) == word for row in rows)
    }


@dataclass(frozen=True, slots=True)
class Tuned(Generic[C]):
    """The fastest configuration of a cell and its median time, us."""

    config: C
    us: float


@dataclass(frozen=True, slots=True)
class FlatCodec(Generic[K, C]):
    """Codec of a flat key and a flat configuration, both ordered dataclasses.

    Args:
        key: class of the key; its fields are a line's first values.
        default: default configuration; a line holds the first field and those that differ from it.
    """

    key: type[K]
    default: C

    def encode(self, key: K, value: Tuned[C]) -> dict[str, Any]:
        config = config_to_json(value.config, self.default)
        return {**flat(key), "us": round(value.us, 3), "config": config}

    def decode(self, row: Mapping[str, Any]) -> tuple[K, Tuned[C]]:
        us = time_us(row["us"])
        key = key_of(self.key, row)
        kind, given = type(self.default), row["config"]
        check(kind, given)
        return key, Tuned(kind(**{**_flat(self.default), **given}), us)


def flat(value: Any) -> dict[str, Any]:
    """Fields of a flat dataclass, a seventh of the time of `asdict`, which copies deeply."""
    return {name: getattr(value, name) for name in _allowed(type(value))}


_flat: Callable[[Any], dict[str, Any]] = cache(flat)
"""Of a default, which all lines of a file share."""


def config_to_json(config: Any, default: Any) -> dict[str, Any]:
    """The configuration's first field, and those that differ from the default's."""
    first = next(iter(_allowed(type(config))))
    return {
        name: value
        for name, value in flat(config).items()
        if value != getattr(default, name) or name == first
    }


def key_of(kind: type[K], row: Mapping[str, Any]) -> K:
    """The key of a line, which has all its fields."""
    return checked(kind, {name: row[name] for name in _allowed(kind)})


def checked(kind: type[K], values: Mapping[str, Any]) -> K:
    """The flat dataclass of these values; TypeError or ValueError for a value of another type.

    Whole numbers are counts: 0 to 2**31 - 1.
    """
    check(kind, values)
    return kind(**values)


def check(kind: type[Any], values: Mapping[str, Any]) -> None:
    """As `checked`, for values of which some may be missing; makes nothing."""
    allowed = _allowed(kind)
    for name, value in dict(values).items():  # TypeError unless the line has an object here
        wanted = allowed.get(name)
        if type(value) is wanted:
            if wanted is int and not 0 <= value <= MAX_SIZE:
                raise ValueError(f"{name} is {value}, of 0 to {MAX_SIZE}")
        elif type(wanted) is not tuple or value not in wanted:
            raise ValueError(f"{name} is {value!r}")


def time_us(value: Any) -> float:
    """A measured time of a line, microseconds; TypeError or ValueError for anything else."""
    us = float(value)
    if not MIN_US <= us <= MAX_US:
        raise ValueError(f"us is {us}, of at least {MIN_US:g} and at most {MAX_US:g}")
    return us


def _allowed_of(kind: Any) -> dict[str, Any]:
    """The type, or the values, that each field of a flat dataclass or named tuple may have."""
    hints = get_type_hints(kind)
    names = [item.name for item in fields(kind)] if is_dataclass(kind) else [*hints]
    return {n: get_args(t) if get_origin(t := hints[n]) is Literal else t for n in names}


_allowed: Callable[[Any], dict[str, Any]] = cache(_allowed_of)
"""Resolving a class's annotations takes longer than checking a line by them."""


def user_path(gpu: str, op: str = "gemm") -> Path:
    """Where `smkern autotune` writes by default; its cells override the shipped ones."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("smkern")) / "tables" / gpu_folder(gpu) / f"{op}.json"


def shipped_path(gpu: str, op: str = "gemm") -> Path:
    return SHIPPED / gpu_folder(gpu) / f"{op}.json"
