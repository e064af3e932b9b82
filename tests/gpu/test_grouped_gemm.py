"""The grouped GEMM on a GPU: values, empty and skewed experts, budgets, graphs, bad offsets."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import smkern
from smkern.errors import ArgumentError, WarmupError
from smkern.ops.moe.grouped import GROUPED, Grouped, grouped_dispatcher
from smkern.ops.operator_warmup import aligned
from smkern.tuning.grouped import Budget, GroupedConfig, GroupedProblem, configs_of
from tests.gpu.attention.cases import fresh_seed
from tests.gpu.bits import same_bits
from tests.gpu.gemm_support import capability, check_frame, framed
from tests.gpu.moe_support import BF16, FP16, NAN, Experts, precompile, random_counts
from tests.gpu.sides import whole

COUNTS: dict[str, list[int]] = {
    "decode-1": [0] * 5 + [1] * 8 + [0] * 115,
    "decode-64": [4, 3, 0, 17, 5] * 25 + [0, 0, 50],
    "skewed": [0] * 40 + [700] + [0] * 50 + [1] * 30 + [33] * 7,
    "one": [0] * 127 + [300],
    "even": [16] * 128,
    "prefill": [130, 128, 0, 1, 257, 64, 127, 129],
}
EACH = pytest.mark.parametrize("name", COUNTS)
GATED = pytest.mark.parametrize("swiglu", [False, True])
SIZES = {False: (2048, 768), True: (768, 2048)}
"""(n, k) of Qwen3-30B-A3B's down and gate-up weights."""


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    if torch.cuda.is_available():
        base = GroupedProblem(1, 128, 768, 2048)
        precompile(
            replace(base, swiglu=swiglu, num_experts=experts, dtype=dtype, aligned=whole)
            for swiglu in (False, True)
            for experts, dtype, whole in (
                (128, "bf16", True), (8, "bf16", True), (8, "fp16", True), (8, "bf16", False),
            )
        )  # fmt: skip


def launches(x: Experts) -> tuple[GroupedProblem, Any]:
    """What a launch of a case is decided by, and its call."""
    call = Grouped(x.a, x.w, x.offsets, x.swiglu, out=x.out)
    problem = GROUPED.problem(call, aligned(GROUPED, call))
    assert problem is not None
    return problem, call


def run_config(x: Experts, config: GroupedConfig, budget: Budget) -> torch.Tensor:
    problem, _ = launches(x)
    launch = grouped_dispatcher(0).launch_by(config, problem, budget, False)
    x.out.fill_(NAN)
    stream = torch.cuda.current_stream().cuda_stream
    given = (x.a, x.w, x.offsets, x.out)
    launch(stream, *(y.data_ptr() for y in given))
    torch.cuda.synchronize()
    x.check()
    return x.out.clone()


@EACH
@GATED
def test_values(name: str, swiglu: bool) -> None:
    Experts(COUNTS[name], *SIZES[swiglu], swiglu, behind=3).run()


@pytest.mark.parametrize("name", ["decode-64", "skewed", "prefill"])
@GATED
def test_every_configuration(name: str, swiglu: bool) -> None:
    """All that dispatch can pick, and alone or beside itself on an SM."""
    x = Experts(COUNTS[name], *SIZES[swiglu], swiglu, behind=1)
    problem, _ = launches(x)
    for config in configs_of(problem, capability()):
        run_config(x, config, whole())
        run_config(x, replace(config, pdl=False), Budget(24, "grid"))


@GATED
@pytest.mark.parametrize("num_sms", [1, 7, 48])
def test_any_budget(swiglu: bool, num_sms: int) -> None:
    for name in ("decode-64", "prefill"):
        Experts(COUNTS[name], *SIZES[swiglu], swiglu).run(num_sms=num_sms)


@GATED
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("n", "k"), [(8, 8), (72, 200), (264, 64), (100, 96), (65, 130), (1, 1)])
def test_odd_sizes(swiglu: bool, dtype: torch.dtype, n: int, k: int) -> None:
    for counts in ([3, 0, 70, 1], [0, 0, 0, 5, 200, 0, 1, 16]):
        Experts(counts, n, k, swiglu, dtype, behind=2).run()


@GATED
def test_rows_that_are_not_whole_16_bytes(swiglu: bool) -> None:
    Experts(COUNTS["prefill"], 768, 512, swiglu, padding=3).run()


def test_weights_with_gaps() -> None:
    """Experts, or rows, that do not follow each other: other code, right values."""
    for shape, part in (
        ((8, 300, 512), (slice(0, 256), slice(0, 512))),
        ((8, 256, 520), (slice(0, 256), slice(8, 520))),
    ):
        x = Experts(COUNTS["prefill"], 256, 512)
        w = torch.randn(shape, device="cuda", dtype=BF16)
        x.w = w[:, part[0], part[1]]
        x.run()


def test_some_of_the_experts_of_a_layer() -> None:
    x = Experts(COUNTS["prefill"], 256, 512)
    layer = torch.randn(20, 256, 512, device="cuda", dtype=BF16)
    x.w = layer[5:13]
    x.run()
    x.w = layer[::2][:8]
    x.run()


def test_random_experts() -> None:
    seed = fresh_seed()
    chance = random.Random(seed)
    sizes = (1, 2, 8, 60, 128, 300)
    precompile(GroupedProblem(1, e, 8, 8, swiglu) for e in sizes for swiglu in (False, True))
    for number in range(25):
        experts = chance.choice(sizes)
        counts = random_counts(chance, experts, chance.choice([1, 5, 64, 700, 2000]))
        n, k = 8 * chance.randrange(1, 50), 8 * chance.randrange(1, 60)
        case = Experts(
            counts, n, k, chance.random() < 0.5, behind=chance.randrange(9), seed=seed + number
        )
        case.run(num_sms=chance.choice([None, 5, 60]))


def test_no_rows() -> None:
    a = torch.empty(0, 64, device="cuda", dtype=BF16)
    w = torch.randn(4, 32, 64, device="cuda", dtype=BF16)
    before = smkern.counters()
    offsets = torch.zeros(5, dtype=torch.int32, device="cuda")
    assert smkern.grouped_gemm(a, w, offsets).shape == (0, 32)
    assert smkern.counters() == before
    Experts([0, 0, 0], 64, 64, behind=40).run()


@GATED
@pytest.mark.parametrize("padding", [0, 3])
def test_offsets_of_garbage_stay_inside(swiglu: bool, padding: int) -> None:
    """Nothing outside the result is written; what is written are rows that offsets name."""
    x = Experts([20] * 8, 256, 128, swiglu, padding=padding)
    out, frame = framed(x.rows, 256, BF16, padding)
    big = 2**31 - 1
    for offsets in ([0, 50, 20, big, -big, 7, 7, 90, 3], [big] * 9, [-5] * 9,
                    [-9, 10, 10, 5, 300, 2, 0, 160, big]):  # fmt: skip
        out.fill_(NAN)
        given = torch.tensor(offsets, dtype=torch.int32, device="cuda")
        smkern.grouped_gemm(x.a, x.w, given, swiglu=swiglu, out=out)
        torch.cuda.synchronize()
        check_frame(frame, out)
        bounds = given.clamp(0, x.rows).tolist()
        named = {r for e in range(8) for r in range(bounds[e], bounds[e + 1])}
        written = {int(r) for r in (~out.isnan()).any(1).nonzero()}
        assert written == named


def test_check_names_the_offset() -> None:
    x = Experts([20, 0, 7, 5], 64, 64, behind=3)
    x.run(check=True)
    x.out.fill_(NAN)
    for offsets, message in (
        ([1, 20, 20, 27, 32], r"expert_offsets\[0\] is 1, wanted 0"),
        ([0, 20, 19, 27, 32], r"expert_offsets\[2\] is 19, wanted 20"),
        ([0, 20, 20, 27, 36], r"expert_offsets\[4\] is 36, wanted 27 .* to 35"),
    ):
        given = torch.tensor(offsets, dtype=torch.int32, device="cuda")
        with pytest.raises(ArgumentError, match=message):
            smkern.grouped_gemm(x.a, x.w, given, out=x.out, check=True)
    torch.cuda.synchronize()
    assert x.out.isnan().all(), "something was written"
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(ArgumentError, match="check=True reads device memory"),
        torch.cuda.graph(graph),
    ):
        smkern.grouped_gemm(x.a, x.w, x.offsets, out=x.out, check=True)


@GATED
def test_a_rows_bits_follow_from_the_configuration(swiglu: bool) -> None:
    """With one, they do not depend on other experts' rows, the budget or the place."""
    n, k = SIZES[swiglu]
    x = Experts(COUNTS["decode-64"], n, k, swiglu)
    problem, _ = launches(x)
    first, count = 7, 17  # of expert 3
    for config in configs_of(problem, capability())[::3]:
        bits = run_config(x, config, whole())
        assert same_bits(run_config(x, config, Budget(9, "grid")), bits)
        few = Experts([0] * 3 + [count] + [0] * 124, n, k, swiglu)
        few.a.copy_(x.a[first : first + count])
        few.w = x.w
        assert same_bits(run_config(few, config, whole()), bits[first : first + count])


@GATED
def test_a_graph_serves_changing_experts(swiglu: bool) -> None:
    chance = random.Random(7)
    x = Experts([4] * 128, *SIZES[swiglu], swiglu)
    x.run()
    before = smkern.counters()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        smkern.grouped_gemm(x.a, x.w, x.offsets, swiglu=swiglu, out=x.out)
    for _ in range(6):
        x.counts = random_counts(chance, 128, 512)
        x.offsets.copy_(torch.tensor([0, *x.counts]).cumsum(0))
        x.a.normal_()
        x.out.fill_(NAN)
        graph.replay()
        torch.cuda.synchronize()
        x.check()
    assert smkern.counters() == before


def test_a_capture_that_would_load_a_kernel_is_refused() -> None:
    x = Experts([1] * 500, 64, 64, dtype=FP16)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(WarmupError, match="once before"), torch.cuda.graph(graph):
        smkern.grouped_gemm(x.a, x.w, x.offsets)


def chain(pdl: bool, side: Any = None) -> torch.Tensor:
    """Gate-up and down by turns, each reading what the one before wrote."""
    torch.manual_seed(5)
    counts = COUNTS["decode-64"]
    up, down = Experts(counts, 768, 2048, True), Experts(counts, 2048, 768)
    for x in (up, down):
        x.w.mul_(0.03)
    down.a = up.out
    back = up.a
    budget = whole() if side is None else Budget(side.num_sms, "mask", side.clusters)
    runs = []
    for x, out in ((up, up.out), (down, back)):
        x.out = out
        problem, _ = launches(x)
        dispatcher = grouped_dispatcher(0)
        config = replace(dispatcher.select(problem, whole()), pdl=pdl)
        launch = dispatcher.launch_by(config, problem, budget, False)
        runs.append((launch, [y.data_ptr() for y in (x.a, x.w, x.offsets, x.out)]))
    torch.cuda.synchronize()
    stream = torch.cuda.current_stream().cuda_stream if side is None else side.raw_stream
    for _ in range(5):
        for launch, given in runs:
            launch(stream, *given)
    torch.cuda.synchronize()
    return back


def test_overlap_changes_no_bits() -> None:
    wanted = chain(False)
    assert not wanted.isnan().any()
    assert same_bits(chain(True), wanted)
    with smkern.ladder([16]) as ladder:
        assert same_bits(chain(True, ladder.split(decode=16).decode), wanted)
