"""Tokens through the Multiplexer on a GPU are those of each request alone, bit for bit."""

from __future__ import annotations

import pytest
import torch

from smkern.models import Quantization, Weights, preset
from tests.runtime.equality import EQUALITIES, Equality, check_tokens
from tests.runtime.results import PLAN, record, token_cell

PREEMPTED = 1000
"""Requests among which pages run out whatever the policy draws; in fewer it is a matter of luck."""


def weights(wanted: Equality) -> Weights:
    """Random weights of Qwen3-8B, of so many of its layers."""
    config = preset(PLAN.model)
    if wanted.layers is not None:
        config = config.replace(num_layers=wanted.layers)
    if wanted.kind is not None:
        config = config.replace(quantization=Quantization(wanted.kind))
    return Weights.random(config, 5, "cuda")


@pytest.mark.parametrize("wanted", EQUALITIES, ids=lambda wanted: str(wanted.about))
def test_tokens(wanted: Equality) -> None:
    """Random splits, lengths, preemptions, cancellations, and look-ahead of 1 to 8 steps."""
    verdict = check_tokens(weights(wanted), wanted)
    print(verdict)
    record([token_cell(wanted, verdict)])
    assert not verdict.failed, verdict.failed[:4]
    assert verdict.mismatches == 0, f"(request, token): {verdict.wrong}"
    assert verdict.tokens > 5 * wanted.requests
    if verdict.clear is not None:
        assert verdict.clear > verdict.tokens // 4, "rounding decides nearly everything"
    else:
        assert verdict.cancelled
        if wanted.requests >= PREEMPTED:
            assert verdict.preemptions, "pages never ran out"
        assert verdict.switches
    torch.cuda.empty_cache()
