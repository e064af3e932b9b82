"""The append operators on a GPU: values, untouched memory, budgets, graphs, bits, bad input."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

import smkern
from smkern.errors import ArgumentError, WarmupError
from smkern.ops.reference import append as reference
from smkern.rope import Rope, Yarn
from tests.gpu.append_support import (
    check,
    cloned,
    close,
    on_host,
    precompile,
    run,
    run_plain,
    same_bits,
)
from tests.gpu.attention.cases import fresh_seed
from tests.gpu.sides import neighbours
from tests.ops.append_cases import FP8, Case, make, plain_options

RAGGED = ((1, 40), (300, 411), (0, 5), (8, 8), (1, 1), (0, 0), (129, 900), (2, 17))
BASE = Case(RAGGED, q_heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16,
            rope=Rope(128, 5e5), norm=True)  # fmt: skip
DECODE = replace(BASE, requests=tuple((1, n) for n in (1, 17, 900, 64, 33, 0, 5)))
SCALES = {"k_scale": 0.037, "v_scale": 2.5}
CASES = {
    "all": BASE,
    "decode": DECODE,
    "fp16": replace(BASE, dtype=torch.float16),
    "no-norm": replace(BASE, norm=False),
    "no-rope": replace(BASE, rope=None),
    "neither": replace(BASE, rope=None, norm=False),
    "partial": replace(BASE, rope=Rope(64, scaling=Yarn(4.0, 64))),
    "odd-partial": replace(BASE, rope=Rope(20)),
    "interleaved": replace(BASE, rope=Rope(128, interleaved=True)),
    "interleaved-partial": replace(BASE, rope=Rope(32, interleaved=True)),
    "64": replace(BASE, head_dim=64, rope=Rope(64)),
    "96": replace(BASE, head_dim=96, rope=Rope(96)),
    "96-interleaved": replace(BASE, head_dim=96, rope=Rope(96, interleaved=True)),
    "256": replace(BASE, head_dim=256, rope=Rope(128), q_heads=8, kv_heads=4),
    "few-heads": replace(BASE, q_heads=3, kv_heads=1),
    "odd-heads": replace(BASE, q_heads=14, kv_heads=7),
    "page-1": replace(BASE, page_size=1),
    "page-256": replace(BASE, page_size=256),
    "flat": replace(BASE, flat=True),
    "heads-first": replace(BASE, heads_first=True),
    "fp8": replace(BASE, cache_dtype=FP8, options=SCALES),
    "fp8-decode": replace(DECODE, cache_dtype=FP8, heads_first=True),
}
EACH = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
SOME = ("all", "decode", "interleaved", "fp8", "256")
A_FEW = pytest.mark.parametrize("case", [CASES[name] for name in SOME], ids=SOME)


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    if torch.cuda.is_available():
        precompile(CASES.values())


@EACH
def test_values(case):
    run(case)


@EACH
def test_plain_append(case):
    run_plain(case)


@A_FEW
@pytest.mark.parametrize("num_sms", [1, 7, 48])
def test_any_budget(case, num_sms):
    run(case, num_sms=num_sms)
    run_plain(case, num_sms=num_sms)


def test_random_batches():
    seed = fresh_seed()
    chance = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(25):
        requests = []
        for _ in range(chance.choice([1, 2, 5, 33, 70])):
            q_len = chance.choice([0, 1, 1, 2, 8, chance.randrange(1, 200)])
            requests.append((q_len, q_len + chance.choice([0, 1, 15, 16, chance.randrange(500)])))
        name = chance.choice(["all", "flat", "fp8", "interleaved", "heads-first"])
        run(replace(CASES[name], requests=tuple(requests)))
        run_plain(replace(CASES[name], requests=tuple(requests)))


def test_a_scale_on_the_device():
    scales = {
        "k_scale": torch.tensor([0.037], device="cuda"),
        "v_scale": torch.tensor(2.5, device="cuda"),
    }
    run(replace(CASES["fp8"], options=scales))
    run_plain(replace(CASES["fp8"], options=scales))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions(dtype):
    where = torch.randint(-5, 1000, (sum(n for n, _ in RAGGED),)).to(dtype)
    run(replace(BASE, options={"positions": where.cuda()}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tables_and_weights_of_either_dtype(dtype):
    made = make(BASE, "cuda")
    options = made[1] | {name: made[1][name].to(dtype) for name in ("cos_sin", "q_norm", "k_norm")}
    made = made[0], options
    before = cloned(made)
    out = smkern.qk_norm_rope_append(*made[0], **made[1])
    check(before, made, out)


def test_in_place():
    made = make(BASE, "cuda")
    before = cloned(made)
    q = made[0][0]
    assert smkern.qk_norm_rope_append(*made[0], **made[1], out=q) is q
    got = q.clone()
    q.copy_(before[0][0])
    check(before, made, got)


def test_rows_that_are_not_whole_16_bytes():
    """A matrix of odd pitch, and a table too: other code, right values."""
    args, options = make(BASE, "cuda")
    tokens, heads, dim = BASE.tokens, 48, 128
    qkv = torch.randn(tokens, heads * dim + 3, device="cuda").bfloat16()[:, : heads * dim]
    rows = qkv.unflatten(1, (heads, dim)).split([32, 8, 8], 1)
    table = torch.zeros(options["cos_sin"].shape[0], 129, device="cuda")[:, :128]
    table.copy_(options["cos_sin"])
    made = (*rows, *args[3:]), options | {"cos_sin": table}
    before = cloned(made)
    out = torch.full(rows[0].shape, torch.nan, device="cuda").bfloat16()
    smkern.qk_norm_rope_append(*made[0], **made[1], out=out)
    check(before, made, out)


@pytest.mark.parametrize("dim", [1, 2, 3, 4])
def test_caches_that_are_halves_of_one_buffer(dim):
    made = make(BASE, "cuda")
    pages, size, heads, width = made[0][3].shape
    shape = [pages, size, heads, width]
    if dim == 4:
        shape[3] = 2 * width
        both = torch.full(shape, torch.nan, device="cuda").bfloat16()
        caches = both[..., :width], both[..., width:]
    else:
        shape.insert(dim, 2)
        caches = torch.full(shape, torch.nan, device="cuda").bfloat16().unbind(dim)
    args, options = cloned(made)
    want = smkern.qk_norm_rope_append(*args, **options)
    got = smkern.qk_norm_rope_append(*made[0][:3], *caches, *made[0][5:], **options)
    assert same_bits(got, want)
    for x, y in zip(caches, args[3:5], strict=True):
        assert same_bits(x, y)


def test_a_graph_serves_changing_lengths():
    chance = random.Random(fresh_seed())
    made = make(BASE, "cuda")
    args, options = made
    fresh = cloned(made)[0][3:5]
    out = torch.empty_like(args[0])
    smkern.qk_norm_rope_append(*args, **options, out=out)
    before = smkern.counters()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        smkern.qk_norm_rope_append(*args, **options, out=out)
    batch, room = len(RAGGED), args[5].shape[1] - 1
    for _ in range(8):
        cuts = sorted(chance.randrange(BASE.tokens + 1) for _ in range(batch))
        q_lens = [b - a for a, b in zip([0, *cuts], cuts, strict=False)]
        lens = [chance.randrange(n, max(n, room * 16) + 1) for n in q_lens]
        pages = torch.randperm(args[3].shape[0])[: args[5].shape[1] * 2]
        args[5].copy_(pages.repeat(args[5].numel())[: args[5].numel()].view_as(args[5]))
        # no two requests share a page that is written: all but one are empty or alone in the table
        owner = chance.randrange(batch)
        args[5][torch.arange(batch) != owner] = -1
        args[6].copy_(torch.tensor(lens, dtype=torch.int32))
        options["cu_q_lens"].copy_(torch.tensor([0, *cuts], dtype=torch.int32))
        args[0].normal_()
        args[1].normal_()
        for x, y in zip(args[3:5], fresh, strict=True):
            x.copy_(y)
        out.fill_(torch.nan)
        same = cloned(made)
        graph.replay()
        check(same, made, out)
    assert smkern.counters() == before


def test_a_capture_that_would_load_a_kernel_is_refused():
    made = make(replace(BASE, q_heads=10, kv_heads=5), "cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(WarmupError, match="once before"), torch.cuda.graph(graph):
        smkern.qk_norm_rope_append(*made[0], **made[1])


def alone(made, case, request):
    """One request of a call, over the same pages."""
    args, options = made
    ends = torch.tensor([0, *(n for n, _ in case.requests)]).cumsum(0).tolist()
    rows = slice(ends[request], ends[request + 1])
    q_len = rows.stop - rows.start
    changed = {"cu_q_lens": torch.tensor([0, q_len], dtype=torch.int32, device="cuda")}
    one = slice(request, request + 1)
    parts = (*(x[rows] for x in args[:3]), *args[3:5], args[5][one], args[6][one])
    return rows, (parts, options | changed)


@A_FEW
def test_a_row_alone_has_the_same_bits(case):
    """Each request alone, in other budgets, in partitions, beside a neighbour."""
    made, out = run(case)
    caches = cloned(made)[0][3:5]
    for request in range(len(case.requests)):
        rows, (args, options) = alone(made, case, request)
        for num_sms in (None, 1, 16):
            got = smkern.qk_norm_rope_append(*args, **options, num_sms=num_sms)
            assert same_bits(got, out[rows]), f"request {request} on {num_sms} SMs"
    for x, y in zip(made[0][3:5], caches, strict=True):
        assert same_bits(x, y)
    noise = torch.randn(2048, 2048, device="cuda").bfloat16()
    torch.cuda.synchronize()
    for side, other in neighbours():
        got = torch.full_like(out, torch.nan)
        made[0][3].view(torch.uint8).fill_(0)
        torch.cuda.synchronize()
        with other:
            busy = [noise @ noise for _ in range(5)]
        with side:
            smkern.qk_norm_rope_append(*made[0], **made[1], out=got)
        side.synchronize()
        other.synchronize()
        del busy
        assert same_bits(got, out)
        written = ~caches[0].float().isnan()
        assert torch.equal(made[0][3].float()[written], caches[0].float()[written])


@pytest.mark.parametrize("flat", [False, True])
def test_garbage_writes_only_to_pages(flat):
    """Lengths, ranges and tables of garbage: what has no page is skipped, as by the reference."""
    made = make(replace(BASE, flat=flat), "cuda")
    args, options = made
    table = args[5]
    junk = torch.tensor([-1, 2**31 - 1, 1 << 20], dtype=torch.int32, device="cuda")
    table.view(-1)[::2] = junk.repeat(table.numel())[: table.view(-1)[::2].numel()]
    if not flat:  # each page once, or two requests would race
        table[1:] = -1
    args[6].copy_(torch.tensor([2**31 - 1, -7, 0, 2000, 33, 5, 900, -(2**31)], dtype=torch.int32))
    if flat:
        bounds = torch.tensor([-9, 2**31 - 1, 3, 2, 10**6, 0, 9, 20, 4], dtype=torch.int32)
        options["page_indptr"].copy_(bounds)
    same = on_host(cloned(made))
    smkern.qk_norm_rope_append(*args, **options)
    torch.cuda.synchronize()
    if not flat:
        reference.qk_norm_rope_append(*same[0], **same[1])
        close(args[3], same[0][3], "k_cache")
    if "cu_q_lens" in options:
        cu = torch.tensor([-5, 30, 2, 10**6, 3, 2**31 - 1, -1, 0, 7], dtype=torch.int32)
        options["cu_q_lens"].copy_(cu)
    smkern.qk_norm_rope_append(*args, **options)
    smkern.append_kv(*args[1:], **plain_options(options))
    torch.cuda.synchronize()


def test_check_reads_the_device():
    args, options = make(BASE, "cuda")
    args[5][1, 25] = 10**6
    with pytest.raises(ArgumentError, match="of request 1, entry 25"):
        smkern.qk_norm_rope_append(*args, **options, check=True)
