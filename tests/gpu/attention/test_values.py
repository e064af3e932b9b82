"""Values against float64 in poisoned pages: heads, dims, dtypes, pages, layouts, both paths."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import smkern
from tests.gpu.attention.cases import Case, Step, make_step
from tests.gpu.attention.support import (
    BACKENDS,
    MIXED,
    RAGGED,
    attend,
    counters_are_zero,
    make_plan,
    poison_partials,
    run,
)
from tests.gpu.attention.truth import check, truth
from tests.gpu.sides import at_most, sides

GROUPS = [(1, 1), (3, 3), (8, 8), (8, 4), (8, 2), (5, 1), (10, 2), (24, 3), (16, 1), (64, 8)]
LARGE_GROUPS = [(17, 1), (64, 1), (71, 1), (48, 2), (130, 1)]
"""Without a decode path: tiles of prefill have all of a token's rows, or half are without."""
DIMS = [64, 96, 128, 256]
DTYPES = [
    {"dtype": "bf16"}, {"dtype": "fp16"}, {"fp8": True}, {"dtype": "fp16", "fp8": True},
    {"fp8": True, "scales": "float"}, {"fp8": True, "scales": "tensor"},
]  # fmt: skip
PAGES = [1, 16, 32, 64, 128, 256]
LAYOUTS = ["nhd", "hnd", "paired", "mixed"]

VERIFY = Case(kv_lens=(8, 300, 17, 1000, 3, 513, 64, 9), q_lens=(8, 5, 1, 4, 3, 2, 7, 6))
PREFILL = Case(kv_lens=(100, 64, 9, 400), q_lens=(100, 64, 9, 200))
CHUNKED = Case(kv_lens=(1700, 256, 2048, 333), q_lens=(130, 128, 64, 9))
"""New tokens on a cached prefix."""
LONG = Case(kv_lens=(40_000, 33_000, 300), head_dim=64, q_heads=4, kv_heads=1)
"""Over 32,768 keys a piece is longer than 256."""
RESTS = Case(kv_lens=(513, 640, 641, 2049, 2176, 2177, 3072, 3073, 3328, 3329))
"""Keys behind the last whole piece: few enough to join it, or not."""
BUNDLES = Case(kv_lens=(16_640, 16_641, 40_000, 70_000), q_heads=8, kv_heads=2)
"""More than 16 pieces, which are merged by bundles of 8: 17 of them leave a last one alone."""
CUT = Case(kv_lens=(20_000, 9000, 50_000), q_lens=(40, 130, 9), head_dim=64, q_heads=4, kv_heads=1)
"""Prefill items whose keys are cut into pieces."""

CASES = [
    # decode
    Case(kv_lens=RAGGED),
    *(Case(q_heads=q, kv_heads=kv) for q, kv in GROUPS),
    *(Case(head_dim=dim) for dim in DIMS),
    *(Case(kv_lens=(200, 517), **dtype) for dtype in DTYPES),
    *(Case(head_dim=dim, fp8=True) for dim in (64, 96, 256)),
    *(Case(kv_lens=(*RAGGED, 3000), q_heads=q, kv_heads=kv) for q, kv in LARGE_GROUPS),
    *(Case(kv_lens=(40_000, 1025), q_heads=40, kv_heads=1, head_dim=dim) for dim in DIMS),
    Case(kv_lens=(2500, 33), q_heads=40, kv_heads=1, fp8=True),
    Case(kv_lens=(2500, 33), q_heads=40, kv_heads=1, window=700),
    RESTS,
    replace(RESTS, fp8=True),
    replace(RESTS, window=100),
    LONG,
    BUNDLES,
    replace(BUNDLES, q_heads=16, kv_heads=1, fp8=True),
    replace(BUNDLES, q_heads=16, kv_heads=1, head_dim=256, window=30_000),
    # pages and layouts
    *(Case(page_size=page) for page in PAGES),
    *(Case(page_size=page, flat=True, layout="hnd") for page in PAGES[::2]),
    *(Case(layout=layout) for layout in LAYOUTS),
    *(Case(layout=layout, fp8=True) for layout in LAYOUTS),
    Case(flat=True),
    replace(PREFILL, layout="hnd", flat=True),
    replace(PREFILL, layout="paired", page_size=64),
    replace(PREFILL, page_size=1),
    replace(CHUNKED, page_size=256),
    # verification
    VERIFY,
    replace(VERIFY, q_heads=16, kv_heads=2),
    replace(VERIFY, q_heads=5, kv_heads=1, dtype="fp16"),
    replace(VERIFY, q_heads=32, kv_heads=2),
    replace(VERIFY, q_heads=40, kv_heads=1),
    replace(VERIFY, head_dim=256),
    replace(VERIFY, fp8=True),
    *(Case(kv_lens=(70, 5, 600), q_lens=(q, 1, q)) for q in (2, 8)),
    # prefill and mixed
    PREFILL,
    CHUNKED,
    MIXED,
    CUT,
    replace(PREFILL, q_heads=3, kv_heads=3),
    replace(CHUNKED, q_heads=5, kv_heads=1),
    replace(CHUNKED, q_heads=16, kv_heads=1),
    *(replace(PREFILL, head_dim=dim) for dim in DIMS if dim != 128),
    *(replace(MIXED, head_dim=dim) for dim in DIMS if dim != 128),
    *(replace(MIXED, **dtype) for dtype in DTYPES[1:4]),
    replace(MIXED, fp8=True, scales="tensor", layout="hnd", flat=True),
]
"""Some are there twice."""


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", dict.fromkeys(CASES), ids=str)
def test_values(case, backend):
    run(case, backend=backend)


@pytest.mark.parametrize(
    "case", [Case(), VERIFY, PREFILL, MIXED, Case(fp8=True), Case(layout="mixed")], ids=str
)
def test_what_dispatch_takes(case):
    run(case)


@pytest.mark.parametrize("num_sms", [1, 2, 7, 16, 59, 131])
@pytest.mark.parametrize("case", [Case(kv_lens=RAGGED), VERIFY, MIXED], ids=["d", "v", "m"])
def test_budgets_by_the_grid(case, num_sms):
    run(case, num_sms=at_most(num_sms))


def test_budgets_by_the_mask():
    for partition in sides():
        for case in (Case(kv_lens=RAGGED), MIXED):
            with partition:
                step = make_step(case)
                attend(step)
            partition.synchronize()
            check(step)
            del step


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [Case(kv_lens=(5000, 300, 0, 900)), VERIFY, MIXED, CUT], ids=str)
def test_a_plan_serves_many_layers(case, backend):
    """The same plan again and again: every launch leaves its counters at zero."""
    first = make_step(case)
    plan = make_plan(first)
    for layer in range(3):
        step = first if layer == 0 else make_step(case)
        poison_partials(plan)
        attend(step, plan=plan, backend=backend)
        check(step)
        assert counters_are_zero(plan)


@pytest.mark.parametrize("case", [Case(), PREFILL], ids=["decode", "prefill"])
def test_no_output_asked_for(case):
    """The operator's own outputs: their shapes and dtypes, and the same bits."""
    step = make_step(case)
    attend(step)
    inputs = step.q, step.k_cache, step.v_cache, step.page_table, step.kv_lens
    out = smkern.paged_attention(*inputs, **step.options())
    again, lse = smkern.paged_attention(*inputs, return_lse=True, **step.options())
    owned = sum(case.queries)
    for got in (out, again):
        assert (got.shape, got.dtype) == (step.q.shape, step.q.dtype)
        assert torch.equal(got[:owned], step.out[:owned])
    assert (lse.shape, lse.dtype) == (step.lse.shape, torch.float32)
    assert torch.equal(lse[:owned], step.lse[:owned])


@pytest.mark.parametrize("case", [Case(kv_lens=(2000, 3000)), CHUNKED], ids=["decode", "prefill"])
def test_the_error_is_that_of_torch_in_the_same_dtype(case):
    step = run(case)
    want = truth(step).out
    owned = sum(case.queries)

    def rms(x: torch.Tensor) -> float:
        return (x[:owned].double() - want[:owned]).pow(2).mean().sqrt().item()

    ours, theirs = rms(step.out), rms(_plain_torch(step))
    assert ours <= 1.5 * theirs, f"rms error {ours:.3g}, torch's {theirs:.3g}"


def _plain_torch(step: Step) -> torch.Tensor:
    """Products in the inputs' dtype, the softmax in fp32: what eager attention does."""
    case, out, start = step.case, torch.empty_like(step.q), 0
    for request, q_len in enumerate(case.queries):
        rows = slice(start, start + q_len)
        start += q_len
        group = case.q_heads // case.kv_heads
        k = step.keys[request].repeat_interleave(group, 1).transpose(0, 1)
        v = step.values[request].repeat_interleave(group, 1).transpose(0, 1)
        scores = (step.q[rows].transpose(0, 1) @ k.transpose(1, 2)).float() * case.head_dim**-0.5
        position = len(step.keys[request]) - q_len + torch.arange(q_len, device=out.device)
        hidden = torch.arange(k.shape[1], device=out.device) > position[:, None]
        p = scores.masked_fill(hidden, float("-inf")).softmax(-1).to(v.dtype)
        out[rows] = (p @ v).transpose(0, 1)
    return out


def test_large_offsets_do_not_wrap():
    """Pages more than 2^32 elements from each other."""
    case = Case(kv_lens=(40, 33), q_heads=4, kv_heads=1, head_dim=64)
    step = make_step(case)
    far = 2**29 + 64
    for name in ("k_cache", "v_cache"):
        cache = getattr(step, name)
        pages, *rest = cache.shape
        room = torch.empty(
            (pages - 1) * far + rest[0] * rest[1] * rest[2], dtype=cache.dtype, device=cache.device
        )
        wide = room.as_strided(cache.shape, (far, *cache.stride()[1:]))
        wide.copy_(cache)
        setattr(step, name, wide)
    for backend in BACKENDS:
        step.poison_outputs()
        attend(step, backend=backend)
        check(step)
