"""Page tables on the device, written from pinned memory without waiting."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from smkern.device import torch_device
from smkern.errors import ArgumentError
from smkern.kv.staging import Staging
from smkern.ops.checks import as_int


class PageTables:
    """Rows of page ids on a device: row r holds the pages of the request that sits there.

    Only what changes is copied, so a decode step costs a few entries, not the tables. Writes are
    collected, and `flush` copies them in the order of the current stream: launches before it read
    the old ids, launches behind it the new ones. Nothing waits for the device.

    Args:
        rows: Requests at most.
        max_pages: Pages of a request at most.
        device: Where the tables are.

    Attributes:
        tensor: [rows, max_pages] int32 on the device; any [:batch] of it is a step's page table.
            Entries that were never written are 0, a page that can be read safely.

    Raises:
        ArgumentError: sizes below 1.

    Example:
        >>> tables = PageTables(2, 4, device="cpu")
        >>> tables.write(1, 0, [7, 3])
        >>> tables.flush()
        >>> tables.tensor.tolist()
        [[0, 0, 0, 0], [7, 3, 0, 0]]
    """

    __slots__ = ("_staging", "_writes", "max_pages", "rows", "tensor")

    def __init__(self, rows: int, max_pages: int, *, device: torch.device | str) -> None:
        self.rows = as_int("rows", rows, 1)
        self.max_pages = as_int("max_pages", max_pages, 1)
        self.tensor = torch.zeros(rows, max_pages, dtype=torch.int32, device=torch_device(device))
        self._staging = Staging(self.tensor.device)
        self._writes: list[tuple[Tensor, Sequence[int]]] = []

    def write(self, row: int, start: int, pages: Sequence[int]) -> None:
        """Put page ids into a row from entry `start` on, at the next flush.

        Raises:
            ArgumentError: entries outside the tables.
        """
        end = start + len(pages)
        if not 0 <= row < self.rows or start < 0 or end > self.max_pages:
            raise ArgumentError(
                f"row {row}, entries {start} to {end}: the tables have {self.rows} rows of "
                f"{self.max_pages}; make them for more requests or longer ones"
            )
        if len(pages):
            self._writes.append((self.tensor[row, start:end], pages))

    def flush(self) -> None:
        """Copy what was written, in the current stream's order."""
        if self._writes:
            writes, self._writes = self._writes, []
            self._staging.send(writes)
