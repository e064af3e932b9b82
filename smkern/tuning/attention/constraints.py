"""Which attention configurations are legal and worth considering: one predicate per constraint.

The tuner, the selection and the tests share these predicates. Whatever changes the order of a
row's sums (`bits`) depends on the model and the request only; batch and budget choose the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from smkern.limits import FP8_BLOCK
from smkern.tuning.attention.shapes import (
    DECODE_MAX_Q,
    DECODE_MAX_ROWS,
    PREFILL_ROWS,
    AttentionConfig,
    AttentionKernel,
    AttentionProblem,
    AttentionShape,
    Budget,
)
from smkern.tuning.constraints import Capability, ctas_fit, holds_operands, shared_limit

AttentionPath = Literal["decode", "prefill", "mixed"]

AVAILABLE: tuple[AttentionKernel, ...] = ("cuda", "triton")
"""Kernels that exist. "cutlass" is reserved in the dispatch and never legal."""
CUDA_CAPABILITY = (9, 0)
CUDA_HEAD_DIMS = (64, 96, 128, 256)
CUDA_TEAM_THREADS = 128
MAX_HEAD_DIM = 256
NARROW_ROWS = 4
"""Up to so many packed rows CUDA decode has kernels of its own (ROWS4 of `csrc/`)."""
TEAMS = (2, 3, 4)
"""Teams of four warps in a CUDA decode CTA; on small budgets as many as fit are best."""
CUDA_RESIDENT = 1
"""CTAs of a CUDA kernel per SM: they are compiled to use a whole SM."""
CUDA_PREFILL = AttentionConfig("cuda", teams=3)
"""The CUDA prefill kernel has one configuration."""
TRITON_KEYS = (16, 32, 64, 128)
TRITON_WARPS = (1, 2, 4, 8)
TRITON_STAGES = range(1, 10)
MAX_RESIDENT = 8

Constraint = Callable[[AttentionProblem, AttentionConfig, Budget, Capability], bool]


def path_of(shape: AttentionShape) -> AttentionPath:
    """The path of an attention step, from its host numbers.

    "mixed": with so many requests for so few query tokens, some must take the decode path.
    """
    if not shape.has_prefill:
        return "decode"
    mixed = shape.has_decode and shape.batch * (DECODE_MAX_Q + 1) > shape.max_tokens
    return "mixed" if mixed else "prefill"


def writes_e4m3(num_q_heads: int, num_kv_heads: int, head_dim: int) -> bool:
    """Whether attention of such heads can write e4m3 with a scale for 128 columns.

    They are then of one head, or of two that read the same KV head, whose rows a CTA has.
    """
    group = num_q_heads // num_kv_heads
    return head_dim % FP8_BLOCK == 0 or (2 * head_dim == FP8_BLOCK and group % 2 == 0)


def default_kernel(problem: AttentionProblem, capability: Capability) -> AttentionKernel:
    """A problem's kernel. Bits depend on it, so only the model and the device decide."""
    serves = capability == CUDA_CAPABILITY and problem.shape.head_dim in CUDA_HEAD_DIMS
    return "cuda" if serves else "triton"


def served_by(
    problem: AttentionProblem, budget: Budget, capability: Capability
) -> AttentionKernel | None:
    """The kernel that can run a problem: the default one, else Triton, else None."""
    for kernel in (default_kernel(problem, capability), "triton"):
        config = replace(default_config(problem, kernel, capability), ctas_per_sm=1)
        if is_legal(problem, config, budget, capability):
            return kernel
    return None


def default_config(
    problem: AttentionProblem, kernel: AttentionKernel, capability: Capability = CUDA_CAPABILITY
) -> AttentionConfig:
    """A kernel's default configuration for a problem, without a tuned cell."""
    if kernel == "triton":
        return triton_config(problem, problem.shape.has_prefill, capability)
    if problem.shape.has_prefill:
        return replace(CUDA_PREFILL, kernel=kernel)
    fitting = [teams for teams in TEAMS if _teams_fit(problem, teams)]
    return AttentionConfig(kernel, teams=max(fitting, default=1))


def triton_config(
    problem: AttentionProblem, prefill: bool, capability: Capability
) -> AttentionConfig:
    """Triton's default for a problem's prefill items, or for its decode items.

    It compiles without spills and fits any device from sm_80 on. Every second of `num_stages` has
    keys in flight: the stages between fetch the page numbers that the keys' addresses need. Where
    an SM has less shared memory than on sm_90, decode uses fewer stages, then fewer CTAs, neither
    of which changes a row's bits.
    """
    wide = problem.shape.head_dim > 128
    if prefill:
        # only wgmma keeps queries in shared memory, which leaves registers for 64 keys
        keys = 64 if capability == CUDA_CAPABILITY and not wide else 32
        return AttentionConfig("triton", keys=keys, num_warps=8, num_stages=2 if wide else 3)
    if wide:
        config = AttentionConfig("triton", ctas_per_sm=2, keys=32, num_warps=4, num_stages=5)
    else:
        config = AttentionConfig("triton", ctas_per_sm=4, keys=32, num_warps=2, num_stages=7)
    while config.num_stages > 3 and not _triton_fits(problem, config, prefill, capability):
        config = replace(config, num_stages=config.num_stages - 2)
    while config.ctas_per_sm > 1 and not _triton_fits(problem, config, prefill, capability):
        config = replace(config, ctas_per_sm=config.ctas_per_sm - 1)
    return config


def bits(config: AttentionConfig) -> tuple[object, ...]:
    """The part of a configuration that decides the order of a row's sums.

    A CUDA team sums a piece by itself, however many teams there are. Triton's row sums depend on
    the keys per step and on the warps that share them.
    """
    if config.kernel == "triton":
        return (config.kernel, config.keys, config.num_warps)
    return (config.kernel,)


def num_ctas(config: AttentionConfig, budget: Budget) -> int:
    """The most CTAs of a launch: one per SM where only the grid keeps the budget."""
    return budget.most_ctas(config.ctas_per_sm)


def cache_bytes(problem: AttentionProblem) -> int:
    """Size of a cache element, bytes."""
    return 1 if problem.cache_dtype == "fp8" else 2


def cuda_ring_bytes(head_dim: int, element_bytes: int) -> int:
    """Bytes of keys and values that the four warps of a CUDA decode team keep in flight.

    Four times kRing of csrc/attention_decode_copy.cuh.
    """
    step = 64 if element_bytes == 1 else 32
    return 4 * 2 * step * head_dim * element_bytes


def cuda_team_bytes(head_dim: int, element_bytes: int, rows: int, teams: int) -> int:
    """Shared memory of each of so many CUDA decode teams with `rows` packed rows, bytes.

    Rings, the sums of a unit, and those of the pieces before it: team_bytes of
    csrc/attention_decode.cuh.
    """
    if head_dim <= 128:
        rows = max(rows, NARROW_ROWS)
    copies = 4 if rows <= NARROW_ROWS or teams <= 2 else 1
    sums, folded = -(-copies * rows * (head_dim + 2) // 4) * 16, 6 * rows * head_dim
    used = cuda_ring_bytes(head_dim, element_bytes) + sums + folded + 48
    return -(-used // 128) * 128


def most_teams(head_dim: int, element_bytes: int, rows: int) -> int:
    """CUDA decode teams that fit an SM's shared memory and registers.

    Two if a thread holds more than 128 sums, three if more than 64: a fourth would spill them. Rows
    are padded to groups of 8.
    """
    sums = head_dim * -(-rows // 8)
    registers = 2 if sums > 128 else 3 if sums > 64 else 4
    limit = shared_limit(CUDA_CAPABILITY)
    fitting = range(1, registers + 1)
    return max(n for n in fitting if n * cuda_team_bytes(head_dim, element_bytes, rows, n) <= limit)


def triton_rows(shape: AttentionShape, prefill: bool) -> int:
    """Rows of a Triton tile: decode's, or prefill's, of which half as many where sums over 256
    columns would fill the registers.
    """
    if not prefill:
        return DECODE_MAX_ROWS
    return PREFILL_ROWS if shape.head_dim <= 128 else PREFILL_ROWS // 2


def _padded_dim(shape: AttentionShape) -> int:
    return max(16, 1 << (shape.head_dim - 1).bit_length())


def triton_stage_bytes(problem: AttentionProblem, config: AttentionConfig) -> int:
    """Bytes of keys and values in flight in a Triton CTA: a step of them every second stage."""
    step = 2 * config.keys * _padded_dim(problem.shape) * cache_bytes(problem)
    return step * max(1, config.num_stages // 2)


def triton_bytes(
    problem: AttentionProblem, config: AttentionConfig, prefill: bool, capability: Capability
) -> int:
    """Upper bound of a Triton CTA's shared memory, for the prefill items or the decode items.

    The stages, the queries and a tile of probabilities; or, while merging pieces, three tiles of
    partial sums for decode, one for prefill.
    """
    dim, rows = _padded_dim(problem.shape), triton_rows(problem.shape, prefill)
    stages = triton_stage_bytes(problem, config)
    if prefill and not holds_operands(problem.dtype, capability):
        # the matrix unit reads a widened step from shared memory while the next ones arrive
        stages += 4 * config.keys * dim
    walking = stages + 2 * rows * (dim + config.keys) + 512
    partials = rows if prefill else 3 * min(rows, max(1, 1024 * config.num_warps // dim))
    return max(walking, 4 * dim * partials + 24 * rows)


def _triton_fits(
    problem: AttentionProblem, config: AttentionConfig, prefill: bool, capability: Capability
) -> bool:
    """All resident CTAs fit the SM."""
    each = triton_bytes(problem, config, prefill, capability)
    return ctas_fit(each, config.ctas_per_sm, capability)


def _teams_fit(problem: AttentionProblem, teams: int) -> bool:
    shape = problem.shape
    return teams <= most_teams(shape.head_dim, cache_bytes(problem), shape.decode_rows)


def serves_kernel(
    problem: AttentionProblem, config: AttentionConfig, budget: Budget, capability: Capability
) -> bool:
    """The kernel exists; CUDA kernels need sm_90 (wgmma)."""
    if config.kernel == "cuda":
        return capability == CUDA_CAPABILITY
    return config.kernel in AVAILABLE and capability >= (8, 0)


def serves_head_dim(problem: AttentionProblem, config: AttentionConfig, *_: object) -> bool:
    dim = problem.shape.head_dim
    return dim in CUDA_HEAD_DIMS if config.kernel == "cuda" else 1 <= dim <= MAX_HEAD_DIM


def serves_dtypes(problem: AttentionProblem, config: AttentionConfig, *_: object) -> bool:
    """The cache has the queries' dtype, or is fp8."""
    return problem.cache_dtype in (problem.dtype, "fp8")


def serves_pages(problem: AttentionProblem, config: AttentionConfig, *_: object) -> bool:
    """CUDA needs a power-of-two page size: it finds a key's page by a shift."""
    page = problem.shape.page_size
    return page >= 1 and (config.kernel != "cuda" or page & (page - 1) == 0)


def has_residency(
    problem: AttentionProblem, config: AttentionConfig, budget: Budget, capability: Capability
) -> bool:
    """Several CTAs per SM only where a mask keeps the budget."""
    most = CUDA_RESIDENT if config.kernel == "cuda" else MAX_RESIDENT
    return 1 <= config.ctas_per_sm <= (most if budget.confined == "mask" else 1)


def has_teams(problem: AttentionProblem, config: AttentionConfig, *_: object) -> bool:
    """All teams of a CUDA decode CTA fit the SM; prefill divides its CTA in its own way."""
    if config.kernel != "cuda":
        return True
    if problem.shape.has_prefill:
        return config.teams == CUDA_PREFILL.teams
    return config.teams >= 1 and (config.teams == 1 or _teams_fit(problem, config.teams))


def has_steps(problem: AttentionProblem, config: AttentionConfig, *_: object) -> bool:
    """Triton: steps that divide a piece, whole warps, and at most 2,048 threads per SM."""
    if config.kernel != "triton":
        return True
    known = config.keys in TRITON_KEYS and config.num_warps in TRITON_WARPS
    threads = 32 * config.num_warps * config.ctas_per_sm
    return known and config.num_stages in TRITON_STAGES and threads <= 2048


def fits_shared(
    problem: AttentionProblem, config: AttentionConfig, budget: Budget, capability: Capability
) -> bool:
    """Triton's CTAs fit the SM; for CUDA see `has_teams`."""
    return config.kernel != "triton" or _triton_fits(
        problem, config, problem.shape.has_prefill, capability
    )


def keeps_bits(
    problem: AttentionProblem, config: AttentionConfig, budget: Budget, capability: Capability
) -> bool:
    """Batch and budget must not change a row's bits: fields that decide them have the defaults."""
    default = default_config(problem, config.kernel, capability)
    return bits(config) == bits(default)


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
