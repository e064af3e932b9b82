"""Measured times of a model's launches on one GPU: the files, a cell a line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from smkern.device import gpu_folder
from smkern.errors import ArgumentError, TableError
from smkern.latency.gemm_times import GemmTimes
from smkern.latency.sizes import ModelSizes
from smkern.latency.work import Chunk, Kind, Size
from smkern.tuning.cells import CellFile, Cells, checked, time_us

SHIPPED = Path(__file__).parent / "tables"
REMEDY = "pass a table that smkern bench latency-table made, or make it again of a profile"


@dataclass(frozen=True, slots=True, order=True)
class Timing:
    """What was timed: equal prompts, equal decode rows, or both, alone or beside other work.

    Attributes:
        kind: A decode step, prompts, or both in one forward.
        num_sms: SMs that it ran on.
        batch: Decode rows.
        context: Keys of each.
        prompts: Prompts.
        tokens: New tokens of each.
        cached: Tokens in front of them.
        layers: Layers of the prompts that ran, without the head; 0: all, and the head.
        beside_sms: SMs of the other side, kept busy meanwhile; 0: nothing ran beside it.
        beside_batch: Decode rows of the other side, where that decodes.
        beside_context: Keys of each of them, where it was written down.
        beside_tokens: New tokens of the other side's prompt, where it was written down.
        beside_cached: Tokens in front of them.
    """

    kind: Kind
    num_sms: int
    batch: int = 0
    context: int = 0
    prompts: int = 0
    tokens: int = 0
    cached: int = 0
    layers: int = 0
    beside_sms: int = 0
    beside_batch: int = 0
    beside_context: int = 0
    beside_tokens: int = 0
    beside_cached: int = 0

    def __post_init__(self) -> None:
        rows, prompts = (self.batch, self.context), (self.prompts, self.tokens)
        for has, counts in ((self.kind != "prefill", rows), (self.kind != "decode", prompts)):
            if not all(count > 0 if has else count == 0 for count in counts):
                raise ValueError(
                    f"a {self.kind} of {rows} rows and keys, {prompts} prompts, tokens"
                )
        others = self.beside_batch, self.beside_context, self.beside_tokens, self.beside_cached
        if self.num_sms < 1 or min(self.cached, self.layers, self.beside_sms, *others) < 0:
            raise ValueError("counts are 0 or more, num_sms is 1 or more")

    def size(self, num_layers: int) -> Size:
        """As a launch of a model of so many layers."""
        chunks = (Chunk(self.tokens, self.cached),) * self.prompts
        kv = self.batch * self.context
        head = bool(chunks) and not self.layers
        return Size(chunks, self.layers or num_layers, num_layers, head, self.batch, kv)


class TimingLines:
    """A timing as a line of a file: what is not 0, and the median, us."""

    def encode(self, key: Timing, value: float) -> dict[str, Any]:
        return {name: x for name, x in asdict(key).items() if x} | {"us": round(value, 2)}

    def decode(self, row: Mapping[str, Any]) -> tuple[Timing, float]:
        """KeyError, TypeError or ValueError when the row is no cell."""
        key = dict(row)
        us = time_us(key.pop("us"))
        return checked(Timing, key), us


def latency_file(path: Path) -> CellFile[Timing, float]:
    """A file of timings; its `meta` has the model's name and sizes beside the provenance."""
    return CellFile(path, TimingLines(), remedy=REMEDY)


def shipped_path(model: str, gpu: str) -> Path:
    """Where the package keeps a model's timings on a GPU, by the GPU's name or folder."""
    return SHIPPED / gpu_folder(gpu) / f"{model.lower()}.json"


def shipped(gpu: str) -> list[str]:
    """Models with timings on a GPU."""
    return sorted(path.stem for path in (SHIPPED / gpu_folder(gpu)).glob("*.json"))


def find_shipped(model: str, gpu: str) -> Path:
    """The file of a model's timings on a GPU that the package has.

    Raises:
        ArgumentError: a name that is none.
        TableError: the package has no timings of that model there.
    """
    for name, value in (("model", model), ("gpu", gpu)):
        if not isinstance(value, str):
            raise ArgumentError(f"{name}={value!r}: pass a name")
    path = shipped_path(model, gpu)
    if not path.exists():
        raise TableError(
            f"no timings of {model!r} on {gpu!r}; there are {shipped(gpu)}. Measure with "
            "smkern profile --model and give its file to read_model, or have them told from the "
            "nearest: smkern.predictor_for(model)"
        )
    return path


def read_timings(path: Path) -> tuple[Cells[Timing, float], ModelSizes]:
    """A file's timings and its model's sizes.

    Raises:
        TableError: no such file, no valid table, or no sizes in it.
    """
    cells = latency_file(path).load()
    if not cells.cells:
        raise TableError(f"{path} is not there or has no cell; {REMEDY}")
    try:
        return cells, ModelSizes.from_json(cells.meta["sizes"])
    except (KeyError, TypeError, ValueError) as error:
        raise TableError(f"{path} lacks the sizes of its model ({error!r}); {REMEDY}") from error


def gemms_in(path: Path, cells: Cells[Timing, float]) -> GemmTimes | None:
    """The times of the model's GEMMs in a table's provenance; None where it has none.

    Raises:
        TableError: what it has is none.
    """
    if "gemms" not in cells.meta:
        return None
    try:
        return GemmTimes.from_json(cells.meta["gemms"])
    except (KeyError, TypeError, ValueError) as error:
        raise TableError(f"{path} has broken times of GEMMs ({error!r}); {REMEDY}") from error
