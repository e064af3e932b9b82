"""The file of a model's profile: measured launches, one a line, added as they are measured."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from smkern.atomic import read_whole, write_whole
from smkern.errors import SmkernError, TableError
from smkern.latency.gemm_times import GemmTimes
from smkern.latency.sample import Sample
from smkern.latency.sizes import ModelSizes
from smkern.latency.work import Chunk, Size
from smkern.limits import as_int, as_path
from smkern.profile import DEFAULT
from smkern.strict_json import parse
from smkern.tuning.cells import checked, time_us

FORMAT = "smkern-profile"
VERSION = 1
PAUSED = 1.5
"""The slowest turn over the median: below 1.08 for 99 launches of a hundred that run alone."""
REMEDY = "pass what smkern profile measured, or measure again with it"


@dataclass(frozen=True, slots=True)
class Measured:
    """A line: a sample and what was noted beside it.

    Attributes:
        cell: Name of the cell of the plan; a cell of two lanes has a line for each.
        sample: What was timed.
        held_out: Predictors are judged by it and never fitted to it.
        about: `worst_us` and `turns` of the time, `mhz` of the SMs' clock meanwhile.
    """

    cell: str
    sample: Sample
    held_out: bool = False
    about: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_paused(self) -> bool:
        """Whether a launch alone took much longer in one turn than in another: the host's pauses,
        which may be in its median, too."""
        return self.sample.alone and self.about.get("worst_us", 0.0) > PAUSED * self.sample.us

    def to_json(self) -> dict[str, Any]:
        sample = self.sample
        row: dict[str, Any] = {"cell": self.cell, "num_sms": sample.num_sms}
        row["us"] = round(sample.us, 2)
        row["size"] = size_to_json(sample.size)
        if sample.beside is not None:
            row["beside"] = size_to_json(sample.beside)
        if sample.beside_sms:
            row["beside_sms"] = sample.beside_sms
        if self.held_out:
            row["held_out"] = True
        return row | {name: round(value, 2) for name, value in self.about.items()}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Measured:
        """KeyError, TypeError, ValueError or SmkernError where the row is none."""
        rest = dict(row)
        beside = rest.pop("beside", None)
        sample = Sample(
            size_from_json(rest.pop("size")),
            as_int("num_sms", rest.pop("num_sms"), 1),
            time_us(rest.pop("us")),
            None if beside is None else size_from_json(beside),
            as_int("beside_sms", rest.pop("beside_sms", 0), 0),
        )
        cell, held_out = str(rest.pop("cell")), bool(rest.pop("held_out", False))
        return cls(cell, sample, held_out, {name: float(x) for name, x in rest.items()})


def size_to_json(size: Size) -> dict[str, Any]:
    """A launch as a line has it: what is not 0; a chunk as [new, cached]."""
    row: dict[str, Any] = {"num_layers": size.num_layers}
    if size.chunks:
        row["chunks"] = [list(chunk) for chunk in size.chunks]
        row["layers"] = size.layers
        row["head"] = size.head
    if size.batch:
        row |= {"batch": size.batch, "total_kv": size.total_kv}
    return row


def size_from_json(row: Mapping[str, Any]) -> Size:
    """The launch of a line; TypeError or ValueError where it is none."""
    rest = dict(row)
    chunks = tuple(
        checked(Chunk, {"new": new, "cached": cached}) for new, cached in rest.pop("chunks", ())
    )
    return replace(checked(Size, rest), chunks=chunks)


def _head(meta: Mapping[str, Any]) -> str:
    """The line of provenance."""
    return json.dumps({"format": FORMAT, "version": VERSION, "meta": dict(meta)}) + "\n"


class ProfileFile:
    """A profile on disk: a line of provenance, then one a measured launch.

    A line is written at once and synced, so what was measured outlives a process that is killed; a
    last line that is cut short is dropped when it is read again.

    Args:
        path: The file.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = as_path("path", path)

    def load(self) -> tuple[dict[str, Any], list[Measured]]:
        """Provenance and lines; both empty where there is no file.

        Raises:
            TableError: no profile, one of another version, or a broken line, by its number.
        """
        try:
            text = read_whole(self.path).decode()
        except FileNotFoundError:
            return {}, []
        except (OSError, UnicodeDecodeError) as error:
            raise self._error(f"cannot be read ({error})") from error
        *lines, last = text.split("\n")  # nothing, or what is left of a line that was being written
        if not lines and last:
            raise self._error(f"does not begin with its provenance: {last:.120}")
        if not lines:
            return {}, []
        meta = self._meta(lines[0])
        found = []
        for number, line in enumerate(lines[1:], 2):
            try:
                found.append(Measured.from_json(parse(line)))
            except (KeyError, TypeError, ValueError, SmkernError) as error:
                raise self._error(f"line {number} is no launch ({error!r}): {line:.120}") from error
        return meta, found

    def begin(self, meta: Mapping[str, Any]) -> None:
        """Begin the file anew with its provenance."""
        write_whole(self.path, _head(meta))

    def renew(self, meta: Mapping[str, Any]) -> None:
        """Change some of its provenance; what was measured stays as it is.

        Raises:
            TableError: no profile.
        """
        head, _, lines = read_whole(self.path).decode().partition("\n")
        write_whole(self.path, _head(self._meta(head) | dict(meta)) + lines)

    def resume(self, meta: Mapping[str, Any]) -> list[Measured]:
        """What is there, of the same GPU, model and kernels; a line that was cut short is removed,
        and with it the one before of the same cell.

        Raises:
            TableError: no profile, or one of another GPU, model or kernels.
        """
        known, found = self.load()
        if not known:
            self.begin(meta)
            return []
        for name in ("gpu", "model", "kernels"):
            if known.get(name) != meta[name]:
                raise self._error(
                    f"was measured with {name}={known.get(name)!r}, not {meta[name]!r}"
                )
        text = self.path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        if _lacks_a_lane(found):
            whole = whole[: whole.rfind("\n", 0, -1) + 1]
            found.pop()
        if whole != text:
            write_whole(self.path, whole)
        return found

    def add(self, lines: list[Measured]) -> None:
        """Add lines, all at once."""
        text = "".join(json.dumps(line.to_json()) + "\n" for line in lines)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def _meta(self, line: str) -> dict[str, Any]:
        try:
            head = parse(line)
        except ValueError as error:
            raise self._error(f"does not begin with its provenance ({error})") from error
        if not isinstance(head, dict) or head.get("format") != FORMAT:
            raise self._error(f"is not a profile of smkern: its format is not {FORMAT!r}")
        if head.get("version") != VERSION:
            raise self._error(f"has version {head.get('version')!r}; this smkern reads {VERSION}")
        meta = head.get("meta")
        if not isinstance(meta, dict):
            raise self._error("lacks its provenance")
        return meta

    def _error(self, what: str) -> TableError:
        return TableError(f"{self.path} {what}; {REMEDY}")


def _lacks_a_lane(lines: Sequence[Measured]) -> bool:
    """Whether the last cell is a pair of which only the first lane's line was written."""
    if not lines or lines[-1].sample.beside is None:
        return False
    return len(lines) < 2 or lines[-2].cell != lines[-1].cell


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """A profile as predictors and tables are made of it.

    Attributes:
        meta: Its provenance.
        lines: What was measured.
        sizes: Of its model.
        gemms: Times of the model's GEMMs by the tuned tables that the profile ran with; None: of a
            model whose GEMMs are not told apart (experts, e4m3).
    """

    meta: Mapping[str, Any]
    lines: list[Measured]
    sizes: ModelSizes
    gemms: GemmTimes | None

    @property
    def gpu(self) -> str:
        return str(self.meta.get("gpu", DEFAULT))

    @property
    def fitted(self) -> list[Sample]:
        """What predictors are fitted to: launches alone only where the host was not in the way."""
        return [line.sample for line in self.lines if not (line.held_out or line.is_paused)]

    @property
    def held_out(self) -> list[Sample]:
        """What they are judged by."""
        return [line.sample for line in self.lines if line.held_out]


def read_profile(path: Path | str) -> ModelProfile:
    """A profile on disk.

    Raises:
        TableError: no such file, no valid profile, no launch in it, no sizes, or no times of GEMMs.
    """
    meta, lines = ProfileFile(path).load()
    if not lines:
        raise TableError(f"{path} is not there or holds no launch; {REMEDY}")
    try:
        sizes = ModelSizes.from_json(meta["sizes"])
    except (KeyError, TypeError, ValueError) as error:
        raise TableError(f"{path} lacks the sizes of its model ({error!r}); {REMEDY}") from error
    try:
        gemms = None if meta["gemms"] is None else GemmTimes.from_json(meta["gemms"])
    except (KeyError, TypeError, ValueError) as error:
        raise TableError(f"{path} lacks the times of GEMMs ({error!r}); {REMEDY}") from error
    return ModelProfile(meta, lines, sizes, gemms)
