"""GEMMs of e4m3 on a GPU: values against fp64, epilogues, tiles, budgets, graphs, invariance."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import smkern
from smkern.errors import ArgumentError
from smkern.ops.fp8.dispatch import fp8_dispatcher
from smkern.tuning import fp8
from smkern.tuning.config import STREAM_K, Budget, Epilogue, GemmConfig
from smkern.tuning.fp8 import ScaledProblem
from tests.gpu.fp8_support import KINDS, Case, check, operands, precompile, run_config
from tests.gpu.sides import at_most, whole

FULL = Epilogue(True, True, "silu")
EPILOGUES = [Epilogue(), Epilogue(bias=True), Epilogue(residual=True, activation="gelu"), FULL]
RAGGED = [
    (1, 8, 128), (7, 264, 1024), (16, 512, 4096), (33, 4096, 128), (64, 1032, 2048),
    (77, 776, 640), (129, 136, 4096), (1000, 520, 256), (257, 2056, 128), (96, 256, 384),
]  # fmt: skip
CONFIGS = [
    GemmConfig("ws", 64, 64, 64, 4, 12, eager=True),
    GemmConfig("ws", 64, 128, 64, 4, 4, ctas_per_sm=2, split=STREAM_K, eager=True),
    GemmConfig("ws", 128, 64, 64, 8, 8, split=2, eager=True),
    GemmConfig("ws", 128, 128, 64, 8, 6, eager=True),
    GemmConfig("ws", 128, 128, 64, 8, 6, split=STREAM_K, eager=True),
    GemmConfig("ws", 16, 64, 64, 4, 12, True, split=3, eager=True),
    GemmConfig("ws", 32, 128, 64, 8, 10, True, eager=True),
    GemmConfig("ws", 16, 128, 64, 8, 10, True, split=STREAM_K, eager=True),
    GemmConfig("ws", 32, 64, 64, 4, 4, True, ctas_per_sm=3, split=2, eager=True),
    GemmConfig("pointer", 64, 64, 64, 8, 3),
]
WIDE = [
    GemmConfig("ws", 128, 192, 64, 8, 5, eager=True),
    GemmConfig("ws", 128, 192, 64, 8, 5, split=STREAM_K, eager=True),
    GemmConfig("ws", 128, 256, 64, 8, 4, eager=True),
    GemmConfig("ws", 128, 256, 64, 8, 4, split=3, eager=True),
]
"""With scales of blocks only."""


@pytest.fixture(scope="module", autouse=True)
def _compiled() -> None:
    if not torch.cuda.is_available():
        return
    wanted = []
    for blocks in (False, True):
        base = ScaledProblem(64, 256, 512, scales="block" if blocks else "row")
        wanted += [(replace(base, epilogue=e), c) for c in CONFIGS for e in (Epilogue(), FULL)]
        every = [(m, n, k, e) for m, n, k in RAGGED for e in (Epilogue(),)]
        every += [(96, 256, 512, e) for e in EPILOGUES]
        for m, n, k, epilogue in every:
            problem = replace(base, m=m, n=n, k=k, epilogue=epilogue)
            wanted.append((problem, fp8_dispatcher(0).select(problem, whole())))
    precompile(wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", RAGGED, ids=str)
def test_ragged_shapes(size, kind):
    case = Case(*size, kind)
    x = operands(case, seed=1)
    assert smkern.gemm(**x.given()) is x.out
    assert check(case, x) < 0.0025


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("epilogue", EPILOGUES, ids=lambda e: e.key)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_every_epilogue(dtype, epilogue, kind):
    case = Case(kind=kind, dtype=dtype, epilogue=epilogue)
    x = operands(case)
    smkern.gemm(**x.given(), activation=epilogue.activation)
    check(case, x)


@pytest.mark.parametrize("kind", ["row", "block"])
@pytest.mark.parametrize("epilogue", [Epilogue(), FULL], ids=lambda e: e.key)
@pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda c: f"{c.kernel}-{c.block_m}x{c.block_n}-{c.split}-{c.swap}"
)
def test_configurations(config, epilogue, kind):
    case = Case(50 if config.swap else 300, 520, 1152, kind, epilogue=epilogue)
    x = operands(case)
    for num_sms in (5, 60):
        run_config(case, x, config, Budget(num_sms, "grid", True))
        check(case, x)
        x.out.fill_(math.nan)


@pytest.mark.parametrize("epilogue", [Epilogue(), FULL], ids=lambda e: e.key)
@pytest.mark.parametrize("config", WIDE, ids=lambda c: f"{c.block_n}-split{c.split}")
def test_wide_tiles(config, epilogue):
    test_configurations(config, epilogue, "block")


@pytest.mark.parametrize("kind", ["row", "tensor"])
@pytest.mark.parametrize(
    ("m", "n", "k", "padding"), [(5, 3, 7, 0), (64, 77, 129, 1), (131, 255, 511, 3)]
)
def test_unaligned_shapes_and_pitches(m, n, k, padding, kind):
    case = Case(m, n, k, kind, padding=padding)
    x = operands(case)
    smkern.gemm(**x.given())
    check(case, x)


def test_the_error_is_that_of_the_result_not_of_k():
    """Of one rounding to bf16 it is 2^-9 at most, in the mean under a third of it."""
    for kind in KINDS:
        errors = [
            check(case := Case(128, 256, k, kind), x := operands(case), smkern.gemm(**x.given()))
            for k in (512, 16384)
        ]
        assert max(errors) < 0.0025, (kind, errors)


def test_what_is_not_finite_stays_in_its_rows():
    x = torch.randn(70, 512, device="cuda").bfloat16()
    x[3, 7], x[69, 500] = math.nan, math.inf
    w, w_scale = smkern.quantize(torch.randn(256, 512, device="cuda").bfloat16(), "weight_block")
    a, a_scale = smkern.quantize(x, "block")
    spoiled = smkern.gemm(a, w, a_scale=a_scale, w_scale=w_scale).isnan()
    assert spoiled.all(1).nonzero().flatten().tolist() == [3, 69]
    assert int(spoiled.any(1).sum()) == 2


@pytest.mark.parametrize("m", [16, 64, 300])
@pytest.mark.parametrize("k", [4096, 4480])
def test_bits_do_not_depend_on_how_scales_lie(m, k):
    """By rows in fours, which one load takes; in fours but for their base; else apart."""
    a, a_scale = smkern.quantize(torch.randn(m, k, device="cuda").bfloat16(), "block")
    w, w_scale = smkern.quantize(torch.randn(520, k, device="cuda").bfloat16(), "weight_block")
    blocks = k // 128
    wider, behind = torch.zeros(m, blocks + 5, device="cuda"), torch.zeros(m * blocks + 1).cuda()
    places = [
        torch.empty(blocks, m, device="cuda").t(), wider[:, :blocks], wider[:, 1 : blocks + 1],
        behind[1:].view(m, blocks),
    ]  # fmt: skip
    wanted = smkern.gemm(a, w, a_scale=a_scale, w_scale=w_scale)
    for place in places:
        place.copy_(a_scale)
        assert torch.equal(smkern.gemm(a, w, a_scale=place, w_scale=w_scale), wanted)


@pytest.mark.parametrize("kind", ["row", "block"])
@pytest.mark.parametrize("n", [776, 24576])
def test_a_row_does_not_depend_on_the_batch_or_the_budget(n, kind):
    case = Case(200, n, 4096, kind)
    x = operands(case)
    options = {"w": x.w, "w_scale": x.w_scale, "batch_invariant": True}
    want = smkern.gemm(x.a, a_scale=x.a_scale, **options)
    check(case, x, want)
    for rows, num_sms in ((1, 16), (17, 60), (64, 132), (130, 7)):
        begin = 31
        some = smkern.gemm(
            x.a[begin : begin + rows], a_scale=x.a_scale[begin : begin + rows].contiguous(),
            num_sms=at_most(num_sms), **options,
        )  # fmt: skip
        assert torch.equal(some, want[begin : begin + rows]), (rows, num_sms)


def test_partitions_and_graphs(ladder):
    case = Case(64, 2048, 1024, "block")
    x = operands(case)
    torch.cuda.synchronize()
    for partition in ladder.split(decode=16):
        with partition:
            smkern.gemm(**x.given(), static_weights=True)
        partition.synchronize()
        check(case, x)
        with partition.capture() as graph:
            smkern.gemm(**x.given(), static_weights=True)
        for _ in range(3):
            x.out.fill_(math.nan)
            torch.cuda.synchronize()
            partition.launch(graph)
            partition.synchronize()
            check(case, x)
        graph.close()


@pytest.mark.parametrize("kind", KINDS)
def test_swiglu(kind):
    case = Case(77, 512, 1024, kind)
    x = operands(case)
    options = {"a_scale": x.a_scale, "w_scale": x.w_scale}
    out = torch.full((77, 256), math.nan, dtype=torch.bfloat16, device="cuda")
    found = smkern.gemm_swiglu(x.a, x.w, **options, out=out)
    gate_up = smkern.gemm(x.a, x.w, **options)
    assert torch.equal(found, smkern.silu_and_mul(gate_up))


@pytest.mark.parametrize("kind", ["tensor", "row"])
@pytest.mark.parametrize("epilogue", [*EPILOGUES[:2], Epilogue(True, True)], ids=lambda e: e.key)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_cublaslt_on_the_whole_device(dtype, epilogue, kind):
    """Where it may be chosen: as right as our own, eager and in a graph that it ran before."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("cuBLASLt serves sm_90")
    for m, n, k in ((70, 256, 512), (601, 528, 4096), (1100, 1040, 1152)):
        case = Case(m, n, k, kind, dtype, epilogue)
        x = operands(case)
        assert smkern.gemm(**x.given(), backend="cublaslt") is x.out
        check(case, x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            smkern.gemm(**x.given(), backend="cublaslt")
        x.out.fill_(math.nan)
        graph.replay()
        check(case, x)


def test_scales_of_rows_that_begin_anywhere():
    """They are not cuBLASLt's, whichever place came first."""
    case = Case(1100, 1040, 1152, "row")
    x = operands(case)
    room = torch.empty(case.m + 4, device="cuda")
    for first in (0, 1, 0, 3):
        given = room[first : first + case.m].copy_(x.a_scale.flatten())
        smkern.gemm(**x.given() | {"a_scale": given})
        check(case, x)
        x.out.fill_(math.nan)


@pytest.mark.parametrize(("kind", "m"), [("tensor", 2048), ("row", 2048), ("tensor", 128)])
def test_a_capture_before_the_first_call_takes_our_own(kind, m):
    case = Case(m, 1024, 2048, kind)
    x = operands(case)
    smkern.gemm(**x.given(), backend="own")
    taken = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        x.out.fill_(math.nan)
        with torch.cuda.graph(graph):
            smkern.gemm(**x.given())
        graph.replay()
        check(case, x)
        taken.append(x.out.clone())
        smkern.gemm(**x.given())
        check(case, x)
    assert all(bool(y.isfinite().all()) for y in taken)


def test_zero_sizes_and_backends():
    a = torch.zeros(0, 256, device="cuda").to(torch.float8_e4m3fn)
    w = torch.zeros(64, 256, device="cuda").to(torch.float8_e4m3fn)
    one = torch.ones(1, device="cuda")
    assert smkern.gemm(a, w, a_scale=one, w_scale=one).shape == (0, 64)
    with pytest.raises(ArgumentError, match="backend='tma' cannot run"):
        smkern.gemm(w, w, a_scale=one, w_scale=one, backend="tma")
    with pytest.raises(ArgumentError, match=r"out_dtype torch\.float32 on a GPU"):
        smkern.gemm(w, w, a_scale=one, w_scale=one, out_dtype=torch.float32)


def test_every_variant_is_right():
    """Each tile that dispatch can choose, on rows that fill it and leave a rest."""
    names = {False: "row", True: "block"}
    capability = torch.cuda.get_device_capability()
    made = {blocks: fp8.variants(False, True, capability, blocks) for blocks in names}
    if not made[True]:
        pytest.skip("no warp-specialised kernel here")
    base = ScaledProblem(64, 264, 1152)
    kinds = {kind: made[blocks] for blocks, kind in names.items()}
    precompile((replace(base, scales=kind), c) for kind in kinds for c in kinds[kind])
    for blocks, kind in names.items():
        for config in made[blocks]:
            case = Case(config.block_m + 13, 264, 1152, kind)
            x = operands(case)
            run_config(case, x, config, Budget(132, "grid", True))
            check(case, x)
