"""Updates of the rows of requests: the layout of records, and the kernel's launches."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

HEADER = 8
"""Words of a record before its values: destination row, source row (-1: none), flags, page entries
to take from the source, first entry of its own pages, their number, where they are in the list of
pages, one unused."""
FIELDS = 7
"""Values that are one word a row, in this order: token, length, greatest length, temperature,
top-k, top-p, min-p; behind them the seed's two words and the stop tokens."""
SET_VALUES = 1
"""Flag: the record's values are the row's."""
SET_FINISHED = 2
"""Flag: `FINISHED` is the row's."""
FINISHED = 4


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
    def record(self) -> int:
        """Words of a record."""
        return HEADER + self.values

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
        """The values of a record as words; stop tokens beyond a row's are left out."""
        n = self.stop_tokens
        stop = [*stop_tokens[:n], *[-1] * (n - len(stop_tokens))]
        kinds, numbers = f"<3ififfq{n}i", (token, length, max_length, temperature, top_k)
        packed = struct.pack(kinds, *numbers, top_p, min_p, seed, *stop)
        return struct.unpack(f"<{self.values}i", packed)
