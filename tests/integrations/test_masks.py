"""What a step says against the dense mask that transformers makes of the same request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smkern.integrations.transformers.attention import Attention
from smkern.integrations.transformers.mask import StepMask, mask_request, pattern_of
from smkern.integrations.transformers.pages import as_pages, page_table
from smkern.integrations.transformers.step import Pattern, Step, make_step
from smkern.ops.attention import paged_attention


def closure_of(pattern: Pattern) -> Any:
    """transformers' own function for a pattern."""
    from transformers import masking_utils as mu

    if pattern.window is not None:
        return mu.sliding_window_causal_mask_function(pattern.window)
    return mu.causal_mask_function if pattern.causal else mu.bidirectional_mask_function


def dense_of(request: dict[str, Any]) -> torch.Tensor:
    """bool [batch, q_length, kv_length], as eager and sdpa get it."""
    from transformers.masking_utils import sdpa_mask

    return sdpa_mask(**request, allow_is_causal_skip=False)[:, 0]


def seen_by(step: Step) -> torch.Tensor:
    """bool [batch, q_length, kv_length]: the keys that `paged_attention` gives each query."""
    r = step.request
    seen = torch.zeros(r.batch, r.q_length, r.kv_length, dtype=torch.bool)
    for row in range(r.batch):
        count = int(step.kv_lens[row])
        keys = torch.arange(count) if step.order is None else step.order[row, :count].long()
        for t in range(r.q_length):
            position = count - r.q_length + t
            end = position + 1 if step.causal else count
            begin = 0 if step.window is None else max(position - step.window + 1, 0)
            seen[row, t, keys[begin : max(end, begin)]] = True
    return seen


@st.composite
def requests(draw: st.DrawFn) -> tuple[dict[str, Any], Pattern]:
    """The arguments of a mask function, as caches of all kinds give them."""
    pattern = draw(
        st.one_of(
            st.just(Pattern(True)),
            st.just(Pattern(False)),
            st.integers(1, 6).map(lambda window: Pattern(True, window)),
        )
    )
    batch, q_length = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    past, behind, kv_offset = (
        draw(st.integers(0, 6)),
        draw(st.integers(0, 4)),
        draw(st.integers(0, 3)),
    )
    kv_length = past + q_length + (behind if pattern.causal else 0)
    q_offset: Any = kv_offset + past
    if draw(st.booleans()):
        q_offset = torch.tensor(q_offset)
    mask = None
    if draw(st.booleans()):
        width = kv_offset + past + q_length
        rows = st.lists(st.booleans(), min_size=width, max_size=width)
        kind = draw(st.sampled_from(["left", "right", "hole", "any"]))
        if kind == "any":
            mask = torch.tensor(draw(st.lists(rows, min_size=batch, max_size=batch)))
        elif kind == "hole":
            mask = torch.arange(width).expand(batch, -1) != draw(st.integers(0, width - 1))
        else:
            pads = torch.tensor([draw(st.integers(0, width)) for _ in range(batch)])
            mask = torch.arange(width) >= pads[:, None]
            mask = mask if kind == "left" else mask.flip(1)
    request = {
        "batch_size": batch, "q_length": q_length, "kv_length": kv_length, "q_offset": q_offset,
        "kv_offset": kv_offset, "attention_mask": mask, "mask_function": closure_of(pattern),
    }  # fmt: skip
    return request, pattern


def step_of(request: dict[str, Any], pattern: Pattern) -> Step | None:
    r = request
    return make_step(
        mask_request(
            r["batch_size"], r["q_length"], r["kv_length"], r["q_offset"], r["kv_offset"], pattern,
            r["attention_mask"], torch.device("cpu"),
        )
    )  # fmt: skip


def queries_that_count(request: dict[str, Any], pattern: Pattern) -> torch.Tensor:
    """bool [batch, q_length]: not padding, and sees a key at all."""
    counts = dense_of(request).any(-1)
    mask = request["attention_mask"]
    if mask is None or not pattern.causal or request["q_length"] == 1:
        return counts
    first = int(request["q_offset"])
    return counts & mask[:, first : first + request["q_length"]]


def must_be_served(request: dict[str, Any], pattern: Pattern) -> bool:
    """Whether padding is only before or only behind a row's tokens."""
    mask = request["attention_mask"]
    if mask is None or not pattern.causal or request["q_length"] == 1:
        return True
    seen = mask[:, request["kv_offset"] :].int()
    starts = (torch.nn.functional.pad(seen, (1, 0)).diff(dim=1) == 1).sum(1)
    past = int(request["q_offset"]) - request["kv_offset"]
    rises_in_past = bool((seen[:, :past].diff(dim=1) == -1).any()) or bool(
        past and (seen[:, :past].any(1) & ~seen[:, past - 1].bool()).any()
    )
    return bool((starts <= 1).all()) and not rises_in_past


@pytest.mark.slow
@settings(max_examples=500)
@given(requests())
def test_a_step_sees_what_the_dense_mask_sees(drawn: tuple[dict[str, Any], Pattern]) -> None:
    request, pattern = drawn
    step = step_of(request, pattern)
    if step is None:
        assert not must_be_served(request, pattern)
        return
    counts = queries_that_count(request, pattern)
    assert torch.equal(seen_by(step)[counts], dense_of(request)[counts])
    assert int(step.kv_lens.max()) <= step.max_kv_len


@settings(max_examples=60)
@given(requests(), st.sampled_from(["cache", "projection", "grown", "apart"]), st.randoms())
def test_attention_of_a_step(drawn: Any, layout: str, random: Any) -> None:
    """From any layout of the cache: the pages of a row are its keys."""
    request, pattern = drawn
    step = step_of(request, pattern)
    if step is None:
        return
    torch.manual_seed(random.randrange(1 << 30))
    batch, keys, tokens = request["batch_size"], request["kv_length"], request["q_length"]
    k, v = (laid_out(batch, 2, keys, layout) for _ in "kv")
    q = torch.randn(batch, 4, tokens, 64)
    pages = as_pages(k, v, whole=step.order is None)
    if layout != "apart":
        assert pages.k.data_ptr() == k.data_ptr()
        assert pages.v.data_ptr() == v.data_ptr()
    out = paged_attention(
        q.transpose(1, 2).reshape(-1, 4, 64), pages.k, pages.v, page_table(step, pages),
        step.kv_lens, cu_q_lens=step.cu_q_lens, max_q_len=tokens if tokens > 1 else None,
        causal=step.causal, window=step.window, check=True,
    ).view(batch, tokens, 4, 64)  # fmt: skip
    wanted = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=dense_of(request)[:, None], enable_gqa=True
    ).transpose(1, 2)
    counts = queries_that_count(request, pattern)
    torch.testing.assert_close(out[counts], wanted[counts], rtol=1e-5, atol=1e-5)


def laid_out(batch: int, heads: int, keys: int, layout: str) -> torch.Tensor:
    """[batch, heads, keys, 64] in memory as caches and projections have it."""
    if layout == "cache":
        return torch.randn(batch, heads, keys, 64)
    if layout == "projection":  # a part of a fused projection
        return torch.randn(batch, keys, heads + 3, 64)[:, :, 1 : heads + 1].transpose(1, 2)
    if layout == "grown":  # the front of a larger cache
        return torch.randn(batch, heads, keys + 5, 64)[:, :, :keys]
    return torch.randn(batch, heads * keys * 64 + 7)[:, 7:].view(batch, heads, keys, 64)


@pytest.mark.parametrize("pitches", [(48, 48), (48, 96), (50, 50)])
def test_pages_of_sixteen_where_rows_are_whole_pages(pitches: tuple[int, int]) -> None:
    k, v = (torch.zeros(2, 1, pitch, 64)[:, :, :48] for pitch in pitches)
    pages = as_pages(k, v, whole=True)
    assert pages.page_size == (1 if pitches == (50, 50) else 16)
    assert (pages.v.data_ptr() == v.data_ptr()) == (pitches[0] == pitches[1])
    assert pages.pitch == (48 if pitches != (50, 50) else 50)


def test_a_page_table_is_made_once_for_all_layers() -> None:
    step = step_of(
        {
            "batch_size": 2, "q_length": 1, "kv_length": 5, "q_offset": 4, "kv_offset": 0,
            "attention_mask": None,
        },
        Pattern(True),
    )  # fmt: skip
    assert step is not None
    layers = [as_pages(torch.zeros(2, 3, 5, 64), torch.zeros(2, 3, 5, 64), whole=True)] * 2
    tables = [page_table(step, pages) for pages in layers]
    assert tables[0] is tables[1]
    assert tables[0].tolist() == [[0, 1, 2, 3, 4], [15, 16, 17, 18, 19]]


def test_patterns_are_recognised_in_this_version_of_transformers() -> None:
    from transformers import masking_utils as mu

    for pattern in (Pattern(True), Pattern(False), Pattern(True, 7)):
        assert pattern_of(closure_of(pattern)) == pattern
    both = mu.and_masks(closure_of(Pattern(True, 7)), closure_of(Pattern(True, 3)))
    others = [
        mu.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int)),
        mu.or_masks(mu.causal_mask_function, mu.sliding_window_overlay(3)),
        mu.sliding_window_bidirectional_mask_function(3),
        mu.and_masks(mu.causal_mask_function, lambda b, h, q, k: q >= 0),
        mu.sliding_window_overlay(3),
        lambda b, h, q, k: k <= q,
        both,
    ]
    assert [pattern_of(other) for other in others] == [None] * len(others)


def step_mask(**changes: Any) -> torch.Tensor:
    from transformers.masking_utils import causal_mask_function

    request = {
        "batch_size": 2, "q_length": 3, "kv_length": 5, "q_offset": 2, "kv_offset": 0,
        "mask_function": causal_mask_function, "attention_mask": torch.ones(2, 5).bool(),
    }  # fmt: skip
    return Attention().mask(**request | changes)


def test_a_mask_is_dense_only_to_those_who_compute_with_it() -> None:
    mask = step_mask()
    assert isinstance(mask, StepMask)
    assert (mask.shape, mask.dtype, mask.ndim) == ((2, 1, 3, 5), torch.bool, 4)
    assert mask.stride() == (0, 0, 0, 0)
    for same in (mask.contiguous(), mask.to("cpu"), mask.to(device=torch.device("cpu"))):
        assert same is mask
    dense = mask & torch.ones(5, dtype=torch.bool)
    assert type(dense) is torch.Tensor
    assert dense[0, 0].tolist() == [[True] * 3 + [False] * 2, [True] * 4 + [False], [True] * 5]
    assert torch.equal(mask[:, :, :, :4], dense[..., :4])
    assert torch.equal(mask.to(torch.float32), dense.float())
    assert "causal=True" in repr(mask)


def test_what_no_table_says_is_a_dense_mask_at_once() -> None:
    gap = torch.ones(2, 5).bool()
    gap[1, 3] = False  # between the three new tokens
    for mask in (step_mask(attention_mask=gap), step_mask(mask_function=lambda b, h, q, k: k > q)):
        assert type(mask) is torch.Tensor
        assert mask.shape == (2, 1, 3, 5)


def test_a_length_on_the_device_is_not_read() -> None:
    """A meta tensor has no value: reading it would raise."""
    request = mask_request(
        2, 1, 8, torch.tensor(3, device="meta"), 0, Pattern(True, 4), None, torch.device("meta")
    )
    for padding in (None, torch.ones(2, 8, dtype=torch.bool, device="meta")):
        step = make_step(replace(request, padding=padding))
        assert step is not None
        assert step.kv_lens.shape == (2,)
        assert (step.window is None) == (padding is not None)
