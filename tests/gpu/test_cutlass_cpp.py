"""CUTLASS's C++ GEMMs: values, their agreement with ours, places and graphs; built elsewhere."""

from __future__ import annotations

import pytest
import torch

from smkern.errors import BudgetError
from smkern.kernels.cute.compile import serves
from smkern.kernels.cute.cpp import SWIZZLES, CutlassGemm, Launch, Variant, load
from smkern.kernels.cute.cpp_build import absent, built
from smkern.tuning.config import Budget, GemmConfig
from tests.gpu.gemm_support import Case, Holder, Operands, check, operands, run_config

pytestmark = pytest.mark.skipif(built() is None, reason=f"not built; {absent()}")

CASES = [
    Case(1, 8, 8), Case(7, 264, 1000), Case(77, 776, 520), Case(129, 136, 4104),
    Case(300, 1032, 200), Case(1000, 2056, 1096),
]  # fmt: skip
OURS = [GemmConfig("cutlass", 80, 128, 64, 4, 8, swap=True), GemmConfig("ws", 128, 128, 64, 8, 4)]


@pytest.fixture(scope="module")
def gemm() -> CutlassGemm:
    return load()


def launch(
    gemm: CutlassGemm, variant: Variant, case: Case, x: Operands, num_sms: int, stream: int,
    swizzle: int = 1,
) -> Launch:  # fmt: skip
    made = gemm.prepare(
        variant, (x.a.data_ptr(), x.w.data_ptr(), x.out.data_ptr()), (case.m, case.n, case.k),
        (x.a.stride(0), x.w.stride(0), x.out.stride(0)), num_sms=num_sms, stream=stream,
        swizzle=swizzle,
    )  # fmt: skip
    assert 0 < made.num_ctas <= num_sms
    return made


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values(gemm, case):
    stream = torch.cuda.current_stream().cuda_stream
    for variant in gemm.variants:
        for num_sms, swizzle in ((132, 1), (132, 8), (7, 2), (variant.cluster_size, 4)):
            x = operands(case)
            launch(gemm, variant, case, x, num_sms, stream, swizzle)()
            check(case, x)


@pytest.mark.parametrize("config", OURS, ids=str)
def test_the_bits_are_those_of_our_kernels(gemm, config):
    """All add products over K in steps of 16, in order."""
    case = Case(200, 1032, 4096)
    if config.kernel == "cutlass" and not serves((9, 0), case.problem, config):
        pytest.skip("its cubin is not here")
    want = operands(case)
    run_config(case, want, config, Budget(132, "grid"))
    for variant in gemm.variants:
        x = operands(case)
        launch(gemm, variant, case, x, 132, torch.cuda.current_stream().cuda_stream)()
        assert torch.equal(x.out, want.out), variant.name


def test_partitions_hold_what_fits_them_and_refuse_the_rest(gemm, ladder):
    case, holder = Case(1000, 1032, 1096), Holder()
    for decode in (16, 40):
        split = ladder.split(decode=decode)
        for mine, other in ((split.decode, split.prefill), (split.prefill, split.decode)):
            for variant in gemm.variants:
                x = operands(case)
                if not gemm.clusters(variant, mine.raw_stream):
                    with pytest.raises(BudgetError, match="no cluster of 2"):
                        launch(gemm, variant, case, x, mine.num_sms, mine.raw_stream)
                    continue
                run = launch(gemm, variant, case, x, mine.num_sms, mine.raw_stream)
                holder.check_inside(mine, other, run, x.out)
                check(case, x)


def test_a_partition_of_n_sms_fits_at_most_half_as_many_clusters(gemm, ladder):
    for partition in ladder.split(decode=40):
        for variant in gemm.variants:
            fit = gemm.clusters(variant, partition.raw_stream)
            assert fit <= partition.num_sms // variant.cluster_size
            assert variant.cluster_size > 1 or fit == partition.num_sms


def test_a_graph_repeats_it_in_its_partition(gemm, ladder):
    case, partition = Case(300, 1032, 1096), ladder.split(decode=40).prefill
    for variant in gemm.variants[:1] + gemm.variants[-1:]:
        x = operands(case)
        run = launch(gemm, variant, case, x, partition.num_sms, partition.raw_stream)
        torch.cuda.synchronize()
        run()
        torch.cuda.synchronize()
        with partition.capture() as graph:
            run()
        x.out.fill_(float("nan"))
        torch.cuda.synchronize()
        partition.launch(graph)
        partition.synchronize()
        check(case, x)
        del graph


def test_every_swizzle_has_the_same_bits(gemm):
    case = Case(1000, 2056, 520)
    stream = torch.cuda.current_stream().cuda_stream
    for variant in gemm.variants:
        found = []
        for swizzle in SWIZZLES:
            x = operands(case)
            launch(gemm, variant, case, x, 24, stream, swizzle)()
            torch.cuda.synchronize()
            found.append(x.out.clone())
        assert all(torch.equal(out, found[0]) for out in found), variant.name
