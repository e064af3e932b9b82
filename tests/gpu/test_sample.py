"""The sampler on a GPU: tokens, budgets, batches, state, graphs, distributions, bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import smkern
from smkern.errors import ArgumentError, WarmupError
from smkern.ops.reference import sample as reference
from smkern.ops.sample.call import Sample, choices_of
from tests.gpu.sample_support import precompile
from tests.gpu.sides import sides
from tests.ops.sample_cases import (
    DTYPES,
    KINDS,
    fits,
    logits_of,
    odd_rows,
    options_of,
    shares_of,
    wrong_rows,
)

EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
EACH_KIND = pytest.mark.parametrize("kind", KINDS)
VOCABS = (1, 7, 1000, 4096, 4097, 32_003, 128_256, 151_936, 262_144)
FLAT_TOO = (4097, 151_936)
"""Where logits that hardly differ are tried too: the host's reference sorts all of them."""


@pytest.fixture(scope="module", autouse=True)
def _compiled():
    if torch.cuda.is_available():
        precompile()


def draw(logits: Tensor, **options: Any) -> Tensor:
    """Tokens into an output that was poisoned."""
    out = torch.full((logits.shape[0],), -7, dtype=torch.int32, device="cuda")
    assert smkern.sample(logits, **options, out=out) is out
    return out


def one_row(options: dict[str, Any], row: int) -> dict[str, Any]:
    """The parameters of a row alone."""
    return {name: x[row : row + 1] if isinstance(x, Tensor) else x for name, x in options.items()}


@EACH_DTYPE
@EACH_KIND
def test_values(dtype, kind):
    """Spread and flat logits; the token is the reference's but where rounding decides."""
    same = rows = 0
    for vocab in VOCABS:
        options = options_of(kind, 6, "cuda")
        on_host = options_of(kind, 6)
        for spread in (3.0, 0.1, 0.0) if vocab in FLAT_TOO else (3.0,):
            logits = logits_of(6, vocab, dtype, spread)
            got = draw(logits.cuda(), **options).cpu()
            assert not wrong_rows(logits, got, **on_host), (vocab, spread)
            want = reference.sample(logits, choices_of(Sample(logits, **on_host)))
            same, rows = same + int((got == want).sum()), rows + 6
    assert same >= (1.0 if kind == "greedy" else 0.9) * rows


@EACH_KIND
def test_many_rows(kind):
    logits, on_host = logits_of(512, 5000, torch.bfloat16), options_of(kind, 512)
    got = draw(logits.cuda(), **options_of(kind, 512, "cuda"))
    assert not wrong_rows(logits, got.cpu(), **on_host)


@EACH_DTYPE
@EACH_KIND
def test_odd_rows(dtype, kind):
    logits = odd_rows(dtype)
    got = draw(logits.cuda(), **options_of(kind, 8, "cuda"))
    assert not wrong_rows(logits, got.cpu(), **options_of(kind, 8))


@EACH_DTYPE
def test_rows_that_are_apart_or_not_whole_16_bytes(dtype):
    wide = logits_of(6, 40_000, dtype)
    at = wide.cuda()
    for begin, end in ((0, 39_003), (1, 39_003), (8, 39_000)):
        got = draw(at[:, begin:end], **options_of("mixed", 6, "cuda"))
        assert not wrong_rows(wide[:, begin:end], got.cpu(), **options_of("mixed", 6))


def test_equal_logits_keep_the_lowest_ids():
    logits = torch.zeros(4096, 9000, device="cuda", dtype=torch.bfloat16)
    tokens = draw(logits, temperature=1.0, top_k=5, seeds=torch.arange(4096, device="cuda"))
    assert sorted(set(tokens.tolist())) == [0, 1, 2, 3, 4]
    assert not draw(logits, temperature=1.0, top_p=1e-6, seeds=3).any()


@EACH_KIND
def test_no_budget_changes_a_token(kind):
    logits = logits_of(20, 151_936, torch.bfloat16, 1.0).cuda()
    options = options_of(kind, 20, "cuda")
    want = draw(logits, **options)
    for num_sms in (1, 7, 16, 48, 100):
        assert torch.equal(draw(logits, **options, num_sms=num_sms), want), num_sms
    for partition in sides():
        torch.cuda.synchronize()
        with partition:
            got = smkern.sample(logits, **options)
        partition.synchronize()
        assert torch.equal(got, want), partition.num_sms


@EACH_KIND
def test_no_batch_changes_a_token(kind):
    logits = logits_of(131, 32_000, torch.bfloat16, 1.0).cuda()
    options = options_of(kind, 131, "cuda")
    want = draw(logits, **options)
    for row in (0, 1, 2, 3, 4, 5, 77, 130):
        assert torch.equal(
            draw(logits[row : row + 1], **one_row(options, row)), want[row : row + 1]
        )
    half = {name: x[60:] if isinstance(x, Tensor) else x for name, x in options.items()}
    assert torch.equal(draw(logits[60:], **half), want[60:])
    for _ in range(5):
        assert torch.equal(draw(logits, **options), want)


DISTRIBUTIONS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 3.0},
    "top-k": {"temperature": 1.0, "top_k": 40},
    "top-p": {"temperature": 1.2, "top_p": 0.8},
    "min-p": {"temperature": 1.0, "min_p": 0.05},
    "all": {"temperature": 1.5, "top_k": 60, "top_p": 0.9, "min_p": 0.02},
    "wide": {"temperature": 2.0, "top_k": 6000},
}


@pytest.mark.parametrize("spread", [2.0, 0.3])
@pytest.mark.parametrize("options", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_distributions(options, spread):
    """16384 draws of one row, seeds or steps counting up."""
    rows = 16_384
    logits = logits_of(1, 9000, torch.bfloat16, spread)
    shares = shares_of(logits[0], reference.Choice(**options))
    many = logits.cuda().expand(rows, -1)
    counting = torch.arange(rows, device="cuda")
    by_seed = draw(many, **options, seeds=counting).cpu()
    by_step = draw(many, **options, seeds=9, steps=counting.int()).cpu()
    assert fits(by_seed, shares)
    assert fits(by_step, shares)
    assert not torch.equal(by_seed, by_step)


def state_of(rows: int, first: Tensor) -> dict[str, Any]:
    lengths = torch.arange(3, 3 + rows, dtype=torch.int32, device="cuda")
    stop = torch.full((rows, 3), -1, dtype=torch.int32, device="cuda")
    stop[0, 2] = first[0]
    finished = torch.zeros(rows, dtype=torch.bool, device="cuda")
    finished[1] = True
    return {"finished": finished, "lengths": lengths, "steps": lengths, "pad_token": -9,
            "max_lengths": lengths + 4, "stop_tokens": stop}  # fmt: skip


def test_a_graph_draws_on_and_ends_rows():
    """Replays draw what the reference draws step by step: lengths are the steps."""
    rows = 6
    on_host = logits_of(rows, 50_000, torch.bfloat16)
    logits = on_host.cuda()
    options = {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "seeds": torch.arange(rows).cuda()}
    begin = torch.arange(3, 3 + rows, dtype=torch.int32, device="cuda")
    state = state_of(rows, draw(logits, **options, steps=begin))
    out = torch.full((rows,), -7, dtype=torch.int32, device="cuda")
    before = smkern.counters()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        smkern.sample(logits, **options, **state, out=out)
    alive = torch.tensor([True, False, True, True, True, True])
    lengths, limit = state["lengths"].cpu(), state["max_lengths"].cpu()
    stop = state["stop_tokens"].cpu()
    for _ in range(6):
        out.fill_(-7)
        graph.replay()
        known = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in options.items()}
        got = out.cpu()
        drawn = torch.where(alive, got, 0)
        wrong = wrong_rows(on_host, drawn, **known, steps=lengths)
        assert not [row for row, _ in wrong if alive[row]]
        assert torch.equal(got[~alive], torch.full_like(got[~alive], -9))
        lengths += alive.int()
        alive &= ~((stop == got[:, None]).any(1) | (lengths >= limit))
        assert torch.equal(state["lengths"].cpu(), lengths)
        assert torch.equal(state["finished"].cpu(), ~alive)
    assert not alive.any()
    assert smkern.counters() == before


def test_a_capture_that_would_load_a_kernel_is_refused(monkeypatch):
    from smkern.kernels.aot import KernelSet
    from smkern.ops.operator_eager import eager_operator
    from smkern.ops.sample.operators import SAMPLE

    draw(torch.randn(1, 64, device="cuda"))
    kernels = eager_operator(SAMPLE, torch.cuda.current_device()).dispatcher.kernels()
    monkeypatch.setattr(kernels, "_set", KernelSet())
    logits = torch.randn(2, 999, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(WarmupError, match="once before"), torch.cuda.graph(graph):
        smkern.sample(logits)


def test_after_a_warmup_nothing_is_loaded():
    smkern.warmup(
        calls=[smkern.SampleCalls(32_000, tuple(DTYPES.values()))], budgets=[16], progress=False
    )
    before = smkern.counters()
    for dtype in DTYPES.values():
        for kind in KINDS:
            for num_sms in (None, 16, 5):
                logits = logits_of(9, 32_000, dtype).cuda()
                draw(logits, **options_of(kind, 9, "cuda"), num_sms=num_sms)
    assert smkern.counters() == before


def test_no_rows():
    assert draw(torch.zeros(0, 100, device="cuda")).shape == (0,)


def test_bad_input_on_the_device():
    logits = torch.randn(3, 100, device="cuda")
    cold = torch.tensor([0.5, -1.0, 0.5], device="cuda")
    with pytest.raises(ArgumentError, match=r"temperature\[1\] is -1.0"):
        smkern.sample(logits, temperature=cold, seeds=1, check=True)
    with pytest.raises(ArgumentError, match="temperature is on cpu"):
        smkern.sample(logits, temperature=cold.cpu(), seeds=1)
    with pytest.raises(ArgumentError, match="overlaps"):
        smkern.sample(logits, out=logits.view(torch.int32)[0, :3])
    assert smkern.sample(logits, temperature=cold, seeds=1)[1] == logits[1].argmax()
