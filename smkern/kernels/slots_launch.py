"""Updates of the requests' rows on the device: layout of the records, and the launches."""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from smkern.kernels.aot import KernelSet, KernelSource, compile_source
from smkern.kernels.compile import Artifact

PARAMETERS = {
    "words_ptr": "*i32", "finished_ptr": "*u8", "table_ptr": "*i32", "records_ptr": "*i32",
    "records": "i32", "rows": "i32", "max_pages": "i32",
}  # fmt: skip
"""Run-time parameters of the kernel in its order."""
RECORD = 8
"""Words of a record: destination row, source row (-1: none), flags, page entries to copy from the
source, first entry of the new pages, number of new pages, and the offsets of those pages and of the
row's values in the numbers that follow the records."""
FIELDS = 7
"""Values of one word per row, in this order: token, length, maximum length, temperature, top-k,
top-p, min-p; they are followed by the seed's two words and the stop tokens."""
SET_VALUES = 1
"""Flag: write the record's values to the row."""
SET_FINISHED = 2
"""Flag: set the row's finished state from the `FINISHED` bit."""
FINISHED = 4
_WARP = 32
_ENTRIES = 512
"""Page entries that a warp copies at a time: 16 per lane, in loads of 16 bytes."""


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Memory layout of rows and records, in 32-bit words.

    The values of all rows are one array: a column per field, then seeds [rows, 2], then stop tokens
    [rows, stop_tokens].

    Attributes:
        rows: Number of rows; a multiple of 16, so that seeds are aligned.
        max_pages: Entries per row of the page table.
        stop_tokens: Stop tokens per row.
    """

    rows: int
    max_pages: int
    stop_tokens: int

    @property
    def values(self) -> int:
        """Words of a row's values."""
        return FIELDS + 2 + self.stop_tokens

    @property
    def size(self) -> int:
        """Words of all rows' values."""
        return self.rows * self.values

    @property
    def steps(self) -> tuple[tuple[int, int], ...]:
        """(begin, step) of each value: for row r it is word begin + r * step."""
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
        """A row's values as words; excess stop tokens are dropped."""
        n = self.stop_tokens
        stop = [*stop_tokens[:n], *[-1] * (n - len(stop_tokens))]
        kinds, numbers = f"<3ififfq{n}i", (token, length, max_length, temperature, top_k)
        packed = struct.pack(kinds, *numbers, top_p, min_p, seed, *stop)
        return struct.unpack(f"<{self.values}i", packed)


@dataclass(frozen=True, slots=True)
class SlotVariant:
    """One compiled kernel.

    Attributes:
        stop_tokens: Stop tokens per row.
        capability: Compute capability, such as 90.
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
        """The source to compile."""
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
        layout: Layout of rows and records.
        max_ctas: Maximum CTAs of a launch.
        device_index: GPU index of the current device.
        capability: Compute capability, such as 90.
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
        """Apply `count` records.

        Args:
            stream: Raw stream handle.
            words, finished, table, records: Device addresses.
            count: Number of records.
        """
        launch = self._launches[min(bisect_left(self._ctas, count), len(self._ctas) - 1)]
        launch(stream, words, finished, table, records, count, *self._sizes)


def grids(max_ctas: int) -> tuple[int, ...]:
    """The grids prepared in advance: powers of two below `max_ctas`, and `max_ctas`."""
    return (*(1 << i for i in range((max_ctas - 1).bit_length())), max_ctas)
