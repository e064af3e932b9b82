"""The largest slowdown of decode beside prefill that was seen, by cells of a coarse grid."""

from __future__ import annotations

from typing import NamedTuple

from smkern.latency.work import Size

LONG = 2048
"""Tokens at which a power of 4 begins; the first cell has all that is shorter, too."""
CELLS = 4
"""Cells of tokens: up to 8K, 32K and 128K, and what is longer."""
GROUP_SMS = 16


class Cell(NamedTuple):
    """A cell of the grid, by its place on each axis.

    Attributes:
        new: New tokens of the prompts, by powers of 4 from 2K.
        cached: Tokens in front of them, by powers of 4 from 2K.
        batch: Decode rows, by powers of 2.
        context: Keys of a row, by powers of 4 from 2K.
        sms: SMs of decode, by 16.
    """

    new: int
    cached: int
    batch: int
    context: int
    sms: int

    @classmethod
    def of(cls, step: Size, num_sms: int, prompts: Size) -> Cell:
        """Of a decode step beside prompts."""
        return cls(
            _level(prompts.new_tokens),
            _level(sum(chunk.cached for chunk in prompts.chunks)),
            (step.batch - 1).bit_length(),
            _level(step.total_kv // step.batch),
            (num_sms + GROUP_SMS // 2) // GROUP_SMS,
        )


class ContentionGuard:
    """The largest slowdown by cell; a cell reckons with its neighbours', too.

    Neighbours are the cells that touch it, or where none of these was measured those in the
    smallest box around it that holds one: a launch lies between measured sizes, not at them. A
    table of what was looked up makes an answer quick; it is emptied when a slowdown grows.

    Example:
        >>> guard = ContentionGuard()
        >>> guard.raise_to(Cell(0, 0, 6, 0, 2), 1.2)
        True
        >>> guard.raise_to(Cell(2, 0, 6, 0, 2), 1.3)
        True
        >>> guard.at(Cell(0, 0, 6, 0, 2)), guard.at(Cell(1, 0, 6, 0, 2))
        (1.2, 1.3)
    """

    __slots__ = ("_found", "_largest")

    def __init__(self) -> None:
        self._largest: dict[Cell, float] = {}
        self._found: dict[Cell, float] = {}

    def __len__(self) -> int:
        """Cells with a slowdown of their own."""
        return len(self._largest)

    def raise_to(self, cell: Cell, slowdown: float) -> bool:
        """Note a slowdown; whether it is the largest of its cell."""
        if slowdown <= self._largest.get(cell, 0.0):
            return False
        self._largest[cell] = slowdown
        self._found.clear()
        return True

    def at(self, cell: Cell) -> float:
        """The slowdown to reckon with in a cell; of no cell at all, 1."""
        found = self._found.get(cell)
        if found is None:
            found = self._found[cell] = self._of_nearest(cell)
        return found

    def _of_nearest(self, cell: Cell) -> float:
        away = [
            (max(1, _distance(cell, other)), -largest) for other, largest in self._largest.items()
        ]
        return -min(away)[1] if away else 1.0


def _level(tokens: int) -> int:
    """0 below 8K, then one more for each power of 4."""
    doublings = (tokens // LONG).bit_length() - 1
    return min(max(doublings // 2, 0), CELLS - 1)


def _distance(cell: Cell, other: Cell) -> int:
    return max(abs(a - b) for a, b in zip(cell, other, strict=True))
