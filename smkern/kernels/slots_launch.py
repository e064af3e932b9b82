"""Updates of the rows of requests: the layout of records, and the kernel's launches."""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from smkern.kernels.aot import KernelSet, KernelSource, compile_source
from smkern.kernels.compile import Artifact

if TYPE_CHECKING:
    from torch import Tensor

PARAMETERS = {
    "words_ptr": "*i32", "finished_ptr": "*u8", "table_ptr": "*i32", "records_ptr": "*i32",
    "records": "i32", "rows": "i32", "max_pages": "i32",
}  # fmt: skip
"""Run-time parameters of the kernel in its order."""
RECORD = 8
"""Words of a record: destination row, source row (-1: none), flags, page entries to take from the
source, first entry of the row's new pages, their number, where they are in the numbers behind the
records, where its values are there."""
FIELDS = 7
"""Values that are one word a row, in this order: token, length, greatest length, temperature,
top-k, top-p, min-p; behind them the seed's two words and the stop tokens."""
SET_VALUES = 1
"""Flag: the record's values are the row's."""
SET_FINISHED = 2
"""Flag: `FINISHED` is the row's."""
FINISHED = 4
_WARP = 32
_ENTRIES = 512
"""Page entries that a warp moves at a time: 16 to a lane, loads of 16 bytes."""


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """How rows and records lie in memory, in words of 32 bits.

    The values of `rows` rows are one array: a column a field, then [rows, 2] of seeds, then
    [rows, stop_tokens].

    Attributes:
        rows: Rows; a multiple of 16, so that seeds are aligned.
        max_pages: Entries of a row of the page table.
        stop_tokens: Of a row.
    """

    rows: int
    max_pages: int
    stop_tokens: int

    @property
    def values(self) -> int:
        """Values of a row."""
        return FIELDS + 2 + self.stop_tokens

    @property
    def size(self) -> int:
        """Words of all rows' values."""
        return self.rows * self.values

    @property
    def steps(self) -> tuple[tuple[int, int], ...]:
        """(begin, step) by value: that of row r is word begin + r * step."""
        fields = [(i * self.rows, 1) for i in range(FIELDS)]
        seeds = [(FIELDS * self.rows + i, 2) for i in range(2)]
        stop = (FIELDS + 2) * self.rows
        return (*fields, *seeds, *((stop + i, self.stop_tokens) for i in range(self.stop_tokens)))

    def pack(
        self,
        token: int,
        length: int,
        max_length: int,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float,
        seed: int,
        stop_tokens: Sequence[int],
    ) -> tuple[int, ...]:
        """The values of a row as words; stop tokens beyond a row's are left out."""
        n = self.stop_tokens
        stop = [*stop_tokens[:n], *[-1] * (n - len(stop_tokens))]
        kinds, numbers = f"<3ififfq{n}i", (token, length, max_length, temperature, top_k)
        packed = struct.pack(kinds, *numbers, top_p, min_p, seed, *stop)
        return struct.unpack(f"<{self.values}i", packed)


@dataclass(frozen=True, slots=True)
class SlotVariant:
    """One compiled kernel.

    Attributes:
        stop_tokens: Of a row.
        capability: 90 and the like.
    """

    stop_tokens: int
    capability: int

    @property
    def constants(self) -> dict[str, Any]:
        """The kernel's compile-time parameters."""
        values = FIELDS + 2 + self.stop_tokens
        lanes = max(_WARP, 1 << (values - 1).bit_length())
        return {"STOP": self.stop_tokens, "LANES": lanes, "BLOCK": _ENTRIES}

    def source(self) -> KernelSource:
        """What compiles it."""
        from smkern.kernels import slots_triton

        return KernelSource(
            fn=slots_triton.update_slots,
            signature=PARAMETERS,
            constants=self.constants,
            aligned=("words_ptr", "finished_ptr", "table_ptr", "rows"),
            num_warps=1,
            capability=self.capability,
        )

    def compile(self) -> Artifact:
        """Compile it (or take it from Triton's cache). Needs no GPU."""
        return compile_source(self.source())


@cache
def slot_kernels(device_index: int) -> KernelSet:
    """The kernels of a device, for all tables of rows there."""
    return KernelSet()


class SlotKernel:
    """The kernel of one layout on the current device, compiled and loaded.

    Args:
        layout: Of rows and records.
        max_ctas: CTAs of a launch.
        device_index: Of the current device.
        capability: 90 and the like.
    """

    def __init__(
        self, layout: SlotLayout, max_ctas: int, device_index: int, capability: int
    ) -> None:
        variant = SlotVariant(layout.stop_tokens, capability)
        kernel = slot_kernels(device_index).load(variant, variant.compile)
        self._ctas = grids(max_ctas)
        self._launches = tuple(kernel.bind("4Q3q", ctas) for ctas in self._ctas)
        self._sizes = layout.rows, layout.max_pages

    def launch(
        self, stream: int, words: int, finished: int, table: int, records: int, count: int
    ) -> None:
        """Make `count` records' changes.

        Args:
            stream: Raw.
            words, finished, table, records: Addresses.
            count: Records.
        """
        launch = self._launches[min(bisect_left(self._ctas, count), len(self._ctas) - 1)]
        launch(stream, words, finished, table, records, count, *self._sizes)


def grids(max_ctas: int) -> tuple[int, ...]:
    """The grids that are made ready: powers of two below `max_ctas`, and that."""
    return (*(1 << i for i in range((max_ctas - 1).bit_length())), max_ctas)


def launch_interpreted(
    layout: SlotLayout, ctas: int, words: Tensor, finished: Tensor, table: Tensor, records: Tensor,
    count: int,
) -> None:  # fmt: skip
    """The launch in Triton's interpreter, on CPU tensors; needs TRITON_INTERPRET=1.

    Args:
        layout: Of rows and records.
        ctas: The grid.
        words: [layout.size] int32.
        finished: [rows] uint8.
        table: [rows, max_pages] int32.
        records: int32: `count` records, then the numbers that they name.
        count: Records.
    """
    from smkern.kernels import slots_triton

    constants = SlotVariant(layout.stop_tokens, 80).constants
    sizes = layout.rows, layout.max_pages
    slots_triton.update_slots[(ctas,)](words, finished, table, records, count, *sizes, **constants)
