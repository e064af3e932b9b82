"""The prefill path interpreted, alone and beside decode rows: options, pieces, budgets."""

from __future__ import annotations

import pytest

from smkern.tuning.attention import shapes as attention
from smkern.tuning.attention.shapes import AttentionConfig, Budget
from tests.interpreter.attention_support import Case, check

MIXED = ((40, 90), (1, 60), (9, 9), (8, 30), (0, 5), (12, 4))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 25])
@pytest.mark.parametrize(("softcap", "sinks"), [(0.0, False), (5.0, True)])
def test_options(causal: bool, window: int, softcap: float, sinks: bool) -> None:
    check(Case(MIXED, causal=causal, window=window, softcap=softcap, sinks=sinks))


@pytest.mark.parametrize("window", [0, 128])
def test_a_row_block_that_sees_no_key(window: int) -> None:
    """9 queries over no keys: the first of two row blocks ends before position 0."""
    check(Case(((9, 0), (20, 3)), 16, 1, window=window, sinks=True))


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(2, 2), (5, 1), (16, 2)])
def test_groups_and_several_row_blocks(q_heads: int, kv_heads: int) -> None:
    check(Case(((70, 80),), q_heads, kv_heads), Budget(2, "grid"))


@pytest.mark.parametrize("page_size", [1, 24, 256])
@pytest.mark.parametrize("flat", [False, True])
def test_pages(page_size: int, flat: bool) -> None:
    check(Case(((12, 200), (9, 30)), page_size=page_size, flat=flat))


@pytest.mark.parametrize("head_dim", [96, 128])
def test_head_dims(head_dim: int) -> None:
    check(Case(((12, 70),), head_dim=head_dim))


@pytest.mark.parametrize("keys", [32, 128])
def test_other_tiles(keys: int) -> None:
    config = AttentionConfig("triton", keys=keys)
    check(Case(((30, 200),), window=50), config=config)


@pytest.mark.parametrize(("budget", "window"), [(1, 0), (4, 140), (30, 0), (30, 140)])
def test_pieces_are_merged(budget: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "PREFILL_PIECE", 128)
    case = Case(((40, 400), (10, 129)), kv_heads=2, window=window)
    assert case.shape.max_prefill_items > case.shape.max_row_blocks
    check(case, Budget(budget, "grid"))


def test_brief_requests_of_large_groups_are_cut_and_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "BRIEF_PIECE", 128)
    case = Case(((1, 400), (8, 129), (1, 20)), q_heads=20, kv_heads=1)
    assert case.shape.max_decode_items == 0
    check(case, Budget(4, "grid"))


def test_fp8_cache() -> None:
    check(Case(((12, 70), (1, 20)), fp8=True, k_scale=0.5, v_scale=2.0))
