"""Every option and every pair of options; which keys are seen, counted exactly; merged states."""

from __future__ import annotations

from dataclasses import replace
from math import inf, log

import pytest
import torch

import smkern
from tests.gpu.attention.cases import Case, as_integers, int32, make_step
from tests.gpu.attention.pairs import pairwise
from tests.gpu.attention.support import BACKENDS, MIXED, RAGGED, attend, run
from tests.gpu.attention.truth import check, truth, visible

PATHS = {
    "decode": {"kv_lens": (5, 40, 300, 1025)},
    "verify": {"kv_lens": (5, 40, 300, 1025), "q_lens": (3, 8, 1, 5)},
    "prefill": {"kv_lens": (70, 9, 300), "q_lens": (70, 9, 150)},
    "mixed": {"kv_lens": (70, 900, 300, 31), "q_lens": (70, 1, 40, 4)},
}
TABLE = {
    "path": list(PATHS),
    "causal": [True, False],
    "window": [None, 1, 33, 4000],
    "softcap": [None, 6.0],
    "sinks": [False, True],
    "scale": [None, 0.21, 0.02],
    "cache": [{}, {"dtype": "fp16"}, {"fp8": True, "scales": "float"},
              {"fp8": True, "scales": "tensor"}],
    "pages": [{"page_size": 16}, {"page_size": 64, "flat": True},
              {"page_size": 16, "layout": "hnd"}],
    "heads": [{}, {"q_heads": 5, "kv_heads": 1}],
}  # fmt: skip


def _case(row) -> Case:
    row = dict(row)
    named = PATHS[row.pop("path")] | row.pop("cache") | row.pop("pages") | row.pop("heads")
    return Case(**named, **row)


PAIRS = [_case(row) for row in pairwise(TABLE)]
SINGLES = [
    replace(MIXED, **change)
    for change in (
        {"causal": False}, {"window": 1}, {"window": 17}, {"window": 128}, {"softcap": 2.0},
        {"sinks": True}, {"scale": 0.3}, {"scale": 0.001}, {"causal": False, "window": 50},
    )
]  # fmt: skip
COUNTED = [
    Case(kv_lens=RAGGED),
    Case(kv_lens=RAGGED, window=16),
    Case(kv_lens=RAGGED, q_lens=(1, 2, 3, 4, 5, 6, 7, 8, 8, 1, 2, 3)),
    Case(kv_lens=RAGGED, q_lens=(1, 2, 3, 4, 5, 6, 7, 8, 8, 1, 2, 3), window=100),
    Case(kv_lens=RAGGED, q_lens=(1, 2, 3, 4, 5, 6, 7, 8, 8, 1, 2, 3), causal=False),
    Case(kv_lens=(9, 128, 129, 130, 257, 700), q_lens=(9, 128, 129, 11, 127, 65)),
    Case(kv_lens=(9, 128, 129, 130, 257, 700), q_lens=(9, 128, 129, 11, 127, 65), window=31),
    Case(kv_lens=(9, 128, 129, 130, 257, 700), q_lens=(9, 128, 129, 11, 127, 65), causal=False),
    Case(kv_lens=(9, 128, 129, 700), q_lens=(9, 128, 11, 65), causal=False, window=31),
    # more queries than keys: the first of them see nothing
    Case(kv_lens=(0, 3, 0, 1, 5, 100), q_lens=(1, 8, 8, 4, 40, 130)),
    replace(MIXED, page_size=1),
    replace(MIXED, page_size=256, q_heads=5, kv_heads=1),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [*PAIRS, *SINGLES], ids=str)
def test_options(case, backend):
    run(case, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", COUNTED, ids=str)
def test_exactly_the_visible_keys_are_seen(case, backend):
    """Queries of zeros weigh all keys alike: the lse is the log of how many a query sees."""
    step = run(case, sharp=0.0, backend=backend)
    start = 0
    for request, q_len in enumerate(case.queries):
        count = visible(case, q_len, case.kv_lens[request], step.q.device).sum(1)
        got = step.lse[start : start + q_len].double()
        want = count.double().log()[:, None].expand_as(got)
        far = (got.exp() - want.exp()).abs() > 0.1
        assert not far.any(), f"{case}: request {request} saw {got.exp()[far]} of {want.exp()[far]}"
        start += q_len


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sinks", [False, True])
def test_rows_that_see_no_key(sinks, backend):
    """Zeros, and an lse of -inf, or the head's sink."""
    case = Case(kv_lens=(0, 2, 0, 30, 0), q_lens=(1, 8, 40, 64, 3), sinks=sinks)
    step = make_step(case)
    attend(step, backend=backend)
    check(step)
    device = step.q.device
    seen = [
        visible(case, q, kv, device).any(1)
        for q, kv in zip(case.queries, case.kv_lens, strict=True)
    ]
    blind = (~torch.cat(seen)).nonzero().flatten()
    assert len(blind) == 1 + 6 + 40 + 34 + 3
    assert not step.out[blind].any()
    want = step.sinks if sinks else torch.full((case.q_heads,), -inf, device=step.q.device)
    assert torch.allclose(step.lse[blind], want.expand(len(blind), -1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [Case(kv_lens=(5, 300, 2000)), MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("window", [1, 40, 300])
def test_pages_below_the_window_may_be_gone(case, window, backend):
    """A sliding window's engine hands whole pages back: they hold NaN, their ids are junk."""
    case = replace(case, window=window)
    step = make_step(case)
    for request, q_len in enumerate(case.queries):
        gone = max(0, case.kv_lens[request] - q_len - window + 1) // case.page_size
        pages = step.page_table[request, :gone].long()
        for cache in (step.k_cache, step.v_cache):
            as_integers(cache)[pages] = 0x7FFF
        step.page_table[request, :gone] = int32([-5, 2**31 - 1] * gone)[:gone]
    attend(step, backend=backend)
    check(step)


@pytest.mark.parametrize("backend", BACKENDS)
def test_device_scales_may_change_between_launches(backend):
    """Read by the kernel, not by the host: a captured graph follows a calibration."""
    step = make_step(Case(fp8=True, scales="tensor"))
    for k_scale, v_scale in ((1.0, 1.0), (0.25, 3.0)):
        step.k_scale.fill_(k_scale)
        step.v_scale.fill_(v_scale)
        attend(step, backend=backend)
        check(step)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_logits_do_not_overflow(backend):
    for case in (Case(scale=20.0), replace(MIXED, scale=20.0), replace(MIXED, softcap=80.0)):
        step = make_step(case, sharp=4.0)
        attend(step, backend=backend)
        assert torch.isfinite(step.out[: sum(case.queries)]).all()
        check(step)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("parts", [2, 3, 7])
def test_merged_parts_are_the_whole(parts, dtype):
    """Attention over disjoint ranges of the keys, each on its own, merged."""
    lengths = (40, 300, 1000)
    case = Case(kv_lens=lengths, dtype=dtype, page_size=1, causal=False)
    whole = make_step(case)
    attend(whole)
    outs = torch.empty((parts, *whole.out.shape), dtype=whole.out.dtype, device=whole.out.device)
    lses = torch.empty((parts, *whole.lse.shape), device=whole.out.device)
    cuts = [[length * i // parts for length in lengths] for i in range(parts + 1)]
    cuts[1] = cuts[0]  # the first part is empty
    for i in range(parts):
        table = torch.zeros_like(whole.page_table)
        for request, (begin, end) in enumerate(zip(cuts[i], cuts[i + 1], strict=True)):
            table[request, : end - begin] = whole.page_table[request, begin:end]
        counts = [end - begin for begin, end in zip(cuts[i], cuts[i + 1], strict=True)]
        smkern.paged_attention(
            whole.q, whole.k_cache, whole.v_cache, table, int32(counts), out=outs[i], lse=lses[i],
            return_lse=True, causal=False,
        )  # fmt: skip
    check(whole)
    for given in (outs, list(outs)):
        out, lse = smkern.merge_states(given, lses if given is outs else list(lses))
        # each part was rounded once more than the whole
        _close(out, truth(whole).out, 4 * torch.finfo(out.dtype).eps)
        assert torch.allclose(lse.double(), truth(whole).lse, atol=1e-3)


def _close(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    error = (got.double() - want).abs().max().item()
    assert error <= tolerance * max(1.0, want.abs().max().item()), error


@pytest.mark.parametrize("num_sms", [None, 5])
@pytest.mark.parametrize("shape", [(1, 1, 1, 64), (2, 33, 5, 96), (8, 7, 16, 256), (3, 0, 4, 128)])
def test_merge_states_against_float64(shape, num_sms):
    parts, tokens, heads, _ = shape
    outs = torch.randn(shape, device="cuda").bfloat16()
    lses = 3 * torch.randn(parts, tokens, heads, device="cuda")
    lses[0] = -inf
    outs[0] = float("nan")  # of a part that saw no key nothing is read
    out = torch.full(shape[1:], float("nan"), dtype=outs.dtype, device="cuda")
    lse = torch.full(shape[1:3], float("nan"), device="cuda")
    got = smkern.merge_states(outs, lses, out=out, lse=lse, num_sms=num_sms)
    assert got[0] is out
    assert got[1] is lse
    want_lse = lses.double().logsumexp(0)
    weight = (lses.double() - want_lse).exp().nan_to_num(0.0)[..., None]
    want = torch.where(weight > 0, weight * outs.double(), 0.0).sum(0)
    assert ((out.double() - want).abs() <= 2**-8 * 1.1 * want.abs() + 1e-4).all()
    assert torch.allclose(lse.double(), want_lse, rtol=1e-6, atol=1e-5)


def test_merged_lse_of_equal_parts():
    outs = torch.ones(4, 2, 3, 64, device="cuda").bfloat16()
    out, lse = smkern.merge_states(outs, torch.zeros(4, 2, 3, device="cuda"))
    assert (out == 1).all()
    assert torch.allclose(lse, torch.full_like(lse, log(4)))
