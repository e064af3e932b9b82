"""Routing and the permutations on a GPU: values, bits, budgets, graphs, overlap, bad choices."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import smkern
from smkern.errors import WarmupError
from smkern.kernels.moe_launch import MoeKernels
from smkern.ops.moe.permute import PERMUTE, Permute
from smkern.ops.moe.route import TOPK, Topk
from smkern.ops.moe.unpermute import UNPERMUTE, Unpermute
from smkern.ops.operator_eager import eager_operator
from smkern.ops.operator_warmup import aligned
from smkern.ops.reference import moe as reference
from smkern.tuning.moe import Budget, PermuteProblem, TopkProblem, UnpermuteProblem, candidates
from tests.gpu.attention.cases import fresh_seed
from tests.gpu.bits import same_bits
from tests.gpu.gemm_support import capability, check_frame, check_near, framed
from tests.gpu.moe_support import (
    BF16,
    FP16,
    NAN,
    check_routing,
    given_of,
    permuted,
    precompile,
    routed,
)
from tests.gpu.sides import at_most, sides, whole

EXPERTS, TOP_K, HIDDEN = 128, 8, 2048
SIZES = [(128, 8), (8, 2), (60, 4), (512, 10), (16, 1), (6, 3)]
TOKENS = (1, 7, 128, 1500)


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    if not torch.cuda.is_available():
        return
    wanted: list[Any] = []
    for experts, top_k in SIZES:
        wanted += [TopkProblem(1, experts, top_k), PermuteProblem(1, top_k, experts, HIDDEN)]
        wanted += [UnpermuteProblem(1, top_k, HIDDEN, residual) for residual in (False, True)]
    precompile(wanted)


def summed(
    y: Tensor, index: Tensor, weights: Tensor, residual: Tensor | None, **options: Any
) -> Tensor:
    """`moe_unpermute` into a poisoned result, held against fp64."""
    out, frame = framed(weights.shape[0], y.shape[1], y.dtype)
    got = smkern.moe_unpermute(y, index, weights, residual=residual, out=out, **options)
    assert got is out
    torch.cuda.synchronize()
    check_sum(y, index, weights, residual, out)
    check_frame(frame, out)
    return out


def check_sum(
    y: Tensor, index: Tensor, weights: Tensor, residual: Tensor | None, out: Tensor
) -> None:
    wide = torch.float64
    want = reference.moe_unpermute(
        y.double(), index, weights, residual=None if residual is None else residual.double(),
        compute_dtype=wide,
    )  # fmt: skip
    size = reference.moe_unpermute(y.double().abs(), index, weights.abs(), compute_dtype=wide)
    eps = torch.finfo(out.dtype).eps
    check_near(out, want, 0.52 * eps * want.abs() + 2**-20 * size + 1e-6, "rows")


@pytest.mark.parametrize(("experts", "top_k"), SIZES)
@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float32])
def test_routing(experts: int, top_k: int, dtype: torch.dtype) -> None:
    for tokens in TOKENS:
        logits = torch.randn(tokens, experts + 3, device="cuda").to(dtype)[:, :experts]
        for renormalize in (True, False):
            found = smkern.topk_softmax(logits, top_k, renormalize=renormalize)
            if dtype is torch.float32:
                check_routing(logits, top_k, *found, renormalize=renormalize)
            wanted = reference.topk_softmax(logits.cpu(), top_k, renormalize=renormalize)
            torch.testing.assert_close(found[0].cpu(), wanted[0], rtol=5e-6, atol=1e-9)


def test_of_equals_the_lower_expert() -> None:
    logits = torch.zeros(5, EXPERTS, device="cuda", dtype=BF16)
    logits[1, 40:50] = 2.0
    logits[2, ::3] = 1.0
    weights, experts = smkern.topk_softmax(logits, TOP_K)
    assert experts[0].tolist() == list(range(8))
    assert experts[1].tolist() == list(range(40, 48))
    assert experts[2].tolist() == list(range(0, 24, 3))
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 8))


def test_rows_of_nan_and_infinities() -> None:
    logits = torch.randn(5, EXPERTS, device="cuda", dtype=BF16)
    logits[0, 9], logits[1] = NAN, NAN
    logits[2, 7:] = float("-inf")
    weights, experts = smkern.topk_softmax(logits, TOP_K)
    assert weights[:2].isnan().all()
    assert ((experts >= 0) & (experts < EXPERTS)).all()
    assert set(experts[2].tolist()) == set(range(8))
    assert weights[2, 7] == 0
    assert not weights[2:].isnan().any()


@pytest.mark.parametrize(("experts", "top_k"), SIZES)
def test_permutation(experts: int, top_k: int) -> None:
    for tokens in TOKENS:
        x = torch.randn(tokens, HIDDEN, device="cuda").to(BF16)
        permuted(x, routed(tokens, experts, top_k, skew=2.0), experts)


@pytest.mark.parametrize("tokens", [1024, 2048, 8192])
def test_permutation_of_a_prompt(tokens: int) -> None:
    x = torch.randn(tokens, HIDDEN, device="cuda").to(BF16)
    permuted(x, routed(tokens, EXPERTS, TOP_K), EXPERTS)
    permuted(x, torch.full((tokens, TOP_K), 77, dtype=torch.int32, device="cuda"), EXPERTS)


@pytest.mark.parametrize("tokens", [4, 300, 3000])
def test_choices_that_are_no_experts(tokens: int) -> None:
    x = torch.randn(tokens, HIDDEN, device="cuda").to(BF16)
    experts = routed(tokens, EXPERTS, TOP_K)
    experts[0], experts[1, 3], experts[2, 0] = -1, EXPERTS, 2**31 - 1
    experts[3] = torch.tensor([0, -(2**31), 5, 128, 127, 1 << 20, 3, -7])
    permuted(x, experts, EXPERTS)
    permuted(x, torch.full_like(experts, -5), EXPERTS)


@pytest.mark.parametrize(("hidden", "pad"), [(2048, 3), (2047, 0), (264, 8), (40, 0), (7168, 0)])
def test_widths_and_pitches(hidden: int, pad: int) -> None:
    x = torch.randn(200, hidden + pad, device="cuda").to(FP16)[:, :hidden]
    experts = routed(200, 16, 4)
    rows, _, index = permuted(x, experts, 16)
    weights = torch.rand(200, 6, device="cuda")[:, :4]
    summed(rows, index, weights, x)
    summed(rows, index, weights, None)


@pytest.mark.parametrize(("experts", "top_k"), SIZES)
@pytest.mark.parametrize("residual", [False, True])
def test_weighted_sum(experts: int, top_k: int, residual: bool) -> None:
    for tokens in TOKENS:
        _, index = reference.places(routed(tokens, experts, top_k), experts)
        y = torch.randn(tokens * top_k, HIDDEN, device="cuda").to(BF16)
        weights = torch.rand(tokens, top_k, device="cuda")
        given = torch.randn(tokens, HIDDEN, device="cuda").to(BF16) if residual else None
        summed(y, index, weights, given)


def test_the_sum_of_bad_indices_and_in_place() -> None:
    y = torch.randn(50, HIDDEN, device="cuda").to(BF16)
    index = torch.randint(-5, 60, (100 * TOP_K,), device="cuda").int()
    index[:4] = torch.tensor([2**31 - 1, -(2**31), 50, 49])
    weights, residual = torch.rand(100, TOP_K, device="cuda"), torch.randn(100, HIDDEN).cuda()
    residual = residual.to(BF16)
    want = summed(y, index, weights, residual)
    assert smkern.moe_unpermute(y, index, weights, residual=residual, out=residual) is residual
    assert same_bits(residual, want)
    nothing = smkern.moe_unpermute(y[:0], index, weights, residual=want)
    assert same_bits(nothing, want)


@pytest.mark.parametrize("num_sms", [1, 7, 48])
def test_any_budget(num_sms: int) -> None:
    for tokens in (5, 333, 1500):
        logits = torch.randn(tokens, EXPERTS, device="cuda").to(BF16)
        weights, experts = smkern.topk_softmax(logits, TOP_K, num_sms=num_sms)
        check_routing(logits.float(), TOP_K, weights, experts, renormalize=True)
        x = torch.randn(tokens, HIDDEN, device="cuda").to(BF16)
        rows, _, index = permuted(x, experts, EXPERTS, num_sms=num_sms)
        summed(rows, index, weights, x, num_sms=num_sms)


def test_no_tokens() -> None:
    x = torch.empty(0, HIDDEN, device="cuda", dtype=BF16)
    weights, experts = smkern.topk_softmax(x[:, :EXPERTS], TOP_K)
    assert weights.shape == experts.shape == (0, TOP_K)
    offsets = torch.full((EXPERTS + 1,), -9, dtype=torch.int32, device="cuda")
    out = (x, offsets, torch.empty(0, dtype=torch.int32, device="cuda"))
    smkern.moe_permute(x, experts, EXPERTS, out=out)
    assert not offsets.any()
    assert smkern.moe_unpermute(x, out[2], weights).shape == (0, HIDDEN)


def test_random_sizes() -> None:
    seed = fresh_seed()
    chance = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(25):
        experts = chance.choice([1, 2, 8, 60, 128, 160, 512])
        top_k = chance.randrange(1, min(experts, 12) + 1)
        hidden = chance.choice([8, 100, 768, 2048, chance.randrange(1, 3000)])
        tokens = chance.choice([1, 3, 40, chance.randrange(1, 1200)])
        x = torch.randn(tokens, hidden, device="cuda").to(BF16)
        picked = routed(tokens, experts, top_k, seed, skew=chance.choice([0.0, 3.0]))
        rows, _, index = permuted(x, picked, experts)
        summed(rows, index, torch.rand(tokens, top_k, device="cuda"), chance.choice([None, x]))


def launched(op: Any, call: Any, budgets: list[Budget]) -> list[list[Tensor]]:
    """Results of every configuration in each budget, from poisoned memory."""
    problem = op.problem(call, aligned(op, call))
    kernels, stream = MoeKernels(capability()), torch.cuda.current_stream().cuda_stream
    scratch = torch.zeros(1 << 22, dtype=torch.uint8, device="cuda")
    found = []
    for budget in budgets:
        for config in candidates(problem, budget):
            for x in op.results_of(call):
                x.fill_(-9 if x.dtype is torch.int32 else NAN)
            run = kernels.prepare(problem, config, budget)
            run(stream, *given_of(op, call, problem, scratch))
            torch.cuda.synchronize()
            found.append([x.clone() for x in op.results_of(call)])
    return found


@pytest.mark.parametrize("tokens", [40, 500, 1100])
def test_a_rows_bits_are_its_own(tokens: int) -> None:
    """By every configuration, in budgets and partitions, and each row alone."""
    budgets = [whole(), Budget(at_most(9), "grid", True)]
    logits = torch.randn(tokens, EXPERTS, device="cuda").to(BF16)
    weights, experts = smkern.topk_softmax(logits, TOP_K)
    x = torch.randn(tokens, HIDDEN, device="cuda").to(BF16)
    rows, offsets, index = permuted(x, experts, EXPERTS)
    total = summed(rows, index, weights, x)
    calls: list[tuple[Any, Any]] = [
        (TOPK, Topk(logits, TOP_K, True, weights.clone(), experts.clone())),
        (PERMUTE, Permute(x, experts, EXPERTS, rows.clone(), offsets.clone(), index.clone())),
        (UNPERMUTE, Unpermute(rows, index, weights, x, total.clone())),
    ]
    wanted = [[weights, experts], [rows, offsets, index], [total]]
    for (op, call), want in zip(calls, wanted, strict=True):
        for found in launched(op, call, budgets):
            assert all(same_bits(a, b) for a, b in zip(found, want, strict=True)), op.name
    for token in (0, 17, tokens - 1):
        one = slice(token, token + 1)
        alone = smkern.topk_softmax(logits[one].clone(), TOP_K)
        assert same_bits(alone[0], weights[one])
        assert same_bits(alone[1], experts[one])
        places = index[token * TOP_K : (token + 1) * TOP_K]
        assert same_bits(
            smkern.moe_unpermute(rows, places, weights[one], residual=x[one]), total[one]
        )
    for side in sides():
        torch.cuda.synchronize()
        with side:
            got = smkern.topk_softmax(logits, TOP_K)
            moved = smkern.moe_permute(x, experts, EXPERTS)
            back = smkern.moe_unpermute(moved[0], moved[2], weights, residual=x)
        side.synchronize()
        assert same_bits(got[0], weights)
        assert same_bits(moved[0], rows)
        assert same_bits(back, total)


@pytest.mark.parametrize("tokens", [64, 1100])
def test_a_graph_serves_changing_routes(tokens: int) -> None:
    logits = torch.randn(tokens, EXPERTS, device="cuda").to(BF16)
    x = torch.randn(tokens, HIDDEN, device="cuda").to(BF16)

    def step() -> tuple[Tensor, ...]:
        weights, experts = smkern.topk_softmax(logits, TOP_K)
        moved = smkern.moe_permute(x, experts, EXPERTS)
        back = smkern.moe_unpermute(moved[0], moved[2], weights, residual=x)
        return weights, experts, *moved, back

    step()
    before = smkern.counters()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(4):
        logits.normal_()
        x.normal_()
        found[2].fill_(NAN)
        graph.replay()
        torch.cuda.synchronize()
        for got, want in zip(found, step(), strict=True):
            assert same_bits(got, want)
    assert smkern.counters() == before


def test_a_capture_that_would_load_a_kernel_is_refused() -> None:
    logits = torch.randn(3, 77, device="cuda").to(BF16)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(WarmupError, match="once before"), torch.cuda.graph(graph):
        smkern.topk_softmax(logits, 3)


def chain(pdl: bool, tokens: int, side: Any = None) -> Tensor:
    """Ten times route, permute, sum, each reading what the one before wrote."""
    torch.manual_seed(3)
    x = torch.randn(tokens, HIDDEN, device="cuda").to(BF16)
    weights = torch.empty(tokens, TOP_K, device="cuda")
    experts = torch.zeros(tokens, TOP_K, dtype=torch.int32, device="cuda")
    rows = torch.empty(tokens * TOP_K, HIDDEN, device="cuda", dtype=BF16)
    offsets = torch.empty(EXPERTS + 1, dtype=torch.int32, device="cuda")
    index = torch.empty(tokens * TOP_K, dtype=torch.int32, device="cuda")
    scratch = torch.zeros(1 << 22, dtype=torch.uint8, device="cuda")
    budget = whole() if side is None else Budget(side.num_sms, "mask", side.clusters)
    calls: list[tuple[Any, Any]] = [
        (TOPK, Topk(x[:, :EXPERTS], TOP_K, True, weights, experts)),
        (PERMUTE, Permute(x, experts, EXPERTS, rows, offsets, index)),
        (UNPERMUTE, Unpermute(rows, index, weights, x, x)),
    ]
    runs = []
    for op, call in calls:
        problem = op.problem(call, True)
        dispatcher = eager_operator(op, 0).dispatcher
        config = replace(dispatcher.select(problem, budget), pdl=pdl)
        launch = dispatcher.launch_by(config, problem, budget, False)
        runs.append((launch, given_of(op, call, problem, scratch)))
    torch.cuda.synchronize()
    stream = torch.cuda.current_stream().cuda_stream if side is None else side.raw_stream
    for _ in range(10):
        for launch, given in runs:
            launch(stream, *given)
    torch.cuda.synchronize()
    return x


@pytest.mark.parametrize("tokens", [1, 64, 1100])
def test_overlap_changes_no_bits(tokens: int) -> None:
    wanted = chain(False, tokens)
    assert same_bits(chain(True, tokens), wanted)
    with smkern.ladder([16]) as ladder:
        assert same_bits(chain(True, tokens, ladder.split(decode=16).decode), wanted)
