"""Which attention configurations are legal and worth considering: one predicate a constraint.

The tuner, the selection and the tests share these predicates. What
changes the order of a row's sums (`bits`) follows from the model and the request alone; a budget or
a batch chooses among the rest only (rule 12).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from smkern.tuning.attention.shapes import (
    DECODE_MAX_Q,
    PREFILL_ROWS,
    AttentionConfig,
    AttentionKernel,
    AttentionProblem,
    AttentionShape,
    Budget,
)
from smkern.tuning.constraints import Capability, holds_operands, shared_limit

AttentionPath = Literal["decode", "prefill", "mixed"]

AVAILABLE: tuple[AttentionKernel, ...] = ("cuda", "triton")
"""Kernels that exist. "cutlass" keeps a place in the dispatch and is never legal."""
CUDA_CAPABILITY = (9, 0)
CUDA_HEAD_DIMS = (64, 96, 128, 256)
CUDA_TEAM_THREADS = 128
MAX_HEAD_DIM = 256
TEAMS = (2, 3, 4)
"""Teams of four warps that a CUDA decode CTA may have; small budgets want the most that fit."""
CUDA_RESIDENT = 1
"""CTAs of a CUDA kernel that share an SM: they are compiled to own it."""
CUDA_PREFILL = AttentionConfig("cuda", teams=3)
"""The CUDA prefill kernel has one configuration."""
TRITON_KEYS = (16, 32, 64, 128)
TRITON_WARPS = (1, 2, 4, 8)
TRITON_STAGES = range(1, 10)
MAX_RESIDENT = 8

Constraint = Callable[[AttentionProblem, AttentionConfig, Budget, Capability], bool]


def path_of(shape: AttentionShape) -> AttentionPath:
    """The path of an attention step, by its host numbers.

    "mixed": so many requests for so few query tokens that some of them must take the decode path.
    """
    if not shape.has_prefill:
        return "decode"
    mixed = shape.batch * (DECODE_MAX_Q + 1) > shape.max_tokens
    return "mixed" if mixed else "prefill"


def default_kernel(problem: AttentionProblem, capability: Capability) -> AttentionKernel:
    """The kernel that a problem takes: of the model and the device alone, as bits depend on it."""
    serves = capability == CUDA_CAPABILITY and problem.shape.head_dim in CUDA_HEAD_DIMS
    return "cuda" if serves else "triton"


def served_by(
    problem: AttentionProblem, budget: Budget, capability: Capability
) -> AttentionKernel | None:
    """The kernel that runs a problem: the default one, else Triton, else None."""
    for kernel in (default_kernel(problem, capability), "triton"):
        config = replace(default_config(problem, kernel, capability), ctas_per_sm=1)
        if is_legal(problem, config, budget, capability):
            return kernel
    return None


def default_config(
    problem: AttentionProblem, kernel: AttentionKernel, capability: Capability = CUDA_CAPABILITY
) -> AttentionConfig:
    """A kernel's configuration for a problem where nothing was measured."""
    if kernel == "triton":
        return triton_config(problem, problem.shape.has_prefill, capability)
    if problem.shape.has_prefill:
        return replace(CUDA_PREFILL, kernel=kernel)
    fitting = [teams for teams in TEAMS if _teams_fit(problem, teams)]
    return AttentionConfig(kernel, teams=max(fitting, default=1))


def triton_config(
    problem: AttentionProblem, prefill: bool, capability: Capability
) -> AttentionConfig:
    """Triton's for the prefill items of a problem, or for its decode items.

    It compiles without spills and fits any device from sm_80 on. A stage of keys is in flight for
    every second of `num_stages`: the pages' numbers, which the keys' addresses need, are fetched in
    the stages between. Where an SM has not the shared memory of sm_90's, decode has fewer stages,
    then fewer CTAs: neither turns a row's bits.
    """
    wide = problem.shape.head_dim > 128
    if prefill:
        # only wgmma leaves queries in shared memory and so has registers for 64 keys
        keys = 64 if capability == CUDA_CAPABILITY and not wide else 32
        return AttentionConfig("triton", keys=keys, num_warps=8, num_stages=2 if wide else 3)
    if wide or problem.shape.decode_rows > 16:
        config = AttentionConfig("triton", ctas_per_sm=2, keys=32, num_warps=4, num_stages=5)
    else:
        config = AttentionConfig("triton", ctas_per_sm=4, keys=32, num_warps=2, num_stages=7)
    while config.num_stages > 3 and not _triton_fits(problem, config, prefill, capability):
        config = replace(config, num_stages=config.num_stages - 2)
    while config.ctas_per_sm > 1 and not _triton_fits(problem, config, prefill, capability):
        config = replace(config, ctas_per_sm=config.ctas_per_sm - 1)
    return config


def bits(problem: AttentionProblem, config: AttentionConfig) -> tuple[object, ...]:
    """The part of a configuration that decides the order of a row's sums.

    A CUDA team sums a piece alone, however many teams there are. Triton's row sums turn with the
    keys of a step and with the warps that share them.
    """
    if config.kernel == "triton":
        return (config.kernel, config.keys, config.num_warps)
    return (config.kernel,)


def num_ctas(config: AttentionConfig, budget: Budget) -> int:
    """The CTAs of a launch at most: one an SM where only the grid keeps the budget."""
    return budget.most_ctas(config.ctas_per_sm)


def cache_bytes(problem: AttentionProblem) -> int:
    """Bytes of a cache element."""
    return 1 if problem.cache_dtype == "fp8" else 2


def cuda_ring_bytes(head_dim: int, element_bytes: int) -> int:
    """Keys and values that the four warps of a CUDA decode team keep in flight.

    csrc/attention_decode_copy.cuh's kRing, four times.
    """
    row = head_dim * element_bytes
    pitch = row if row % 128 == 0 else row + 16  # an odd count of 16-byte chunks: no conflicts
    step = 64 if element_bytes == 1 else 32
    return 4 * 2 * step * pitch


def cuda_team_bytes(head_dim: int, element_bytes: int, rows: int) -> int:
    """Shared memory of a CUDA decode team with `rows` packed rows: rings, staged and folded sums.

    csrc/attention_decode.cuh's team_bytes.
    """
    slots = rows * head_dim // 4
    folded = 24 * slots if slots <= CUDA_TEAM_THREADS else 0
    staged = 16 * rows * (head_dim + 6)
    used = cuda_ring_bytes(head_dim, element_bytes) + staged + folded + 16
    return -(-used // 128) * 128


def most_teams(head_dim: int, element_bytes: int, rows: int) -> int:
    """CUDA decode teams that fit an SM's shared memory and registers.

    Two where a thread holds over 128 sums: rows come in groups of 8, a power of two of them.
    """
    groups = 1 << (-(-rows // 8) - 1).bit_length()
    registers = 2 if head_dim * groups > 128 else 4
    each = cuda_team_bytes(head_dim, element_bytes, rows)
    return min(registers, shared_limit(CUDA_CAPABILITY) // each)


def triton_rows(shape: AttentionShape, prefill: bool) -> int:
    """Rows of a Triton tile: decode's packed rows, to a power of two, or a prefill item's.

    Half as many where sums of 256 columns would fill the registers.
    """
    if prefill:
        return PREFILL_ROWS if shape.head_dim <= 128 else PREFILL_ROWS // 2
    return max(16, 1 << (shape.decode_rows - 1).bit_length())


def _padded_dim(shape: AttentionShape) -> int:
    return max(16, 1 << (shape.head_dim - 1).bit_length())


def triton_stage_bytes(problem: AttentionProblem, config: AttentionConfig) -> int:
    """Keys and values that a Triton CTA has in flight: a step of them every second stage."""
    step = 2 * config.keys * _padded_dim(problem.shape) * cache_bytes(problem)
    return step * max(1, config.num_stages // 2)


def triton_bytes(
    problem: AttentionProblem, config: AttentionConfig, prefill: bool, capability: Capability
) -> int:
    """Shared memory that a Triton CTA takes at most, for the prefill items or the decode items.

    The stages, the queries and a tile of weights; or, when pieces are merged, three tiles of
    decode's partial sums, one of prefill's.
    """
    dim, rows = _padded_dim(problem.shape), triton_rows(problem.shape, prefill)
    stages = triton_stage_bytes(problem, config)
    if prefill and not holds_operands(problem.dtype, capability):
        # the matrix unit reads a step, widened, out of shared memory while the next ones arrive
        stages += 4 * config.keys * dim
    walking = stages + 2 * rows * (dim + config.keys) + 512
    partials = rows if prefill else 3 * min(rows, max(1, 1024 * config.num_warps // dim))
    return max(walking, 4 * dim * partials + 24 * rows)


def _triton_fits(
    problem: AttentionProblem, config: AttentionConfig, prefill: bool, capability: Capability
) -> bool:
    """All resident CTAs fit the SM (1 KB of each is the system's)."""
    each = triton_bytes(problem, config, prefill, capability)
    limit = shared_limit(capability)
    return each <= limit and config.ctas_per_sm * (each + 1024) <= limit + 1024


def _teams_fit(problem: AttentionProblem, teams: int) -> bool:
    shape = problem.shape
    return teams <= most_teams(shape.head_dim, cache_bytes(problem), shape.decode_rows)


def serves_kernel(
    problem: AttentionProblem, config: AttentionConfig, budget: Budget, capability: Capability
) -> bool:
    """The kernel exists, and the CUDA ones are sm_90's (wgmma)."""
    if config.kernel == "cuda":
        return capability == CUDA_CAPABILITY
    return config.kernel in AVAILABLE and capability >= (8, 0)


def serves_head_dim(problem: AttentionProblem, config: AttentionConfig, *_: object) -> bool:
    dim = problem.shape.head_dim
    return dim in CUDA_HEAD_DIMS if config.kernel == "cuda" else 1 <= dim <= MAX_HEAD_DIM


def serves_dtypes(problem: AttentionProblem, config: AttentionConfig, *_: object) -> bool:
    """Caches are of the queries' dtype, or fp8."""
    return problem.cache_dtype in (problem.dtype, "fp8")


def serves_pages(problem: AttentionProblem, config: AttentionConfig, *_: object) -> bool:
    """CUDA finds a key's page by a shift."""
    page = problem.shape.page_size
    return page >= 1 and (config.kernel != "cuda" or page & (page - 1) == 0)


def has_residency(
    problem: AttentionProblem, config: AttentionConfig, budget: Budget, capability: Capability
) -> bool:
    """CTAs share an SM only where a mask keeps the budget."""
    most = CUDA_RESIDENT if config.kernel == "cuda" else MAX_RESIDENT
    return 1 <= config.ctas_per_sm <= (most if budget.confined == "mask" else 1)


def has_teams(problem: AttentionProblem, config: AttentionConfig, *_: object) -> bool:
    """All teams of a CUDA decode CTA fit the SM; a prefill CTA has its own division."""
    if config.kernel != "cuda":
        return True
    if problem.shape.has_prefill:
        return config.teams == CUDA_PREFILL.teams
    return config.teams >= 1 and (config.teams == 1 or _teams_fit(problem, config.teams))


def has_steps(problem: AttentionProblem, config: AttentionConfig, *_: object) -> bool:
    """Triton: steps that divide a piece, whole warps, and at most 2,048 threads an SM."""
    if config.kernel != "triton":
        return True
    known = config.keys in TRITON_KEYS and config.num_warps in TRITON_WARPS
    threads = 32 * config.num_warps * config.ctas_per_sm
    return known and config.num_stages in TRITON_STAGES and threads <= 2048


def fits_shared(
    problem: AttentionProblem, config: AttentionConfig, budget: Budget, capability: Capability
) -> bool:
    """Triton's CTAs fit the SM; CUDA's teams have a rule of their own."""
    return config.kernel != "triton" or _triton_fits(
        problem, config, problem.shape.has_prefill, capability
    )


def keeps_bits(
    problem: AttentionProblem, config: AttentionConfig, budget: Budget, capability: Capability
) -> bool:
    """Neither batch nor budget may turn a row's bits: what decides them is the kernel's default."""
    default = default_config(problem, config.kernel, capability)
    return bits(problem, config) == bits(problem, default)


CONSTRAINTS: tuple[Constraint, ...] = (
    serves_kernel,
    serves_head_dim,
    serves_dtypes,
    serves_pages,
    has_residency,
    has_teams,
    has_steps,
    fits_shared,
    keeps_bits,
)


def violations(
    problem: AttentionProblem, config: AttentionConfig, budget: Budget, capability: Capability
) -> list[str]:
    """Names of the constraints that `config` breaks; empty when it is legal."""
    return [each.__name__ for each in CONSTRAINTS if not each(problem, config, budget, capability)]


def is_legal(
    problem: AttentionProblem, config: AttentionConfig, budget: Budget, capability: Capability
) -> bool:
    return all(each(problem, config, budget, capability) for each in CONSTRAINTS)
