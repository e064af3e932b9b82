"""Every measured candidate, a JSON object a line: what the cost model is fitted to."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from smkern.errors import TableError
from smkern.tuning.config import Budget, GemmConfig, GemmProblem
from smkern.tuning.table import CellKey, config_from_json, config_to_json

_LONGEST_LINE = 1 << 16


@dataclass(frozen=True, slots=True)
class Measurement:
    """One candidate's result in one cell. `us` is NaN where it failed, then `error` says how.

    `contended`: a memory-bound neighbour ran on the complement partition meanwhile.
    """

    problem: GemmProblem
    budget: Budget
    config: GemmConfig
    us: float
    noise: float
    predicted_us: float
    error: str | None = None
    contended: bool = False

    @property
    def key(self) -> CellKey:
        return CellKey.of(self.problem, self.budget)

    def to_json(self) -> dict[str, Any]:
        problem, budget = self.problem, self.budget
        row: dict[str, Any] = {
            "op": "gemm",
            "m": problem.m,
            "n": problem.n,
            "k": problem.k,
            "dtype": problem.dtype,
            "epilogue": problem.epilogue.key,
            "num_sms": budget.num_sms,
            "confined": budget.confined,
            "clusters": budget.clusters,
            "config": config_to_json(self.config),
        }
        return row | result_of(self)


class Result(Protocol):
    """What became of a candidate, of any operator; see `Measurement`."""

    @property
    def us(self) -> float: ...
    @property
    def noise(self) -> float: ...
    @property
    def predicted_us(self) -> float: ...
    @property
    def error(self) -> str | None: ...
    @property
    def contended(self) -> bool: ...


def result_of(item: Result) -> dict[str, Any]:
    """The end of a candidate's line: what was predicted, and its time or how it failed."""
    row: dict[str, Any] = {"predicted_us": round(item.predicted_us, 3)}
    if item.contended:
        row["contended"] = True
    if item.error is not None:
        return row | {"error": item.error}
    return row | {"us": round(item.us, 3), "noise": round(item.noise, 4)}


class Line(Protocol):
    """What a line is made of, of any operator."""

    def to_json(self) -> dict[str, Any]: ...


def append(path: Path, measurements: Iterable[Line]) -> None:
    """Add lines to the file. A crash can cut the last line: the next call removes what is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(item.to_json()) + "\n" for item in measurements)
    with open(path, "a+b") as file:
        size = file.seek(0, os.SEEK_END)
        tail_at = file.seek(max(0, size - _LONGEST_LINE))
        file.truncate(tail_at + file.read().rfind(b"\n") + 1)
        file.write(lines.encode())
        file.flush()
        os.fsync(file.fileno())


def load(path: Path) -> list[Measurement]:
    """All measurements of a file; a half-written last line is left out.

    Raises:
        TableError: another line is no measurement.
    """
    from smkern.autotune.shortlist import parse_epilogue

    found = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            epilogue = parse_epilogue(row["epilogue"])
            found.append(
                Measurement(
                    GemmProblem(row["m"], row["n"], row["k"], row["dtype"], epilogue),
                    Budget(row["num_sms"], row["confined"], row["clusters"]),
                    config_from_json(row["config"]),
                    float(row.get("us", "nan")),
                    float(row.get("noise", "nan")),
                    float(row["predicted_us"]),
                    row.get("error"),
                    bool(row.get("contended", False)),
                )
            )
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                break
            raise TableError(
                f"{path}, line {number} is no measurement ({error}); delete the line, or tune "
                "again with another --raw"
            ) from error
    return found
