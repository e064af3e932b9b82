"""Tokens through the Multiplexer on a GPU are those of each request alone, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from smkern.bench.runtime.cases import PLANS
from smkern.bench.runtime.correct import EQUALITIES, Equality, about_of, token_cells
from smkern.models import Weights, preset

(PLAN,) = (plan for plan in PLANS if plan.model == "qwen3-8b")


def weights(layers: int | None) -> Weights:
    """Random ones of Qwen3-8B, of so many of its layers."""
    config = preset(PLAN.model)
    config = config if layers is None else config.replace(num_layers=layers)
    return Weights.random(config, 5, "cuda")


@pytest.mark.parametrize("wanted", EQUALITIES, ids=lambda wanted: str(about_of(wanted)))
def test_tokens(wanted: Equality) -> None:
    """Random splits, lengths, preemptions, cancellations, and look-ahead of 1 to 8 steps."""
    cell: dict[str, Any]
    (cell,) = token_cells(PLAN, weights, wanted)
    print(cell)
    assert not cell["failed"], cell["failed"]
    assert cell["value"] == 0, f"(request, token): {cell.get('wrong')}"
    assert cell["tokens"] > 5 * wanted.requests
    if wanted.is_fast:
        assert cell["clear"] > cell["tokens"] // 4, "rounding decides nearly everything"
    else:
        assert cell["cancelled"]
        assert cell["preemptions"], "pages never ran out"
        assert cell["switches"]
    torch.cuda.empty_cache()
