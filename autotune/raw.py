"""Every measured candidate, a JSON object a line; GEMM's are what the cost model is fitted to."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from smkern.atomic import LOCK_S, make_folder
from smkern.device import Budget
from smkern.errors import TableError
from smkern.measure.options import parse_epilogue
from smkern.strict_json import parse
from smkern.tuning import cells
from smkern.tuning.config import GemmConfig, GemmProblem
from smkern.tuning.table import DEFAULT_CONFIG

_LONGEST_LINE = 1 << 16

P = TypeVar("P")
C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Measurement(Generic[P, C]):
    """One candidate's result in one cell. `us` is NaN where it failed, then `error` says how.

    `op` is the operator's name.
    """

    problem: P
    budget: Budget
    config: C
    us: float
    noise: float
    predicted_us: float
    error: str | None = None
    op: str = "gemm"

    def to_json(self) -> dict[str, Any]:
        """A line's values: what was asked, in which budget, how it ran and how long that took."""
        problem: Any = self.problem
        config: Any = self.config
        row: dict[str, Any] = {"op": self.op}
        confined = {"num_sms": self.budget.num_sms, "confined": self.budget.confined}
        if isinstance(problem, GemmProblem):
            row |= {"m": problem.m, "n": problem.n, "k": problem.k, "dtype": problem.dtype}
            row |= {"epilogue": problem.epilogue.key, **confined, "clusters": self.budget.clusters}
            row["config"] = cells.config_to_json(config, DEFAULT_CONFIG)
        else:
            row |= asdict(problem) | confined
            default = DEFAULT_CONFIG if isinstance(config, GemmConfig) else type(config)()
            row["config"] = cells.config_to_json(config, default)
        row["predicted_us"] = round(self.predicted_us, 3)
        if self.error is not None:
            return row | {"error": self.error}
        return row | {"us": round(self.us, 3), "noise": round(self.noise, 4)}


GemmMeasurement = Measurement[GemmProblem, GemmConfig]


def append(path: Path, measurements: Iterable[Measurement[Any, Any]]) -> None:
    """Add lines to the file. A crash can cut the last line: the next call removes what is left.

    Several processes may add: under a lock, for what is left of a line may be another's beginning.
    """
    from filelock import FileLock

    make_folder(path.parent)
    lines = "".join(json.dumps(item.to_json()) + "\n" for item in measurements)
    with FileLock(f"{path}.lock", timeout=LOCK_S), open(path, "a+b") as file:
        size = file.seek(0, os.SEEK_END)
        tail_at = file.seek(max(0, size - _LONGEST_LINE))
        file.truncate(tail_at + file.read().rfind(b"\n") + 1)
        file.write(lines.encode())
        file.flush()
        os.fsync(file.fileno())


def load(path: Path) -> list[GemmMeasurement]:
    """All measurements of a GEMM's file; a half-written last line is left out.

    Raises:
        TableError: the file cannot be read, or another line is no measurement.
    """
    found = []
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise TableError(
            f"{path} cannot be read ({error}); give a whole file that smkern autotune --raw wrote"
        ) from error
    for number, line in enumerate(lines, 1):
        try:
            row = parse(line)
            epilogue = parse_epilogue(row["epilogue"])
            found.append(
                Measurement(
                    GemmProblem(row["m"], row["n"], row["k"], row["dtype"], epilogue),
                    Budget(row["num_sms"], row["confined"], row["clusters"]),
                    cells.checked(GemmConfig, row["config"]),
                    float(row.get("us", "nan")),
                    float(row.get("noise", "nan")),
                    float(row["predicted_us"]),
                    row.get("error"),
                )
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number == len(lines):
                break
            raise TableError(
                f"{path}, line {number} is no measurement ({error}); delete the line, or tune "
                "again with another --raw"
            ) from error
    return found
