"""The GEMM configurations that may be launched: one predicate a constraint.

The tuner, the dispatcher and the tests share these predicates. `RULES` names them; a configuration
is legal when none is violated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import product
from math import ceil, isqrt

from smkern.tuning.config import STREAM_K, Budget, Dtype, GemmConfig, GemmProblem, Kernel

Capability = tuple[int, int]

COUNTER_BYTES = 64 * 1024
MAX_WORKSPACE_BYTES = 64 * 1024 * 1024
REGISTERS_PER_SM = 65536
SHARED_BYTES = {(8, 0): 166_912, (8, 6): 101_376, (8, 9): 101_376, (9, 0): 232_448}
"""Shared memory that one CTA can have, bytes; newer devices have at least sm_90's."""

AVAILABLE: tuple[Kernel, ...] = ("ws", "tma", "pointer")
"""Our own kernels that exist; dispatch and the tuner choose among these."""

MIN_PIECE_STEPS = 4
"""A K piece shorter than this many block_k steps never fills the pipeline."""

_TILES = ((64, 64), (64, 128), (64, 256), (128, 64), (128, 128), (128, 256), (256, 64), (256, 128))
_SWAPPED = tuple((m, n) for n in (64, 128, 256) for m in (16, 32, 64, 128))
_SWAPPED_MAX_ROWS = 256
_SKINNY_MAX_ROWS = 64


def element_bytes(dtype: Dtype) -> int:
    return 4 if dtype == "fp32" else 2


def shared_limit(capability: Capability) -> int:
    if capability >= (9, 0):
        return SHARED_BYTES[(9, 0)]
    return SHARED_BYTES.get(capability, SHARED_BYTES[(8, 6)])


def shared_bytes(config: GemmConfig, dtype: Dtype = "bf16") -> int:
    """Shared memory of one CTA: the pipeline's stages, and ws's epilogue beside them.

    ws turns its accumulator round in chunks; upper bounds of what the compiler takes for that.
    """
    size = element_bytes(dtype)
    stages = config.num_stages * (config.block_m + config.block_n) * config.block_k * size
    if config.kernel != "ws":
        return stages + 256
    tile = 4 * config.block_m * config.block_n
    most = 32 * 1024 if config.num_warps == 8 else 16 * 1024 if config.swap else 8 * 1024
    return stages + min(tile, most) + 1024


def registers(config: GemmConfig) -> int:
    """Registers of one CTA: the accumulator and 28 a thread at least.

    ws has four more warps for the copying one, compiled for the same count.
    """
    threads = 32 * config.num_warps
    accumulators = -(-config.block_m * config.block_n // threads)
    if config.kernel == "ws":
        return (threads + 128) * (accumulators + 28)
    return threads * (accumulators + 40)


def num_ctas(config: GemmConfig, budget: Budget) -> int:
    """Size of the grid: CTAs an SM only where a mask confines them, else one an SM at most."""
    resident = config.ctas_per_sm if budget.confined == "mask" else 1
    ctas = budget.num_sms * resident
    return min(ctas, config.max_ctas) if config.max_ctas else ctas


def num_tiles(problem: GemmProblem, config: GemmConfig) -> int:
    return ceil(problem.m / config.block_m) * ceil(problem.n / config.block_n)


def k_steps(problem: GemmProblem, config: GemmConfig) -> int:
    return max(1, ceil(problem.k / config.block_k))


def workspace_bytes(problem: GemmProblem, config: GemmConfig, budget: Budget) -> int:
    """Counters and fp32 partial tiles that a split launch needs at most, bytes."""
    if config.split == 1:
        return 0
    partial = 4 * config.block_m * config.block_n
    if config.split == STREAM_K:
        return COUNTER_BYTES + 2 * num_ctas(config, budget) * partial
    return COUNTER_BYTES + num_tiles(problem, config) * config.split * partial


def partials_fit(config: GemmConfig, split: int, tiles: int, ctas: int) -> bool:
    """The counters and fp32 partial tiles of a split launch fit the largest workspace."""
    if split == 1:
        return True
    # two slots a CTA; stream-K streams fewer than two waves of tiles
    counters = tiles if split > 1 else 2 * ctas
    partials = 4 * config.block_m * config.block_n * 2 * min(ctas, max(1, split) * tiles)
    return COUNTER_BYTES + partials <= MAX_WORKSPACE_BYTES and 4 * counters <= COUNTER_BYTES


def group_m(m: int, config: GemmConfig, num_sms: int) -> int:
    """Row tiles a raster group: the power of two that makes a wave's footprint squarest.

    A batch-invariant launch may use any: it moves tiles between CTAs, not sums.
    """
    wanted = isqrt(max(1, num_sms * config.block_n // config.block_m))
    return min(16, 1 << (min(wanted, ceil(m / config.block_m)).bit_length() - 1))


Rule = Callable[[GemmProblem, GemmConfig, Budget, Capability], bool]


def serves_dtype(
    problem: GemmProblem, config: GemmConfig, budget: Budget, capability: Capability
) -> bool:
    """fp32 runs in the pointer kernel only."""
    return problem.dtype != "fp32" or config.kernel == "pointer"


def runs_on_device(
    problem: GemmProblem, config: GemmConfig, budget: Budget, capability: Capability
) -> bool:
    """ws needs sm_90's warpgroup instructions, tma sm_90 or later."""
    needed = {"ws": capability[0] == 9, "tma": capability >= (9, 0)}
    return capability >= (8, 0) and needed.get(config.kernel, True)


def serves_alignment(
    problem: GemmProblem, config: GemmConfig, budget: Budget, capability: Capability
) -> bool:
    """Bulk copies and 16-byte loads need 16-byte rows and bases."""
    return problem.aligned or config.kernel in ("pointer", "cublaslt")


def has_tile(
    problem: GemmProblem, config: GemmConfig, budget: Budget, capability: Capability
) -> bool:
    """The row side of the matrix unit takes 64 rows at least; Triton's sides are powers of two."""
    if config.kernel == "cublaslt":
        return True
    tile = (config.block_m, config.block_n)
    if config.block_k not in (64, 128) and not (problem.dtype == "fp32" and config.block_k == 32):
        return False
    if config.kernel == "skinny":
        return problem.m <= _SKINNY_MAX_ROWS and config.swap
    return tile in (_SWAPPED if config.swap else _TILES)


def has_warps(
    problem: GemmProblem, config: GemmConfig, budget: Budget, capability: Capability
) -> bool:
    """4 or 8 warps, at most 128 accumulators a thread: above that the compiler spills."""
    threads = 32 * config.num_warps
    return config.num_warps in (4, 8) and config.block_m * config.block_n <= 128 * threads


def has_stages(
    problem: GemmProblem, config: GemmConfig, budget: Budget, capability: Capability
) -> bool:
    return 2 <= config.num_stages <= 8


def fits_shared(
    problem: GemmProblem, config: GemmConfig, budget: Budget, capability: Capability
) -> bool:
    """All resident CTAs' stages fit the SM (1 KB of each is the system's)."""
    each = shared_bytes(config, problem.dtype)
    limit = shared_limit(capability)
    return each <= limit and config.ctas_per_sm * (each + 1024) <= limit + 1024


def fits_registers(
    problem: GemmProblem, config: GemmConfig, budget: Budget, capability: Capability
) -> bool:
    return config.ctas_per_sm * registers(config) <= REGISTERS_PER_SM


def has_residency(
    problem: GemmProblem, config: GemmConfig, budget: Budget, capability: Capability
) -> bool:
    return 1 <= config.ctas_per_sm <= 3


def has_pieces(
    problem: GemmProblem, config: GemmConfig, budget: Budget, capability: Capability
) -> bool:
    """Every K piece has work, so its CTA arrives."""
    return config.split >= STREAM_K and config.split <= k_steps(problem, config)


def fits_workspace(
    problem: GemmProblem, config: GemmConfig, budget: Budget, capability: Capability
) -> bool:
    ctas = num_ctas(config, budget)
    return partials_fit(config, config.split, num_tiles(problem, config), ctas)


def keeps_invariance(
    problem: GemmProblem, config: GemmConfig, budget: Budget, capability: Capability
) -> bool:
    """Where K is cut may depend on (n, k, dtype) only: no stream-K, no library kernels."""
    if not problem.batch_invariant:
        return True
    return config.split == 1 and config.kernel != "cublaslt"


def serves_library(
    problem: GemmProblem, config: GemmConfig, budget: Budget, capability: Capability
) -> bool:
    """cuBLASLt: bf16 or fp16, at most a bias, and only where its clusters can launch."""
    if config.kernel != "cublaslt":
        return True
    epilogue = problem.epilogue
    plain = not epilogue.residual and epilogue.activation is None
    return plain and budget.clusters and problem.dtype != "fp32"


RULES: tuple[Rule, ...] = (
    serves_dtype,
    runs_on_device,
    serves_alignment,
    has_tile,
    has_warps,
    has_stages,
    has_residency,
    fits_shared,
    fits_registers,
    has_pieces,
    fits_workspace,
    keeps_invariance,
    serves_library,
)


def violations(
    problem: GemmProblem, config: GemmConfig, budget: Budget, capability: Capability
) -> list[str]:
    """Names of the rules that `config` breaks; empty when it is legal."""
    return [rule.__name__ for rule in RULES if not rule(problem, config, budget, capability)]


def is_legal(
    problem: GemmProblem, config: GemmConfig, budget: Budget, capability: Capability
) -> bool:
    return all(rule(problem, config, budget, capability) for rule in RULES)


CUBLASLT = GemmConfig("cublaslt", 128, 128, 64)
"""Names the library; it chooses the rest itself."""


def _shapes(kernel: Kernel) -> Iterator[tuple[int, int, bool]]:
    if kernel != "skinny":
        yield from ((m, n, False) for m, n in _TILES)
    yield from ((m, n, True) for m, n in _SWAPPED)


def _warps(kernel: Kernel, block_m: int, block_n: int, swap: bool) -> tuple[int, ...]:
    """Warps worth compiling: a warpgroup for 64 rows, two for more, or for many accumulators."""
    rows, columns = (block_n, block_m) if swap else (block_m, block_n)
    if rows * columns > 128 * 128 or (kernel == "ws" and rows >= 128 and columns >= 128):
        return (8,)
    if rows >= 128 and columns >= 64:
        return (4, 8)
    return (4,)


def _deepest(config: GemmConfig, dtype: Dtype, capability: Capability) -> GemmConfig | None:
    """`config` with the most stages that fit."""
    for stages in range(8, 1, -1):
        deepest = replace(config, num_stages=stages)
        if fits_shared(GemmProblem(1, 1, 1, dtype), deepest, Budget(1, "mask"), capability):
            return deepest
    return None


@lru_cache(maxsize=64)
def variants(
    dtype: Dtype, aligned: bool, capability: Capability, kernels: tuple[Kernel, ...] = AVAILABLE
) -> tuple[GemmConfig, ...]:
    """What may be compiled, with the deepest pipeline that its residency leaves; split 1."""
    problem = GemmProblem(1, 1, 1, dtype, aligned=aligned)
    budget = Budget(1, "mask", True)
    found: list[GemmConfig] = []
    for kernel in kernels:
        for block_m, block_n, swap in _shapes(kernel):
            steps = (32, 64) if dtype == "fp32" else (64, 128) if swap else (64,)
            residency = (1, 2, 3) if swap else (1, 2)
            for block_k, warps, ctas in product(
                steps, _warps(kernel, block_m, block_n, swap), residency
            ):
                base = GemmConfig(kernel, block_m, block_n, block_k, warps, 2, swap, ctas)
                config = _deepest(base, dtype, capability)
                if config and is_legal(problem, config, budget, capability):
                    found.append(config)
    return tuple(found)


def kernels_for(
    problem: GemmProblem, capability: Capability, among: tuple[Kernel, ...] = AVAILABLE
) -> tuple[Kernel, ...]:
    """Of several kernels those to consider: the pointer kernel only where no other can run."""
    if problem.dtype == "fp32" or not problem.aligned or capability < (9, 0):
        return tuple(kernel for kernel in among if kernel == "pointer")
    return tuple(kernel for kernel in among if kernel != "pointer") or among


def splits(tiles: int, ctas: int, steps: int) -> tuple[int, ...]:
    """Cuts worth asking about: whole loops, equal pieces that one wave takes, stream-K."""
    if steps < 2 * MIN_PIECE_STEPS:
        return (1,)
    most = min(ctas // tiles, steps // MIN_PIECE_STEPS, 16)
    found = [1, *(pieces for pieces in (2, 3, 4, 5, 6, 8, 10, 12, 16) if pieces <= most)]
    if tiles % ctas:
        found.append(STREAM_K)
    return tuple(found)


def is_sensible(m: int, config: GemmConfig) -> bool:
    """Not dominated by its shape: tiles neither twice the rows nor, swapped, a third."""
    if not config.swap:
        return m > 32 and config.block_m < 2 * m
    fits = config.block_m < 2 * m or config.block_m == 16
    return m <= _SWAPPED_MAX_ROWS and fits and 3 * config.block_m >= m


@lru_cache(maxsize=512)
def sensible_variants(
    m: int,
    dtype: Dtype,
    aligned: bool,
    one_cta: bool,
    capability: Capability,
    kernels: tuple[Kernel, ...] = AVAILABLE,
) -> tuple[GemmConfig, ...]:
    """`variants` that make sense for `m` rows; `one_cta`: no second CTA an SM."""
    return tuple(
        config
        for config in variants(dtype, aligned, capability, kernels)
        if is_sensible(m, config) and not (one_cta and config.ctas_per_sm > 1)
    )


def row_class(m: int) -> int:
    """The smallest row count with the same sensible variants: keeps their cache small."""
    if m > _SWAPPED_MAX_ROWS:
        return _SWAPPED_MAX_ROWS + 1
    return m


def candidates(
    problem: GemmProblem,
    budget: Budget,
    capability: Capability = (9, 0),
    kernels: tuple[Kernel, ...] = AVAILABLE,
) -> list[GemmConfig]:
    """Every legal and sensible configuration of our own kernels for `problem` in `budget`.

    Each names its raster group and the grid it launches by default (`max_ctas` 0).
    """
    found = []
    for variant in sensible_variants(
        row_class(problem.m),
        problem.dtype,
        problem.aligned,
        budget.confined == "grid",
        capability,
        kernels_for(problem, capability, kernels),
    ):
        tiles, ctas = num_tiles(problem, variant), num_ctas(variant, budget)
        group = group_m(problem.m, variant, budget.num_sms)
        for split in splits(tiles, ctas, k_steps(problem, variant)):
            config = replace(variant, split=split, group_m=group)
            if is_legal(problem, config, budget, capability):
                found.append(config)
    return found
