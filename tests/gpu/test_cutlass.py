"""CUTLASS's kernels: values against float64, places, graphs, overlap; carried cubins will do."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import smkern
from smkern.kernels.cute.compile import absent, is_there
from smkern.kernels.gemm_compile import precompile
from smkern.kernels.gemm_variants import variant_of
from smkern.measure.build_command import likeliest
from smkern.profile import load_profile
from smkern.tuning.config import Budget, Epilogue, GemmConfig, GemmProblem
from tests.gpu import swiglu_support as swiglu
from tests.gpu.gemm_support import (
    Case,
    Holder,
    Launch,
    check,
    check_chain,
    operands,
    run_config,
)

pytestmark = pytest.mark.skipif(not is_there(), reason=f"no cubins, and {absent()}")

CONFIGS = [
    GemmConfig("cutlass", 128, 160, 64, 4, 6),
    GemmConfig("cutlass", 64, 88, 64, 4, 11),
    GemmConfig("cutlass", 80, 128, 64, 4, 8, swap=True),
    GemmConfig("cutlass", 144, 64, 64, 4, 8, swap=True),
]
EPILOGUES = [
    Epilogue(), Epilogue(bias=True), Epilogue(residual=True), Epilogue(activation="gelu"),
    Epilogue(True, True, "silu"),
]  # fmt: skip
RAGGED = [
    Case(1, 8, 8), Case(7, 264, 1000), Case(64, 1032, 2048), Case(77, 776, 520),
    Case(129, 136, 4104), Case(1000, 520, 264), Case(257, 2056, 136),
]  # fmt: skip
FP16 = Case(77, 776, 520, "fp16", Epilogue(True, True))
GLU = [config for config in CONFIGS if config.block_n % 16 == 0]


CHAINED = GemmProblem(77, 768, 768)


def wanted():
    """Every variant here: what is to be compiled where the tests run elsewhere."""
    cases = [
        *(
            (Case(epilogue=epilogue).problem, config)
            for config in CONFIGS
            for epilogue in EPILOGUES
        ),
        *((FP16.problem, config) for config in CONFIGS),
        *((swiglu.Case().problem, config) for config in GLU),
    ]
    yield from (variant_of(*case, 90) for case in cases)
    yield from likeliest([CHAINED], (16, 116), load_profile(), 1)


@pytest.fixture(scope="module", autouse=True)
def _compiled(cutlass_is_there) -> None:
    precompile(set(wanted()), workers=8)


@pytest.mark.parametrize("num_sms", [5, 132])
@pytest.mark.parametrize("epilogue", EPILOGUES, ids=lambda epilogue: epilogue.key)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_values(config, epilogue, num_sms):
    for case in (Case(96, 256, 512, epilogue=epilogue), Case(300, 776, 200, epilogue=epilogue)):
        x = operands(case)
        run_config(case, x, config, Budget(num_sms, "grid"))
        check(case, x)


@pytest.mark.parametrize("case", [*RAGGED, FP16], ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_ragged_sizes(config, case):
    x = operands(case)
    run_config(case, x, config, Budget(7, "grid"))
    check(case, x)


@pytest.mark.parametrize("config", GLU, ids=str)
def test_swiglu(config):
    for sizes in ((96, 256, 512), (77, 776, 200), (1, 64, 64)):
        case = swiglu.Case(*sizes)
        x = swiglu.operands(case)
        run_config(case, x, config, Budget(5, "grid"))
        swiglu.check(case, x)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_residual_may_be_the_output(config):
    """Also where the last tile of a side computes rows of the tile before it again."""
    case = Case(300, 776, 520, epilogue=Epilogue(residual=True))
    x = operands(case)
    want = operands(case)
    x.out.copy_(want.residual)
    x.residual = x.out
    run_config(case, x, config, Budget(5, "grid"))
    check(case, want, x.out)


def test_the_bits_are_those_of_gluon():
    """Both add products over K in steps of 16, in order."""
    case = Case(200, 1032, 4096)
    ours, other = operands(case), operands(case)
    run_config(case, ours, CONFIGS[2], Budget(132, "grid"))
    run_config(case, other, GemmConfig("ws", 128, 128, 64, 8, 4), Budget(132, "grid"))
    assert torch.equal(ours.out, other.out)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_nothing_waits_for_sms_of_the_other_partition(ladder, config):
    case, split, holder = Case(1000, 1032, 1096), ladder.split(decode=16), Holder()
    for mine, other in ((split.decode, split.prefill), (split.prefill, split.decode)):
        x = operands(case)
        run = Launch(case, x, config, Budget(mine.num_sms, "mask"))
        assert run.plan.num_ctas <= mine.num_sms
        holder.check_inside(mine, other, partial(run, mine.raw_stream), x.out)
        check(case, x)


def test_launches_that_overlap_read_what_the_one_before_wrote(ladder):
    """A chain in a graph in a partition, each from the last one's output, against one by one."""
    m, n, split = CHAINED.m, CHAINED.n, ladder.split(decode=16)
    weights = [torch.randn(n, n, device="cuda").bfloat16() * n**-0.5 for _ in range(8)]
    a = torch.randn(m, n, device="cuda").bfloat16()
    rooms = [torch.empty_like(a) for _ in weights]
    torch.cuda.synchronize()

    def chain(synchronize: bool) -> torch.Tensor:
        x = a
        for w, out in zip(weights, rooms, strict=True):
            x = smkern.gemm(x, w, out=out, backend="cutlass", static_weights=True)
            if synchronize:
                torch.cuda.synchronize()
        return x

    check_chain(split, chain, rooms)
