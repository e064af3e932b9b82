"""Traces from files: Azure's CSV and Mooncake's JSON lines."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from io import StringIO
from pathlib import Path
from typing import Any

from smkern.atomic import read_whole
from smkern.errors import TraceError
from smkern.limits import as_path, shown
from smkern.replay.generate import GENERATORS, generated
from smkern.replay.trace import Arrival, Trace
from smkern.strict_json import parse

AZURE_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MOONCAKE_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
MOONCAKE_BLOCK = 512
TIME = re.compile(r"(.*?)(?:\.([0-9]*))?(Z|[+-][0-9]{2}:?[0-9]{2})?", re.DOTALL)
"""Date and time, a fraction's digits, and the zone that Azure's traces have since 2024."""
DEFAULT_REQUESTS = 4000
"""Requests of a generated trace where nobody says how many."""


def load_trace(source: Path | str, *, requests: int = DEFAULT_REQUESTS, seed: int = 0) -> Trace:
    """A trace from a file, or a generated one by its name.

    Args:
        source: A path that ends in .csv (Azure's fields TIMESTAMP, ContextTokens, GeneratedTokens)
            or .jsonl (Mooncake's timestamp in ms, input_length, output_length, hash_ids of blocks
            of 512 tokens); or a name of `smkern.replay.GENERATORS`, several joined by "+".
        requests, seed: Of a generated trace.

    Raises:
        TraceError: no such file or name, or a row that is malformed or earlier than the one before
            it; with the row and the field.

    Example:
        >>> trace = load_trace("conversation-like", requests=100)
        >>> len(trace), trace.requests[0].at_s
        (100, 0.0)
    """
    path = as_path("source", source)
    if path.suffix not in (".csv", ".jsonl"):
        return generated(str(source), requests, seed)
    try:
        text = read_whole(path).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(
            f"{path} cannot be read ({error}); recorded traces do not come with "
            "smkern: give a .csv in Azure's or a .jsonl in Mooncake's format (docs/replay.md says "
            f"where they are), or a generated one: {', '.join(GENERATORS)}"
        ) from error
    rows = _azure(text) if path.suffix == ".csv" else _mooncake(text)
    found = list(_ordered(path, rows))
    if not found:
        raise TraceError(f"{path} has no requests")
    first_s = found[0].at_s
    shifted = tuple(request._replace(at_s=request.at_s - first_s) for request in found)
    return Trace(path.stem, shifted, MOONCAKE_BLOCK)


Row = tuple[int, Arrival]
"""The number of its line, from 1."""


class _Bad(Exception):  # noqa: N818  a message on its way to a TraceError
    """A line that is no request: its number, and why."""


def _ordered(path: Path, rows: Iterable[Row]) -> Iterator[Arrival]:
    before: Arrival | None = None
    try:
        for line, request in rows:
            if before is not None and request.at_s < before.at_s:
                raise _Bad(
                    f"line {line}: it came {before.at_s - request.at_s:.3f} s before the one in "
                    "front of it; sort the file by time"
                )
            before = request
            yield request
    except _Bad as error:
        raise TraceError(f"{path}, {error}") from None


def _azure(text: str) -> Iterator[Row]:
    rows = csv.DictReader(StringIO(text, newline=""))
    try:
        yield from _azure_rows(rows)
    except csv.Error as error:
        raise _Bad(f"line {rows.reader.line_num}: it is no CSV ({error})") from None


def _azure_rows(rows: csv.DictReader[str]) -> Iterator[Row]:
    head = rows.fieldnames or ()
    missing = [name for name in AZURE_FIELDS if name not in head]
    if missing:
        raise _Bad(
            f"line 1: there is no field {', '.join(missing)} in {', '.join(head)!r:.80}: the first "
            f"line names the columns, {','.join(AZURE_FIELDS)}"
        )
    twice = [name for name in AZURE_FIELDS if head.count(name) > 1]
    if twice:
        raise _Bad(f"line 1: {', '.join(twice)} names two columns: leave one of them")
    for row in rows:
        line = rows.line_num
        if None in row:  # where csv puts what is behind the last column
            raise _Bad(
                f"line {line}: there are more fields than the {len(head)} columns: give one for "
                "each, numbers without commas"
            )
        at_s = _time_s(line, row["TIMESTAMP"])
        prompt = _count(line, "ContextTokens", row["ContextTokens"])
        output = _count(line, "GeneratedTokens", row["GeneratedTokens"])
        yield line, Arrival(at_s, prompt, output)


def _time_s(line: int, value: Any) -> float:
    """Seconds of a time with up to seven digits of them, which datetime cuts after six; without a
    zone it is UTC."""
    found = TIME.fullmatch(str(value))
    assert found is not None
    whole, digits, zone = found.groups()
    try:
        at = datetime.fromisoformat(whole + (zone or "+00:00"))
        return at.timestamp() + float(f"0.{digits or 0}")
    except ValueError:
        raise _Bad(
            f"line {line}: TIMESTAMP={shown(value)}: a time is like 2023-11-16 18:15:46.6805900 or "
            "2024-05-10 00:00:00.009930+00:00"
        ) from None


def _count(line: int, name: str, value: Any) -> int:
    try:
        count = int(value)
    except (TypeError, ValueError):
        count = 0
    if isinstance(value, bool | float) or count < 1:
        raise _Bad(f"line {line}: {name}={shown(value)}: give a whole number of at least 1")
    return count


def _mooncake(text: str) -> Iterator[Row]:
    # JSON may hold what else splitlines() takes for the end of a line
    for line, words in enumerate(text.split("\n"), 1):
        if not words.strip():
            continue
        try:
            row = parse(words)
        except ValueError as error:
            raise _Bad(f"line {line}: it is no JSON ({error})") from None
        if not isinstance(row, dict):
            raise _Bad(f"line {line}: it is no object but {words[:40]!r}")
        missing = [name for name in MOONCAKE_FIELDS if name not in row]
        if missing:
            raise _Bad(f"line {line}: there is no field {', '.join(missing)}")
        at_ms = row["timestamp"]
        if isinstance(at_ms, bool) or not isinstance(at_ms, int | float) or not at_ms >= 0:
            raise _Bad(f"line {line}: timestamp={at_ms!r}: give milliseconds of at least 0")
        prompt = _count(line, "input_length", row["input_length"])
        output = _count(line, "output_length", row["output_length"])
        yield line, Arrival(at_ms / 1e3, prompt, output, _blocks(line, row["hash_ids"], prompt))


def _blocks(line: int, value: Any, prompt: int) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(block) is not int for block in value):
        raise _Bad(f"line {line}: hash_ids={value!r:.60}: give a list of whole numbers")
    wanted = -(-prompt // MOONCAKE_BLOCK)
    if len(value) != wanted:
        raise _Bad(
            f"line {line}: {len(value)} hash_ids for input_length={prompt}: give one for each "
            f"{MOONCAKE_BLOCK} tokens, {wanted}"
        )
    return tuple(value)
