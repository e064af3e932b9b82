"""Rows of models in fp8 over the same in bf16, from the cells of one file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from smkern.bench.rows import Cell, Row, grouped, worst_row

DECODE_OF = {
    "fp8": {16: 0.76, 24: 0.78, 32: 0.82, 132: 0.84},
    "fp8+fp8-kv": dict.fromkeys((16, 24, 32, 132), 0.60),
}
"""Most of a bf16 step's time, by what is in fp8 and the SMs.

The bytes are 0.80 and 0.52 of bf16's."""
PREFILL_TIMES = {
    ("fp8", 1): 1.40,
    ("fp8", 4): 1.45,
    ("fp8-tensor", 1): 1.50,
    ("fp8-tensor", 4): 1.55,
}
"""Times the tokens/ms in bf16 of one prompt, and of four, from `MANY_SMS` SMs on."""
BATCH, MANY_SMS = 64, 84


def is_fp8(cell: Cell) -> bool:
    return bool(_parted(cell)[1])


def decode_rows(cells: Sequence[Cell]) -> dict[str, Row]:
    """By what is in fp8 and the partition: the worst step of `BATCH` rows over bf16's."""
    own = [cell for cell in cells if is_fp8(cell) and cell["case"]["batch"] == BATCH]
    groups = grouped(own, lambda cell: (_parted(cell)[1], cell["num_sms"]))
    plain = _plain(cells)
    return {
        f"{variant}_decode_over_bf16_{num_sms}_sms": worst_row(
            found,
            lambda cell: _over(plain, cell),
            DECODE_OF.get(variant, {}).get(num_sms),
            _name,
            at_most=True,
        )
        for (variant, num_sms), found in sorted(groups.items())
    }


def prefill_rows(cells: Sequence[Cell]) -> dict[str, Row]:
    """By what is in fp8 and how many prompts share the forward: the least times bf16's rate."""
    own = [cell for cell in cells if is_fp8(cell) and cell["num_sms"] >= MANY_SMS]
    groups = grouped(own, lambda cell: (_parted(cell)[1], cell["case"]["batch"]))
    plain = _plain(cells)

    def times(cell: Cell) -> float | None:
        over = _over(plain, cell)
        return None if over is None else 1 / over

    return {
        f"{variant}_prefill{'' if batch == 1 else f'_{batch}_prompts'}_times_bf16": worst_row(
            found, times, PREFILL_TIMES.get((variant, batch)), _name
        )
        for (variant, batch), found in sorted(groups.items())
    }


def _parted(cell: Cell) -> tuple[str, str]:
    """A model's bf16 name, and what it has in fp8: "fp8", "fp8-tensor", "fp8+fp8-kv" or nothing."""
    base, *variant = re.split(r"[-+](?=fp8)", cell["case"]["model"], maxsplit=1)
    return base, "".join(variant)


def _plain(cells: Sequence[Cell]) -> dict[tuple[Any, ...], Cell]:
    return {_problem(cell): cell for cell in cells if not is_fp8(cell)}


def _over(plain: dict[tuple[Any, ...], Cell], cell: Cell) -> float | None:
    found = plain.get(_problem(cell))
    return None if found is None else float(cell["us"] / found["us"])


def _problem(cell: Cell) -> tuple[Any, ...]:
    """What a cell has in common with its bf16 one."""
    case = cell["case"]
    return _parted(cell)[0], case["batch"], case.get("tokens"), cell["num_sms"]


def _name(cell: Cell) -> dict[str, Any]:
    return {"model": cell["case"]["model"], "num_sms": cell["num_sms"]}
