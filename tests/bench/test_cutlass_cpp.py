"""The provider of CUTLASS's C++ GEMMs: what is tried, what is chosen, what its cell says."""

from __future__ import annotations

import pytest

from smkern.bench.cases import Group
from smkern.bench.cutlass_cpp import PROVIDER, CutlassBench, candidates
from smkern.bench.frame import Rounds
from smkern.bench.gemm_providers import GemmCase
from smkern.errors import DeviceError
from smkern.kernels.cute.cpp import Variant
from smkern.measure.gemm import GemmOperands
from smkern.ops.gemm.dispatch import offline_dispatcher
from smkern.profile import load_profile
from tests.bench.doubles import FakePartitions, Meter

N, K, STREAM = 48, 32, 7
NAMES = {
    "128x256x64:cooperative:2x1": 4.0, "128x256x64:cooperative:1x1": 6.0,
    "64x256x64:pingpong:1x2": 8.0, "64x256x64:pingpong:1x1": 5.0,
    "128x64x64:pingpong:1x1:swap": 9.0,
}  # fmt: skip
"""Names of variants, and us of a launch."""


class FakeGemm:
    """Variants that compute on the CPU and take what `NAMES` says; swizzled ones 1 us more."""

    def __init__(self, cuda, operands: GemmOperands, *, fit: int = 8, broken: str = "") -> None:
        self.cuda, self.fit, self.broken = cuda, fit, broken
        self.variants = tuple(
            Variant(i, name, 2 - (":1x1" in name)) for i, name in enumerate(NAMES)
        )
        self.sets = {a.data_ptr(): (a, w, out) for a, w, out in operands.sets(operands.max_m)}

    def clusters(self, variant: Variant, stream: int) -> int:
        assert stream == STREAM
        return self.fit if variant.cluster_size > 1 else 16

    def prepare(self, variant, addresses, sizes, strides, *, num_sms, stream, swizzle):
        m, n, k = sizes
        a, w, out = self.sets[addresses[0]]
        assert (n, k, strides, num_sms) == (N, K, (K, K, N), 16)

        def run() -> None:
            if variant.name == self.broken:
                raise DeviceError("it fails")
            self.cuda.work_us(NAMES[variant.name] + (swizzle > 1))
            out[:m].copy_(a[:m] @ w.t())

        return run


@pytest.fixture
def measured(cuda):
    """The cell of m rows on 16 SMs, of variants made with `options`."""

    def cell(m: int, **options):
        operands = GemmOperands(N, K, m, device="cpu", num_sets=2)
        partitions = FakePartitions(cuda)
        partitions.at(16).stream.cuda_stream = STREAM
        fake = FakeGemm(cuda, operands, **options)
        dispatcher = offline_dispatcher(load_profile("h200"), None)
        bench = CutlassBench(operands, dispatcher, 100.0, with_context=False, cpp=fake)
        rounds = Rounds(partitions, load_profile("h200"), Meter())
        cells = rounds.measure(bench, Group(GemmCase(m, N, K), 16), None)
        return next((c for c in cells if c["provider"] == PROVIDER), None)

    return cell


def test_the_fastest_is_measured_beside_the_others(measured):
    cell = measured(100)
    assert (cell["config"], cell["source"]) == (
        "cutlass-cpp:128x256x64:cooperative:2x1:s1",
        "tried",
    )
    assert cell["us"] == pytest.approx(4.0, abs=0.1)
    assert cell["clusters_over_none"] == pytest.approx(5 / 4, abs=0.05)
    assert cell["vs_cublas"] > 0


def test_clusters_that_do_not_fit_are_left_out(measured):
    cell = measured(100, fit=0)
    assert cell["config"] == "cutlass-cpp:64x256x64:pingpong:1x1:s1"
    assert cell["clusters_over_none"] is None


def test_a_variant_that_fails_is_left_out(measured):
    cell = measured(100, broken="128x256x64:cooperative:2x1")
    assert cell["config"] == "cutlass-cpp:64x256x64:pingpong:1x1:s1"
    assert cell["clusters_over_none"] == pytest.approx(5 / 8, abs=0.05)


def test_rows_decide_which_tiles_are_tried(cuda):
    gemm = FakeGemm(cuda, GemmOperands(N, K, 8, device="cpu", num_sets=1))

    def tried(m: int) -> set[str]:
        return {variant.name for variant, _ in candidates(gemm, m)}

    tall = {name for name in NAMES if name.startswith("128x256")}
    assert tried(64) == set(NAMES) - tall
    assert tried(65) == tried(512) == set(NAMES)
    assert tried(513) == tall
