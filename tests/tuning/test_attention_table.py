"""Attention's cells: buckets, and neighbours that serve."""

from dataclasses import replace

import pytest

from smkern.profile import load_profile
from smkern.tuning.attention.key import AttentionKey, mean_kv_len
from smkern.tuning.attention.select import ATTENTION_FAMILY, AttentionTable
from smkern.tuning.attention.shapes import AttentionConfig, AttentionProblem, AttentionShape
from smkern.tuning.bucket_table import power_of_two
from smkern.tuning.cells import Tuned
from tests.tuning.attention_steps import BUDGET, TWO, decode_of, problem_of


def table_of(*found):
    return AttentionTable(
        {}, {AttentionKey.of(problem, BUDGET): Tuned(config, 9.0) for problem, config in found}
    )


def lookup(table, problem, budget):
    return ATTENTION_FAMILY.lookup(problem, budget, load_profile("h200"), table)


def test_buckets_are_powers_of_two():
    assert [power_of_two(n) for n in (0, 1, 2, 3, 64, 65)] == [1, 1, 2, 4, 64, 128]


def test_the_mean_length_counts_within_the_window():
    assert mean_kv_len(problem_of(max_kv_len=30_000)) == 4096
    assert mean_kv_len(problem_of(window=1000)) == 1001
    assert mean_kv_len(AttentionProblem(AttentionShape(0, 8, 8, 64, 16, 1, 0, 0, 0))) == 1


@pytest.mark.parametrize(
    ("batch", "length", "served"),
    [(64, 4096, True), (50, 3000, True), (16, 16384, True), (8, 4096, False), (64, 512, False)],
)
def test_a_cell_serves_two_octaves_around_it(batch, length, served):
    found = lookup(table_of((decode_of(64, 4096), TWO)), decode_of(batch, length), BUDGET)
    assert (found == TWO) is served


def test_the_nearest_cell_counts():
    one = AttentionConfig("cuda", teams=1)
    table = table_of((decode_of(64, 4096), TWO), (decode_of(16, 4096), one))
    assert lookup(table, decode_of(64, 4096), BUDGET) == TWO
    assert lookup(table, decode_of(16, 2048), BUDGET) == one


@pytest.mark.parametrize(
    ("changes", "budget"),
    [
        ({}, replace(BUDGET, num_sms=34)),
        ({}, replace(BUDGET, confined="grid")),
        ({"num_q_heads": 64}, BUDGET),
        ({"head_dim": 64}, BUDGET),
        ({"page_size": 32}, BUDGET),
        ({"max_q_len": 2048, "max_tokens": 2111}, BUDGET),
    ],
)
def test_anything_else_is_not_served(changes, budget):
    table = table_of((problem_of(), TWO))
    assert lookup(table, problem_of(), BUDGET) == TWO
    assert lookup(table, problem_of(**changes), budget) is None


@pytest.mark.parametrize(
    "config",
    [
        AttentionConfig("triton", keys=32, num_warps=2, num_stages=5),
        AttentionConfig("cutlass"),
        AttentionConfig("cuda", teams=9),
    ],
)
def test_a_cell_that_would_turn_bits_or_not_run_serves_nothing(config):
    assert lookup(table_of((problem_of(), config)), problem_of(), BUDGET) is None
