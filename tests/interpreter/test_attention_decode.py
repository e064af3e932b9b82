"""The decode path interpreted: option grid, pieces and their merge, budgets, poisoned inputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from smkern.tuning.attention import shapes as attention
from smkern.tuning.attention.shapes import AttentionConfig, Budget
from tests.interpreter.attention_support import Case, check, inputs, run

RAGGED = ((1, 40), (1, 1), (3, 70), (2, 33), (0, 20), (1, 0), (2, 1))


@pytest.fixture
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 64 keys: several in a short context."""
    monkeypatch.setattr(attention, "DECODE_PIECE", 64)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize(("softcap", "sinks"), [(0.0, False), (5.0, True)])
def test_options(causal: bool, window: int, softcap: float, sinks: bool) -> None:
    check(Case(RAGGED, causal=causal, window=window, softcap=softcap, sinks=sinks))


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(1, 1), (4, 4), (8, 2), (5, 1), (8, 1), (40, 1)])
def test_groups(q_heads: int, kv_heads: int) -> None:
    check(Case(((1, 50), (3, 20)), q_heads, kv_heads))


@pytest.mark.parametrize("page_size", [1, 16, 24, 64, 256])
@pytest.mark.parametrize("flat", [False, True])
def test_pages(page_size: int, flat: bool) -> None:
    check(Case(((1, 70), (2, 33)), page_size=page_size, flat=flat, kv_heads=2))


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_head_dims(head_dim: int) -> None:
    check(Case(((1, 40),), head_dim=head_dim))


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize(("budget", "sinks"), [(1, False), (2, True), (5, False), (40, True)])
def test_pieces_are_merged_at_every_budget(budget: int, sinks: bool) -> None:
    case = Case(((1, 300), (2, 65), (1, 64), (4, 130)), kv_heads=2, sinks=sinks)
    check(case, Budget(budget, "grid"))


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize("window", [0, 10, 30])
def test_a_rest_in_the_last_piece(window: int) -> None:
    check(Case(((1, 144), (1, 145), (3, 80), (1, 65)), kv_heads=2, window=window))


def test_many_ctas_share_an_sm_where_a_mask_confines() -> None:
    config = AttentionConfig("triton", keys=32, ctas_per_sm=3)
    check(Case(((1, 50),) * 5), Budget(2, "mask"), config)


@pytest.mark.usefixtures("short_pieces")
def test_a_window_over_pieces_that_some_rows_do_not_see() -> None:
    check(Case(((8, 200), (1, 200)), window=65, q_heads=8))


@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0])
def test_scales(scale: float) -> None:
    check(Case(((2, 40),), scale=scale))


@pytest.mark.parametrize("on_device", [False, True])
def test_fp8_cache(on_device: bool) -> None:
    scales = (0.5, 1.5) if not on_device else (torch.tensor([0.5]), torch.tensor([1.5]))
    check(Case(((1, 40), (2, 70)), fp8=True, k_scale=scales[0], v_scale=scales[1]))


@pytest.mark.usefixtures("short_pieces")
def test_bits_depend_on_the_request_alone() -> None:
    case = Case(((2, 150),), q_heads=8, kv_heads=2)
    given = inputs(case)
    out, lse = run(case, given)
    beside = replace(case, requests=((1, 500), (2, 150), (8, 90)))
    neighbours = inputs(beside, seed=1)
    pages = torch.arange(len(given.k_cache)) + len(neighbours.k_cache)
    table = torch.cat([neighbours.page_table, neighbours.page_table[:1]])
    table[1, : given.page_table.shape[1]] = pages[given.page_table[0].clamp(0, len(pages) - 1)]
    both = replace(
        neighbours,
        q=neighbours.q.clone(),
        k_cache=torch.cat([neighbours.k_cache, given.k_cache]),
        v_cache=torch.cat([neighbours.v_cache, given.v_cache]),
        page_table=table[:3],
    )
    both.q[1:3] = given.q
    for budget in (1, 7):
        again, lse_again = run(beside, both, Budget(budget, "grid"))
        assert torch.equal(again[1:3], out)
        assert torch.equal(lse_again[1:3], lse)
