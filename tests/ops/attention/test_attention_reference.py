"""The plain-torch attention against torch's own, and against the definition in float64."""

from __future__ import annotations

from itertools import pairwise, starmap
from math import inf

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from smkern.ops.reference import attention as reference
from tests.ops.attention.by_hand import attention_by_hand
from tests.ops.attention.cases import FP8, Case, make

SMALL = Case(lengths=((1, 5), (2, 7), (0, 3), (4, 3), (3, 0)), head_dim=8, page_size=4)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("page_size", [1, 16])
def test_against_torchs_own(causal, flat, heads_first, page_size):
    case = Case(flat=flat, heads_first=heads_first, page_size=page_size, dtype=torch.float32)
    made = make(case)
    out, _ = reference.paged_attention(*made.args, causal=causal, **made.options)
    for (start, end), k, v in zip(made.ranges, made.keys, made.values, strict=True):
        q = made.args[0][start:end].transpose(0, 1)
        mask = torch.ones(end - start, k.shape[0], dtype=torch.bool)
        if causal:
            mask = mask.tril(k.shape[0] - (end - start))
        want = scaled_dot_product_attention(
            q, k.transpose(0, 1), v.transpose(0, 1), attn_mask=mask, enable_gqa=True
        )
        torch.testing.assert_close(out[start:end], want.transpose(0, 1))


def by_hand(made):
    names = ("causal", "scale", "window", "softcap", "sinks", "k_scale", "v_scale")
    options = {name: made.options[name] for name in names if name in made.options}
    spans = starmap(range, made.ranges)
    return attention_by_hand(made.args[0], made.keys, made.values, spans, **options)


OPTIONS = [
    {},
    {"causal": False},
    {"scale": 0.3},
    {"window": 2},
    {"window": 2, "causal": False},
    {"window": 100},
    {"softcap": 0.5},
    {"sinks": True},
    {"sinks": True, "softcap": 2.0, "window": 3, "scale": 1.5},
]


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_against_the_definition(options, flat):
    case = Case(SMALL.lengths, head_dim=8, page_size=4, flat=flat, options=options)
    made = make(case)
    want, want_lse = by_hand(made)
    out, lse = reference.paged_attention(*made.args, **made.options, compute_dtype=torch.float64)
    torch.testing.assert_close(lse, want_lse, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(out.double(), want, rtol=1e-3, atol=1e-6)
    rough, rough_lse = reference.paged_attention(*made.args, **made.options)
    assert (rough.dtype, rough_lse.dtype) == (torch.float16, torch.float32)
    torch.testing.assert_close(rough, out, rtol=2e-3, atol=1e-4)
    torch.testing.assert_close(rough_lse.double(), lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scales", [(None, None), (0.5, 3.0), (torch.tensor([2.0]), 0.25)])
def test_fp8_caches_with_scales(scales):
    k_scale, v_scale = scales
    options = {"k_scale": k_scale, "v_scale": v_scale}
    case = Case(SMALL.lengths, head_dim=8, page_size=4, cache_dtype=FP8, options=options)
    made = make(case)
    want, want_lse = by_hand(made)
    out, lse = reference.paged_attention(*made.args, **made.options, compute_dtype=torch.float64)
    torch.testing.assert_close(lse, want_lse, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(out.double(), want, rtol=1e-3, atol=1e-6)


def test_a_query_without_keys_gives_zero_and_its_sink():
    made = make(Case(lengths=((3, 0), (4, 2)), head_dim=8))
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    out, lse = reference.paged_attention(*made.args, **made.options)
    assert (out[:5] == 0).all()
    assert (lse[:5] == -inf).all()
    out, lse = reference.paged_attention(*made.args, **made.options, sinks=sinks)
    assert (out[:5] == 0).all()
    assert torch.equal(lse[:5], sinks.expand(5, 4))


def test_tokens_of_no_request_are_not_written():
    made = make(Case(lengths=((2, 4), (1, 6)), head_dim=8))
    q, *rest = made.args
    q = torch.cat([q, q])
    out = torch.full_like(q, 7.0)
    lse = torch.full((6, 4), 7.0)
    got, _ = reference.paged_attention(q, *rest, **made.options, out=out, lse=lse)
    assert got is out
    assert (out[3:] == 7).all()
    assert (lse[3:] == 7).all()
    assert (out[:3] != 7).all()


def test_what_is_out_of_range_is_clamped():
    made = make(Case(lengths=((1, 6), (1, 3)), page_size=4, head_dim=8, dtype=torch.float32))
    q, k_cache, v_cache, _, _ = made.args
    k_cache, v_cache = k_cache.nan_to_num(1.0), v_cache.nan_to_num(1.0)
    wild = torch.tensor([[10**6, -5], [0, 10**6]], dtype=torch.int32)
    tame = torch.tensor([[k_cache.shape[0] - 1, 0], [0, k_cache.shape[0] - 1]], dtype=torch.int32)
    lengths = torch.tensor([8, -3], dtype=torch.int32)
    got = reference.paged_attention(q, k_cache, v_cache, wild, lengths)
    want = reference.paged_attention(q, k_cache, v_cache, tame, lengths)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    longer = torch.tensor([30, -3], dtype=torch.int32)
    again, _ = reference.paged_attention(q, k_cache, v_cache, wild, longer, max_kv_len=8)
    assert torch.equal(again, want[0])
    again, _ = reference.paged_attention(q, k_cache, v_cache, wild, longer)
    assert again.isfinite().all()


def test_long_contexts_are_walked_in_chunks(monkeypatch):
    made = make(Case(dtype=torch.float32))
    want = reference.paged_attention(*made.args, **made.options)
    monkeypatch.setattr(reference, "_MAX_SCORES", 300)
    got = reference.paged_attention(*made.args, **made.options)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_merged_parts_are_attention_over_their_union(parts):
    q, k, v = torch.randn(3, 4, 8), torch.randn(2, 20, 8), torch.randn(2, 20, 8)
    cuts = torch.linspace(0, 20, parts + 1).int().tolist()
    options = {"causal": False, "window": None, "softcap": None, "sinks": None}
    states = [
        reference.attend(q, k[:, a:b], v[:, a:b], torch.full((3,), 20), a, **options)
        for a, b in pairwise(cuts)
    ]
    outs, lses = (torch.stack(x) for x in zip(*states, strict=True))
    out, lse = reference.merge_states(outs, lses)
    want, want_lse = reference.attend(q, k, v, torch.full((3,), 20), 0, **options)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)


def test_a_part_that_saw_no_key_counts_for_nothing():
    outs = torch.randn(2, 3, 4, 8, dtype=torch.float16)
    lses = torch.randn(2, 3, 4)
    outs[0, 1], lses[0, 1] = float("nan"), -inf
    lses[:, 2] = -inf
    out, lse = reference.merge_states(outs, lses)
    assert torch.equal(out[1], outs[1, 1])
    assert torch.equal(lse[1], lses[1, 1])
    assert (out[2] == 0).all()
    assert (lse[2] == -inf).all()
    into, log = outs[1].clone(), torch.empty(3, 4)
    reference.merge_states(outs, lses, out=into, lse=log)
    assert torch.equal(into, out)
    assert torch.equal(log, lse)
