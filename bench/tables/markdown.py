"""Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NOT_MEASURED = "*Not measured yet.*"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the first column to the left, the others to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def rows_or_none(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The same, where there is a row."""
    return markdown_table(head, rows) if rows else NOT_MEASURED


def pivot(corner: str, entries: Iterable[tuple[str, int, str]]) -> str:
    """A table of (row, column, text): rows in the order they first come, columns ascending.

    Of several texts of one row and column the last counts.
    """
    found: dict[str, dict[int, str]] = {}
    for row, column, text in entries:
        found.setdefault(row, {})[column] = text
    columns = sorted({column for texts in found.values() for column in texts})
    rows = [[row, *(texts.get(column, "") for column in columns)] for row, texts in found.items()]
    return rows_or_none([corner, *map(str, columns)], rows)
