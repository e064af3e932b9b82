"""The tables of `latency.json`: errors on launches that were held out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from smkern.bench.tables.markdown import rows_or_none

OURS = "smkern"
SHOWN = (("qwen3-8b", "H200"), ("qwen3-32b", "H200"), ("qwen3-8b", "H100"))
"""Columns of the table of all latency models."""
KINDS = (
    ("alone", "solo_mape", "all"),
    ("decode beside prompts", "beside_mape", "decode"),
    ("prompts beside decode", "beside_mape", "prefill"),
)

FIGURES = ("solo_mape", "beside_mape", "guard_coverage", "guard_over")


class Gpu(NamedTuple):
    """A GPU's cells, and what a column calls it."""

    name: str
    cells: Sequence[dict[str, Any]]


def models_table(gpus: Iterable[Gpu]) -> str:
    """A row a latency model: mean and worst error in percent, for some models and GPUs."""
    found = {(gpu.name, *_key(cell)): cell for gpu in gpus for cell in gpu.cells}
    providers = dict.fromkeys(provider for *_, provider in found)
    rows = []
    for provider in sorted(providers, key=lambda name: name != OURS):
        rows.append(["`table` (ours)" if provider == OURS else f"`{provider}`"])
        for _, figure, kind in KINDS:
            for model, gpu in SHOWN:
                rows[-1].append(_errors(found.get((gpu, model, figure, provider)), kind))
    head = [
        f"{title}: {_size(model)}, {gpu}" if at == 0 else f"{_size(model)}, {gpu}"
        for title, *_ in KINDS
        for at, (model, gpu) in enumerate(SHOWN)
    ]
    return rows_or_none(["latency model", *head], rows)


def ours_table(gpus: Iterable[Gpu]) -> str:
    """A row a model and GPU: our table's errors, and how often its guard held and how far above."""
    rows = []
    for gpu in gpus:
        found = {_key(cell): cell for cell in gpu.cells}
        for model in sorted({model for model, *_ in found}, key=lambda x: (_billions(x), x)):
            cells = {name: found.get((model, name, OURS)) for name in FIGURES}
            rows.append(
                [
                    f"{_size(model)}, {gpu.name}",
                    *(_errors(cells[figure], kind) for _, figure, kind in KINDS),
                    *(_percent(cells[name]) for name in ("guard_coverage", "guard_over")),
                ]
            )
    head = ["model", *(title for title, *_ in KINDS), "within the guard", "guard above"]
    return rows_or_none(head, rows)


def _key(cell: dict[str, Any]) -> tuple[str, str, str]:
    case = cell["case"]
    return case["model"], case["name"], cell["provider"]


def _size(model: str) -> str:
    return model.removeprefix("qwen3-").upper()


def _billions(model: str) -> int:
    return int(_size(model).partition("B")[0])


def _errors(cell: dict[str, Any] | None, kind: str) -> str:
    errors = {} if cell is None else cell["by_kind"].get(kind, {})
    return f"{100 * errors['mean']:.1f} / {100 * errors['worst']:.1f}" if errors else ""


def _percent(cell: dict[str, Any] | None) -> str:
    return "" if cell is None else f"{100 * cell['value']:.1f}%"
