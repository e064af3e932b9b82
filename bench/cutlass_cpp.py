"""The provider `smkern:cutlass-cpp`: CUTLASS's C++ GEMMs, the fastest of all that fit a place.

Each variant and swizzle is timed in the place before the rounds: a yardstick is what CUTLASS can do
there, not what a heuristic of ours picks. The library is `smkern build --cpp`'s.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from smkern.bench.frame import Provider
from smkern.bench.gemm_providers import GemmBench, GemmCase
from smkern.kernels.cute.cpp import CutlassGemm, Variant
from smkern.measure.gemm import GemmOperands
from smkern.measure.partitions import Place
from smkern.measure.timing import Call, Case, Timing, time_within, try_eagerly

PROVIDER = "smkern:cutlass-cpp"
TRIAL_US = 8_000.0
"""Device time that choosing a variant may take."""
SWIZZLES = (1, 4)
FEW_ROWS, MANY_ROWS = 64, 512
"""Up to and above these rows of `a`, tiles of more than 64 rows, and of 64, are not tried."""

Choice = tuple[Variant, int]
"""A variant and how many rows of tiles CTAs walk together."""


@dataclass(slots=True)
class CutlassBench(GemmBench):
    """Our GEMMs and cuBLAS, with CUTLASS's C++ ones where `cpp` has their library."""

    cpp: CutlassGemm | None = None

    def ours(self, case: GemmCase, place: Place) -> list[Provider]:
        found = GemmBench.ours(self, case, place)
        if self.cpp is None:
            return found
        timings = trial(self.cpp, self.operands, case.m, place)
        if not timings:
            return found
        choice = min(timings, key=lambda each: timings[each].us_median)
        make = partial(cpp_call, self.cpp, self.operands, case.m, place, choice)
        return [*found, Provider(PROVIDER, place, make, about_choice(choice, timings))]


def candidates(gemm: CutlassGemm, m: int) -> Iterator[Choice]:
    """What is tried for m rows."""
    for variant in gemm.variants:
        if variant.rows > 64 if m <= FEW_ROWS else variant.rows <= 64 and m > MANY_ROWS:
            continue
        yield from ((variant, swizzle) for swizzle in SWIZZLES)


def trial(gemm: CutlassGemm, ops: GemmOperands, m: int, place: Place) -> dict[Choice, Timing]:
    """Times of what runs in a place; clusters that do not fit it are left out."""
    cases: dict[str, Case] = {}
    names: dict[str, Choice] = {}
    for index, choice in enumerate(candidates(gemm, m)):
        variant, swizzle = choice
        if not gemm.clusters(variant, place.stream.cuda_stream):
            continue
        call = cpp_call(gemm, ops, m, place, choice)
        if try_eagerly(call, place.stream) is None:
            name = f"{variant.name}:s{swizzle}"
            names[name], cases[name] = choice, Case(call, place.stream, 1, index)
    found = time_within(TRIAL_US, cases, while_busy=lambda: None, errors={})
    return {names[name]: timing for name, timing in found.items()}


def about_choice(choice: Choice, timings: dict[Choice, Timing]) -> dict[str, Any]:
    """What a cell says of its variant: `clusters_over_none` is the best time without them over the
    best with them, None where clusters do not fit."""
    variant, swizzle = choice
    best: dict[bool, float] = {}
    for (each, _), timing in timings.items():
        is_clustered = each.cluster_size > 1
        best[is_clustered] = min(best.get(is_clustered, float("inf")), timing.us_median)
    over = round(best[False] / best[True], 4) if len(best) == 2 else None
    return {
        "config": f"cutlass-cpp:{variant.name}:s{swizzle}",
        "source": "tried",
        "clusters_over_none": over,
    }


def cpp_call(gemm: CutlassGemm, ops: GemmOperands, m: int, place: Place, choice: Choice) -> Call:
    """Calls of a variant on every set of operands, in a place."""
    variant, swizzle = choice
    launches = [
        gemm.prepare(
            variant, (a.data_ptr(), w.data_ptr(), out.data_ptr()), (m, ops.n, ops.k),
            (a.stride(0), w.stride(0), out.stride(0)), num_sms=place.num_sms,
            stream=place.stream.cuda_stream, swizzle=swizzle,
        )
        for a, w, out in ops.sets(m)
    ]  # fmt: skip
    count = len(launches)

    def call(i: int) -> None:
        launches[i % count]()

    return call
