"""The tables that a run fills: what they have, what was measured, written every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smkern.atomic import LOCK_S
from smkern.autotune import raw
from smkern.autotune.family import MeasuredFamily
from smkern.autotune.pipeline import Found, Job
from smkern.errors import TableError
from smkern.tuning.cells import shipped_path

SAVE_EVERY_S = 10.0


@dataclass(slots=True)
class Tables:
    """Tables of families on one GPU.

    Args:
        gpu: The GPU's name.
        path_of: A table's file, by the family's name.
        meta: Provenance of what is measured.
        shipped: Whether cells that smkern ships count as measured.
        raw_path: Gets a line for every candidate; None: a file beside each table.
    """

    gpu: str
    path_of: Callable[[str], Path]
    meta: Mapping[str, Any] = field(default_factory=dict)
    shipped: bool = False
    raw_path: Path | None = None
    _loaded: dict[str, Any] = field(init=False, default_factory=dict)
    _pending: dict[str, tuple[MeasuredFamily, dict[Any, Any]]] = field(
        init=False, default_factory=dict
    )
    _saved_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._saved_s = time.monotonic()

    def of(self, family: MeasuredFamily) -> Any:
        """The family's table as it was at first, which dispatch asks.

        Raises:
            TableError: a file is corrupt, foreign or of another version.
        """
        if family.name not in self._loaded:
            found = family.tuned.file(self.path_of(family.name)).load(self.gpu)
            if self.shipped:
                shipped = family.tuned.file(shipped_path(self.gpu, family.name)).load(self.gpu)
                found = shipped.merged(found)
            self._loaded[family.name] = found
        return self._loaded[family.name]

    def has(self, job: Job) -> bool:
        """Whether the cell was there at first."""
        return job.key in self.of(job.family).cells

    def keep(self, job: Job, found: Found) -> bool:
        """Record a cell's candidates at once, the cell at the next save; False: nothing ran.

        Raises:
            TableError: a file cannot be written.
        """
        family = job.family
        path = self.raw_path or self.path_of(family.name).with_suffix(".raw.jsonl")
        try:
            raw.append(path, found)
        except OSError as error:
            raise _unwritten(path, error) from error
        cell = family.best(found)
        if cell is not None:
            _, cells = self._pending.setdefault(family.name, (family, {}))
            cells[job.key] = cell
        if time.monotonic() - self._saved_s > SAVE_EVERY_S:
            self.save()
        return cell is not None

    def save(self) -> None:
        """Write what is new. One table that cannot be written does not keep the others.

        Raises:
            TableError: a file cannot be written, or is no table of this GPU.
        """
        errors: list[TableError] = []
        for name, (family, cells) in list(self._pending.items()):
            path = self.path_of(name)
            try:
                family.tuned.file(path).merge(cells, self.meta)
                del self._pending[name]
            except TableError as error:
                errors.append(error)
            except OSError as error:
                errors.append(_unwritten(path, error))
        self._saved_s = time.monotonic()
        if errors:
            raise errors[0]


def _unwritten(path: Path, error: OSError) -> TableError:
    from filelock import Timeout

    if isinstance(error, Timeout):
        return TableError(
            f"{path} cannot be written: another process held {path.name}.lock for {LOCK_S:g} s; "
            "end that one, or name another place with --out; what was written before is whole"
        )
    return TableError(
        f"{path} cannot be written ({error.strerror}): make room there, or name another place with "
        "--out; what was written before is whole"
    )
