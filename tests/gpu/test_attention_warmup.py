"""After `smkern.warmup` attention, plans, merges and appends load nothing on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import smkern

FP8 = torch.float8_e4m3fn
CALLS = smkern.AttentionCalls(
    num_q_heads=12, num_kv_heads=4, head_dim=64, page_size=32, max_q_len=300
)
STEPS = [
    [(1, 40)],
    [(1, 900)] * 70,
    [(2, 33), (1, 4)],
    [(8, 8), (5, 2000), (0, 3)],
    [(300, 300)],
    [(40, 1000), (1, 77), (1, 78), (3, 600)],
]


def step(calls, lengths):
    """Arguments and options of a call on random tensors."""
    q_lens, kv_lens = zip(*lengths, strict=True)
    pages = -(-max(kv_lens) // calls.page_size)
    cache = torch.randn(
        2, len(lengths) * pages, calls.page_size, calls.num_kv_heads, calls.head_dim, device="cuda"
    ).to(calls.cache_dtype or calls.dtype)
    table = torch.arange(len(lengths) * pages, device="cuda").int().view(len(lengths), pages)
    q = torch.randn(sum(q_lens), calls.num_q_heads, calls.head_dim, device="cuda")
    options = {}
    if max(q_lens) > 1:
        starts = torch.tensor([0, *q_lens]).cumsum(0).int().cuda()
        options = {"cu_q_lens": starts, "max_q_len": max(q_lens)}
    lens = torch.tensor(kv_lens, dtype=torch.int32, device="cuda")
    return (q.to(calls.dtype), *cache.unbind(), table, lens), options


@pytest.mark.parametrize("cache_dtype", [None, FP8])
def test_a_serving_loop_after_a_warmup_loads_nothing(cache_dtype):
    calls = replace(CALLS, cache_dtype=cache_dtype)
    report = smkern.warmup(attention=[calls], budgets=[16], progress=False)
    assert report.launched
    assert report.variants
    before = smkern.counters()
    for lengths in STEPS:
        args, options = step(calls, lengths)
        for num_sms in (16, 17, None):
            plan = smkern.plan_attention(
                args[4], num_q_heads=12, num_kv_heads=4, head_dim=64, page_size=32,
                max_kv_len=2048, num_sms=num_sms, **options,
            )  # fmt: skip
            out, lse = smkern.paged_attention(
                *args, **options, plan=plan, return_lse=True, num_sms=num_sms
            )
            smkern.merge_states([out, out], [lse, lse], num_sms=num_sms)
            assert out.isfinite().all()
    again, _ = smkern.paged_attention(*args, **options, return_lse=True)
    assert torch.equal(again, out)
    assert smkern.counters() == before


def test_a_capture_after_a_warmup_needs_no_call_before():
    """In a budget that nobody named."""
    smkern.warmup(attention=[CALLS], budgets=[16], progress=False)
    args, options = step(CALLS, STEPS[-1])
    want = smkern.paged_attention(*args, **options)
    out = torch.zeros_like(want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        smkern.paged_attention(*args, **options, out=out, num_sms=24)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, want)


@pytest.mark.parametrize("cache_dtype", [None, FP8])
def test_appends_after_a_warmup_load_nothing(cache_dtype):
    calls = smkern.AppendCalls(12, 4, 64, 32, rotary_dim=64, norm=True, cache_dtype=cache_dtype)
    smkern.warmup(append=[calls], budgets=[16], progress=False)
    before = smkern.counters()
    weight = torch.ones(64, dtype=calls.dtype, device="cuda")
    cos_sin = torch.zeros(2048, 64, device="cuda")
    for lengths in STEPS:
        args, options = step(replace(CALLS, cache_dtype=cache_dtype), lengths)
        q, *rest = args
        k, v = torch.randn(2, q.shape[0], 4, 64, device="cuda").to(q.dtype).unbind()
        ragged = {"cu_q_lens": options["cu_q_lens"]} if options else {}
        for num_sms in (16, 17, None):
            smkern.qk_norm_rope_append(
                q, k, v, *rest, cos_sin=cos_sin, q_norm=weight,
                k_norm=weight, num_sms=num_sms, **ragged,
            )  # fmt: skip
    assert smkern.counters() == before
