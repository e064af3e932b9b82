"""The tables of `server.json`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from smkern.bench.tables.markdown import rows_or_none

WAYS = {"in_process": "a loop in the engine's process", "http": "`smkern serve`"}


def server_table(cells: Iterable[dict[str, Any]]) -> str:
    """A row a way: times between tokens, and what the server's process takes."""
    cells = [cell for cell in cells if "way" in cell["case"]]
    found = {(cell["case"]["way"], cell["case"]["name"]): cell for cell in cells}
    rows = []
    for way, name in WAYS.items():
        if (p50 := found.get((way, "tbt_p50"))) is None:
            continue
        cores, tokens = (found.get((way, x)) for x in ("server_cpu", "tokens_per_event"))
        rows.append(
            [
                f"{p50['case']['model']}, {p50['case']['streams']} streams: {name}",
                f"{p50['value']:.2f}",
                f"{found[way, 'tbt_p99']['value']:.2f}",
                "" if cores is None else f"{cores['value']:.2f}",
                "" if tokens is None else f"{tokens['value']:.2f}",
            ]
        )
    head = ["tokens come to", "TBT p50, ms", "p99", "server's cores", "tokens an event"]
    return rows_or_none(head, rows)


def soak_table(cells: Iterable[dict[str, Any]]) -> str:
    """A row a soak: what came, what was wrong, and memory at its beginning and end."""
    rows = [
        [
            f"{cell['case']['model']}, {cell['case']['streams']} streams",
            f"{cell['took_s']:.0f}",
            f"{cell['requests']:,}",
            f"{cell['hangups']:,}",
            f"{cell['tokens']:,}",
            f"{cell['value']:.0f}",
            str(len(cell["wrong_metrics"])),
            " to ".join(f"{mib:.0f}" for mib in cell["server_rss_mib"]),
            " to ".join(f"{mib:.0f}" for mib in cell["engine_rss_mib"]),
        ]
        for cell in cells
        if cell["case"]["name"] == "soak"
    ]
    head = ["load", "s", "requests", "hung up", "tokens", "wrong requests", "wrong metrics"]
    return rows_or_none([*head, "server's MiB", "engine's MiB"], rows)
