"""The sampler's reference: random numbers, filters as in transformers, distributions, state."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import replace
from typing import Any

import pytest
import torch

from smkern.ops.reference import sample as reference
from smkern.ops.reference.sample import Choice, philox
from tests.ops.sample_cases import DTYPES, fits, logits_of, may_draw, odd_rows, shares_of

FILTERS: dict[str, dict[str, Any]] = {
    "top-k": {"top_k": 17},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.1},
    "top-k-top-p": {"top_k": 50, "top_p": 0.7},
    "all": {"temperature": 1.7, "top_k": 90, "top_p": 0.9, "min_p": 0.05},
}


def test_random_numbers_are_philox():
    """Known answers of the Random123 library: counters and keys of zeros."""
    first, second = philox(0, 0)
    words = [first & 0xFFFFFFFF, first >> 32, second & 0xFFFFFFFF, second >> 32]
    assert [f"{word:08x}" for word in words] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    assert philox(-1, 0) == philox(2**64 - 1, 0) != philox(0, 1)


@pytest.mark.parametrize("options", FILTERS.values(), ids=FILTERS)
def test_filters_are_those_of_transformers(options):
    transformers = pytest.importorskip("transformers")
    choice = Choice(**{"temperature": 1.0} | options)
    scores = logits_of(1, 2000, torch.float32) / choice.temperature
    for name, warper in (("top_k", "TopKLogitsWarper"), ("top_p", "TopPLogitsWarper"),
                         ("min_p", "MinPLogitsWarper")):  # fmt: skip
        if name in options:
            scores = getattr(transformers, warper)(options[name])(None, scores)
    x = reference.plain(logits_of(1, 2000, torch.float32)[0])
    kept = reference.kept(x, choice)
    assert kept.sort().values.tolist() == scores[0].isfinite().nonzero().flatten().tolist()


@pytest.mark.parametrize("options", FILTERS.values(), ids=FILTERS)
def test_distributions(options):
    """What 20,000 seeds draw, and that another temperature would be noticed."""
    x = reference.plain(logits_of(1, 3000, torch.bfloat16)[0])
    choice = Choice(**{"temperature": 0.8} | options)
    drawn = reference.draw_kept(x, choice)
    upto = drawn.upto.tolist()
    targets = (philox(seed, 3)[0] * upto[-1] >> 64 for seed in range(20_000))
    tokens = drawn.ids[[bisect_right(upto, target) for target in targets]]
    assert fits(tokens, shares_of(x, choice))
    warmer = replace(choice, temperature=1.1 * choice.temperature)
    assert not fits(tokens, shares_of(x, warmer))


def test_the_distribution_without_filters():
    x, choice, size = reference.plain(logits_of(1, 9000, torch.bfloat16)[0]), Choice(0.9), 2048
    pieces = reference.draw_piece(x, choice, size).upto.tolist()
    inside = [reference.draw_in_piece(x, choice, size, piece) for piece in range(len(pieces))]
    ends = [drawn.upto.tolist() for drawn in inside]
    tokens = []
    for seed in range(20_000):
        first, second = philox(seed, 0)
        piece = bisect_right(pieces, first * pieces[-1] >> 64)
        at = bisect_right(ends[piece], second * ends[piece][-1] >> 64)
        tokens.append(int(inside[piece].ids[at]))
    assert fits(torch.tensor(tokens), shares_of(x, choice))
    want = [reference.sample_row(x.bfloat16(), Choice(0.9, seed=seed)) for seed in range(20)]
    assert want == tokens[:20]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_odd_rows_have_a_token(dtype):
    x = odd_rows(dtype)
    for choice in (Choice(), Choice(1.0, seed=3), Choice(1.0, top_k=3), Choice(1.0, top_p=0.5)):
        tokens = reference.sample(x, [choice] * 8).tolist()
        assert tokens[:2] == [0, 0]
        assert tokens[3] in (77, 99)
        assert tokens[4] == 3000
        assert tokens[5] < 100
        assert all(may_draw(row, choice, token) for row, token in zip(x, tokens, strict=True))


def test_ties_go_to_the_lower_id():
    x = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.0])
    assert reference.kept(x, Choice(1.0, top_k=2)).tolist() == [1, 2]
    assert reference.kept(x, Choice(1.0, top_p=0.3)).tolist() == [1, 2]
    assert reference.kept(x, Choice(1.0, min_p=1.0)).tolist() == [1, 2, 3]


def test_what_may_be_drawn_is_told_apart():
    x = torch.zeros(100)
    choice = Choice(1.0, top_k=50, seed=1)
    token = reference.sample_row(x, choice)
    assert [t for t in range(100) if may_draw(x, choice, t)] == [token]
    assert not may_draw(x, Choice(), 1)


def test_numbers_out_of_range_are_clamped():
    x = logits_of(1, 50, torch.float32)[0]
    best = int(x.argmax())
    for temperature in (-1.0, math.nan, 0.0, 1e-6):
        assert reference.sample_row(x, Choice(temperature)) == best
    for p in (0.0, -1.0):
        assert reference.sample_row(x, Choice(1.0, top_p=p, seed=5)) == best
    everything = Choice(1.0, seed=5)
    for same in ({"top_p": math.nan}, {"top_p": 2.0}, {"min_p": math.nan}, {"top_k": -3},
                 {"top_k": 50}):  # fmt: skip
        token = reference.sample_row(x, Choice(1.0, seed=5, **same))
        assert token == reference.sample_row(x, everything)
    assert reference.sample_row(x, Choice(1.0, min_p=9.0)) == best
