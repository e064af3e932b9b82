"""Attention's choice: kernel by model and device, run-time numbers by table or model."""

import pytest

from smkern.errors import ArgumentError, BudgetError
from smkern.tuning.attention import constraints
from smkern.tuning.attention.key import AttentionKey
from smkern.tuning.attention.select import AttentionTable, reachable, select_attention
from smkern.tuning.attention.shapes import Budget
from smkern.tuning.cells import Tuned
from tests.tuning.attention_steps import BUDGET, TWO, decode_of, problem_of

TABLE = AttentionTable({}, {AttentionKey.of(problem_of(), BUDGET): Tuned(TWO, 9)})


@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        ({}, "cuda"),
        ({"head_dim": 64}, "cuda"),
        ({"head_dim": 256, "num_q_heads": 16}, "cuda"),
        ({"head_dim": 80}, "triton"),
        ({"page_size": 48}, "triton"),
        ({"max_q_len": 2048, "max_tokens": 8192}, "cuda"),
    ],
)
@pytest.mark.parametrize("confined", ["mask", "grid"])
def test_the_kernel_follows_from_the_model(changes, kernel, confined, profile):
    found = select_attention(problem_of(**changes), Budget(32, confined), profile)
    assert (found.config.kernel, found.source) == (kernel, "model")


def test_older_devices_run_triton(ampere):
    assert select_attention(problem_of(), BUDGET, ampere).config.kernel == "triton"


@pytest.mark.parametrize("num_sms", [2, 16, 48, 100, 132])
@pytest.mark.parametrize("batch", [1, 7, 64, 300])
@pytest.mark.parametrize("head_dim", [80, 128])
def test_neither_batch_nor_budget_turns_bits(num_sms, batch, head_dim, profile):
    problem = decode_of(batch, 4096, head_dim=head_dim)
    for confined in ("mask", "grid"):
        budget = Budget(num_sms, confined)
        config = select_attention(problem, budget, profile).config
        default = select_attention(problem_of(head_dim=head_dim), Budget(132, "mask"), profile)
        assert constraints.bits(config) == constraints.bits(default.config)
        assert constraints.is_legal(problem, config, budget, (9, 0))


@pytest.mark.parametrize(
    ("batch", "length", "num_sms", "teams"),
    [(1, 2048, 16, 2), (8, 1024, 48, 2), (64, 2048, 16, 3), (64, 2048, 48, 3), (64, 2048, 132, 2)],
)
@pytest.mark.parametrize("cache_dtype", ["bf16", "fp8"])
def test_few_units_of_wide_rows_take_two_teams(batch, length, num_sms, teams, cache_dtype, profile):
    """As was measured; whichever it is, the other is among what is warmed."""
    problem = decode_of(batch, length, num_q_heads=64, cache_dtype=cache_dtype)
    budget = Budget(num_sms, "mask", False)
    assert select_attention(problem, budget, profile).config.teams == teams
    assert {2, 3} <= {config.teams for config in reachable(problem, budget, profile)}
    narrow = decode_of(batch, length, cache_dtype=cache_dtype)
    assert select_attention(narrow, budget, profile).config.teams == 3


def test_heads_of_64_keep_their_teams(profile):
    """Two of them have too little in flight: 27.0 us by four, 34.8 by two, of 14 heads on 2."""
    problem = decode_of(64, 2048, num_q_heads=14, num_kv_heads=2, head_dim=64)
    assert select_attention(problem, Budget(32, "mask", False), profile).config.teams == 4


def test_a_tuned_cell_counts_before_the_model(profile):
    found = select_attention(problem_of(), BUDGET, profile, TABLE)
    assert (found.config, found.source) == (TWO, "table")


def test_a_named_kernel_is_forced_and_asks_no_table(profile):
    found = select_attention(problem_of(), BUDGET, profile, TABLE, "triton")
    assert (found.config.kernel, found.source) == ("triton", "forced")


@pytest.mark.parametrize(
    ("changes", "backend", "message"),
    [
        ({}, "cutlass", r"backend='cutlass' is none of \['cuda', 'triton'\]: leave it at None"),
        ({}, "fa3", "backend='fa3' is none of"),
        ({"head_dim": 80}, "cuda", r"head_dim=80.*serves_head_dim.*leave backend at None"),
        ({"head_dim": 512}, None, r"head_dim=512.*serves_head_dim.*head_dim up to 256"),
    ],
)
def test_what_cannot_run_is_named(changes, backend, message, profile):
    with pytest.raises(ArgumentError, match=message):
        select_attention(problem_of(**changes), BUDGET, profile, None, backend)


def test_no_budget(profile):
    with pytest.raises(BudgetError, match="num_sms is 0; give at least 1"):
        select_attention(problem_of(), Budget(0), profile)
