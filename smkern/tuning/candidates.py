"""The GEMM configurations worth considering: variants, K splits, raster groups."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import ceil, isqrt

from smkern.tuning.config import STREAM_K, Budget, Dtype, Epilogue, GemmConfig, GemmProblem, Kernel
from smkern.tuning.constraints import (
    AVAILABLE,
    CUTLASS_COLUMNS,
    MAX_GROUP,
    MAX_STAGES,
    SWAPPED_COLUMNS,
    WS_SWAPPED_COLUMNS,
    Capability,
    fits_shared,
    is_legal,
    tiles_of,
)

MIN_PIECE_STEPS = 4
"""A K piece of fewer block_k steps than this never fills the pipeline."""

SWAPPED_MAX_ROWS = 512
"""Above this many rows, tiles with `a` on the row side fill at least as well."""
SWAPPED_FEW_ROWS = 256
"""Above this many rows, swapped tiles keep their K loops whole and must gain by `SWAPPED_MANY`."""
SWAPPED_MANY = 1.03
"""Time over the model's of swapped tiles of many rows, beside other tiles': 402 problems of 272 to
496 rows on an H200. With K loops cut it is 1.09, and 1.15 at worst."""


def group_m(m: int, config: GemmConfig, num_sms: int) -> int:
    """Tiles per raster group on the matrix unit's row side; moves tiles between CTAs, not sums.

    1 for swapped tiles, so that tiles of the same weights follow each other. Otherwise groups as
    even as possible, of about the size that makes a wave's footprint square: three row tiles in
    groups of two and one would read the weights twice.
    """
    if config.swap:
        return 1
    wanted = min(MAX_GROUP, max(1, isqrt(num_sms * config.block_n // config.block_m)))
    rows = max(1, ceil(m / config.block_m))
    return ceil(rows / ceil(rows / wanted))


def _warps(kernel: Kernel, block_m: int, block_n: int, swap: bool) -> tuple[int, ...]:
    """Warp counts worth compiling: a warpgroup for 64 rows, two for more or for many accumulators.

    cutlass has two that take turns: a tile is one's.

    The pointer kernel may use mma.sync, with which a warpgroup holds half as many accumulators.
    """
    rows, columns = (block_n, block_m) if swap else (block_m, block_n)
    if kernel == "cutlass":
        return (4,)
    if rows * columns > 128 * 128 or (kernel == "ws" and rows >= 128 and columns >= 128):
        return (8,)
    if (rows >= 128 and columns >= 64) or (kernel == "pointer" and rows * columns > 64 * 128):
        return (4, 8)
    return (4,)


def _deepest(config: GemmConfig, problem: GemmProblem, capability: Capability) -> GemmConfig | None:
    """`config` with the most stages that fit."""
    for stages in range(MAX_STAGES, 1, -1):
        deepest = replace(config, num_stages=stages)
        if fits_shared(problem, deepest, Budget(1, "mask"), capability):
            return deepest
    return None


@lru_cache(maxsize=64)
def variants(
    dtype: Dtype,
    aligned: bool,
    capability: Capability,
    kernels: tuple[Kernel, ...] = AVAILABLE,
    residual: bool = False,
    swiglu: bool = False,
) -> tuple[GemmConfig, ...]:
    """Variants to compile, each with the deepest pipeline that fits its CTAs per SM; split 1."""
    problem = GemmProblem(1, 2, 1, dtype, Epilogue(residual=residual, swiglu=swiglu), aligned)
    budget = Budget(1, "mask", True)
    found: list[GemmConfig] = []
    for kernel, swap in product(kernels, (False, True)):
        steps: tuple[int, ...] = (32, 64) if dtype == "fp32" else (64, 128) if swap else (64,)
        residency: tuple[int, ...] = (1, 2, 3) if swap else (1, 2)
        if kernel == "cutlass":
            steps, residency = (64,), (1,)
        for block_m, block_n in tiles_of(kernel, swap):
            memory_bound = kernel == "ws" and (swap or block_m == 64)
            for block_k, warps, ctas in product(
                steps, _warps(kernel, block_m, block_n, swap), residency
            ):
                base = GemmConfig(kernel, block_m, block_n, block_k, warps, 2, swap, ctas)
                config = _deepest(base, problem, capability)
                if config and is_legal(problem, config, budget, capability):
                    found.append(config)
                    if memory_bound:
                        found.append(replace(config, eager=True))
    return tuple(found)


def kernels_for(
    problem: GemmProblem, capability: Capability, among: tuple[Kernel, ...]
) -> tuple[Kernel, ...]:
    """The kernels to consider: the pointer kernel only where no other can run.

    With SwiGLU only ws, where it runs: tma, with two tiles of half the rows, won none of 113 cells.
    """
    if problem.dtype == "fp32" or not problem.aligned or capability < (9, 0):
        return tuple(kernel for kernel in among if kernel == "pointer")
    if problem.epilogue.swiglu and capability[0] == 9 and "ws" in among:
        return ("ws",)
    return tuple(kernel for kernel in among if kernel != "pointer") or among


def is_crowded(m: int, config: GemmConfig) -> bool:
    """Whether a tile is swapped although there are many rows."""
    return config.swap and m > SWAPPED_FEW_ROWS


def splits(tiles: int, ctas: int, steps: int) -> tuple[int, ...]:
    """K splits worth trying: whole loops, stream-K, equal pieces that nearly fill one wave."""
    if steps < 2 * MIN_PIECE_STEPS:
        return (1,)
    most = min(ctas // tiles, steps // MIN_PIECE_STEPS, 16)
    least = max(2, ctas // (2 * tiles))
    found = [1, *(pieces for pieces in (2, 3, 4, 5, 6, 8, 10, 12, 16) if least <= pieces <= most)]
    if tiles % ctas:
        found.append(STREAM_K)
    return tuple(found)


def is_sensible(m: int, config: GemmConfig) -> bool:
    """Whether no other tile shape is clearly better for `m` rows.

    A plain tile is less than twice as high as the rows, and of cutlass no higher, as boxes that
    reach outside cost more than the bytes inside. A swapped one comes in at most three, and
    no lower tile covers the rows in as few.
    """
    if not config.swap and config.kernel == "cutlass":
        return m >= config.block_m
    if not config.swap:
        return m > 32 and config.block_m < 2 * m
    tiles = ceil(m / config.block_m)
    columns = SWAPPED_COLUMNS + WS_SWAPPED_COLUMNS * (config.kernel == "ws")
    if config.kernel == "cutlass":
        columns = CUTLASS_COLUMNS
    lowest = min(column for column in columns if ceil(m / column) <= tiles)
    return m <= SWAPPED_MAX_ROWS and tiles <= 3 and config.block_m == lowest


def sensible_variants(
    problem: GemmProblem,
    budget: Budget,
    capability: Capability,
    kernels: tuple[Kernel, ...],
) -> tuple[GemmConfig, ...]:
    """`variants` that make sense for the problem's rows and the budget's confinement."""
    return _sensible_variants(
        min(problem.m, SWAPPED_MAX_ROWS + 1),
        problem.dtype,
        problem.aligned,
        problem.epilogue.residual,
        problem.epilogue.swiglu,
        budget.confined == "grid",
        capability,
        kernels_for(problem, capability, kernels),
    )


@lru_cache(maxsize=1024)
def _sensible_variants(
    m: int,
    dtype: Dtype,
    aligned: bool,
    residual: bool,
    swiglu: bool,
    one_cta: bool,
    capability: Capability,
    kernels: tuple[Kernel, ...],
) -> tuple[GemmConfig, ...]:
    return tuple(
        config
        for config in variants(dtype, aligned, capability, kernels, residual, swiglu)
        if is_sensible(m, config) and not (one_cta and config.ctas_per_sm > 1)
    )
