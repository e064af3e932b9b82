"""The tuner's bookkeeping for attention: cases, candidates, what is left, what the command says."""

from dataclasses import replace

import pytest

from smkern.autotune import attention
from smkern.autotune.attention_cases import MODELS, Heads, parse_heads, tuned_cases
from smkern.tuning.attention import constraints
from smkern.tuning.attention.key import AttentionKey
from smkern.tuning.attention.select import AttentionTable, select_attention
from smkern.tuning.attention.shapes import Budget
from smkern.tuning.cells import Tuned


def test_default_cases_are_distinct_cells():
    cases = tuned_cases()
    assert len(cases) == len(MODELS) * (3 * 3 + 3)
    keys = {AttentionKey.of(case.problem, Budget(16)) for case in cases}
    assert len(keys) == len(cases)
    assert {key.path for key in keys} == {"decode", "prefill"}


def test_a_cases_numbers_are_exact():
    (case,) = tuned_cases([Heads(8, 2, 64)], batches=(3,), lengths=(100,), prompts=())
    shape = case.problem.shape
    assert (shape.batch, shape.max_tokens, shape.max_kv_len, shape.max_total_kv) == (3, 3, 100, 300)
    assert not shape.has_prefill


def test_heads_are_parsed_and_named():
    assert parse_heads("32x8x128,8x8x64") == (Heads(32, 8, 128), Heads(8, 8, 64))
    assert str(Heads(32, 8, 128)) == "32x8x128"


@pytest.mark.parametrize("text", ["32x8", "32x7x128", "axbxc", "0x1x64", ""])
def test_heads_that_are_none(text):
    with pytest.raises(ValueError, match="is not QxKVxD"):
        parse_heads(text)


@pytest.mark.parametrize("case", tuned_cases((*MODELS, Heads(16, 4, 80))), ids=lambda c: c.name)
def test_candidates_begin_with_the_default_and_keep_its_bits(case, profile):
    problem, budget = case.problem, Budget(32, "mask")
    found = list(attention.FAMILY.wanted(problem, budget, profile))
    assert 1 <= len(found) <= attention.FAMILY.most
    assert found[0] == select_attention(problem, budget, profile).config
    assert len(set(found)) == len(found)
    assert len({constraints.bits(config) for config in found}) == 1


def test_a_device_without_kernels_has_no_candidates(profile):
    old = replace(profile, info=replace(profile.info, capability=(7, 5)))
    assert attention.listed(tuned_cases()[0].problem, Budget(32), old) == {}


def test_a_tuned_cell_is_served_for_its_case(profile):
    """What the tuner writes, dispatch finds."""
    case = tuned_cases()[0]
    problem, budget = case.problem, Budget(16, "mask")
    *_, last = attention.listed(problem, budget, profile)
    table = AttentionTable({}, {AttentionKey.of(problem, budget): Tuned(last, 5.0)})
    found = select_attention(problem, budget, profile, table)
    assert (found.source, found.config) == ("table", last)
