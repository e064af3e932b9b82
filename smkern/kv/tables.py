"""Page tables on the device, written from pinned memory without waiting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from smkern.errors import ArgumentError
from smkern.ops.attention.numbers import as_int

# A flush waits for the copy of this many flushes ago, which is over unless the GPU is far behind.
RING = 4


@dataclass(slots=True)
class _Stage:
    """Pinned memory that a copy may still be reading, and the event behind that copy."""

    memory: Tensor
    copied: torch.cuda.Event | None = None


class PageTables:
    """Rows of page ids on a device: row r holds the pages of the request that sits there.

    Only what changes is copied, so a decode step costs a few entries, not the tables. Writes are
    collected, and `flush` copies them in the order of the current stream: launches before it read
    the old ids, launches behind it the new ones. Nothing waits for the device, and nothing is
    launched but copies, so no SM is used.

    Args:
        rows: Requests at most.
        max_pages: Pages of a request at most.
        device: Of the tables.

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

    __slots__ = ("_next", "_ring", "_writes", "max_pages", "rows", "tensor")

    def __init__(self, rows: int, max_pages: int, *, device: torch.device | str) -> None:
        self.rows = as_int("rows", rows, 1)
        self.max_pages = as_int("max_pages", max_pages, 1)
        self.tensor = torch.zeros(rows, max_pages, dtype=torch.int32, device=device)
        self._writes: list[tuple[int, int, Sequence[int]]] = []
        self._ring: list[_Stage] = []
        self._next = 0

    def write(self, row: int, start: int, pages: Sequence[int]) -> None:
        """Put page ids into a row from entry `start` on, at the next flush.

        Raises:
            ArgumentError: entries outside the tables.
        """
        if not 0 <= row < self.rows or start < 0 or start + len(pages) > self.max_pages:
            raise ArgumentError(
                f"row {row}, entries {start} to {start + len(pages)}: the tables have {self.rows} "
                f"rows of {self.max_pages}; make them for more requests or longer ones"
            )
        if len(pages):
            self._writes.append((row, start, pages))

    def flush(self) -> None:
        """Copy what was written, in the current stream's order."""
        writes, self._writes = self._writes, []
        if not writes:
            return
        ids = torch.tensor([page for _, _, pages in writes for page in pages], dtype=torch.int32)
        if self.tensor.is_cuda:
            self._copy_pinned(writes, ids)
        else:
            self._copy(writes, ids)

    def _copy(self, writes: list[tuple[int, int, Sequence[int]]], ids: Tensor) -> None:
        begin = 0
        for row, start, pages in writes:
            end = begin + len(pages)
            entries = self.tensor[row, start : start + len(pages)]
            entries.copy_(ids[begin:end], non_blocking=True)
            begin = end

    def _copy_pinned(self, writes: list[tuple[int, int, Sequence[int]]], ids: Tensor) -> None:
        stage = self._stage(ids.numel())
        staged = stage.memory[: ids.numel()]
        staged.copy_(ids)
        self._copy(writes, staged)
        stage.copied = torch.cuda.Event()
        stage.copied.record(torch.cuda.current_stream(self.tensor.device))

    def _stage(self, size: int) -> _Stage:
        """Pinned memory for `size` ids that no copy reads any more."""
        if len(self._ring) < RING:
            self._ring.append(_Stage(_pinned(size)))
            return self._ring[-1]
        stage = self._ring[self._next]
        self._next = (self._next + 1) % RING
        if stage.copied is not None:
            stage.copied.synchronize()
        if stage.memory.numel() < size:
            stage.memory = _pinned(size)
        return stage


def _pinned(size: int) -> Tensor:
    # A power of two, so that growing ends; at least what a few decode steps need.
    entries = max(1024, 1 << (size - 1).bit_length())
    return torch.empty(entries, dtype=torch.int32, pin_memory=True)
