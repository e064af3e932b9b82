"""Markdown tables of the README."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

NOT_MEASURED = "*Not measured yet.*"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the first column to the left, the others to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
