"""What a GEMM configuration must satisfy to be launched, one predicate per constraint.

The tuner, the dispatcher and the tests share these predicates. `CONSTRAINTS` names them; a
configuration is legal when none is violated.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from math import ceil
from typing import Protocol

from smkern.tuning.config import STREAM_K, Budget, Dtype, GemmConfig, GemmProblem, Kernel

Capability = tuple[int, int]
LIBRARIES: tuple[Kernel, ...] = ("cublaslt", "unfused")
"""Backends that choose their own tiles."""

COUNTER_BYTES = 64 * 1024
MAX_WORKSPACE_BYTES = 64 * 1024 * 1024
MAX_GATE_UP_BYTES = 64 * 1024 * 1024
"""Above this, writing and reading gate and up costs more than any other GEMM gains."""
REGISTERS_PER_SM = 65536
ACCUMULATORS, ACCUMULATORS_BESIDE_OPERANDS = 128, 64
"""Accumulators per thread above which the compiler spills; the smaller limit is for kernels that
also hold operands in registers: mma.sync, and fp32, which runs on the vector units."""
UNALIGNED_OPERANDS, UNALIGNED_SWIGLU = 48, 72
"""Elements of both operands in a step, per thread: unaligned rows go through registers. Up to 48
compiled to spills of 100 bytes at most on sm_80, sm_100 and sm_120, more to up to 8,000. SwiGLU has
no smaller tile for few rows."""
SHARED_BYTES: dict[Capability, int] = {
    (8, 0): 166_912, (8, 6): 101_376, (8, 7): 166_912, (8, 9): 101_376, (9, 0): 232_448,
    (12, 0): 101_376, (12, 1): 101_376,
}  # fmt: skip
"""Shared memory limit of a CTA, bytes; `shared_limit` covers devices that are not listed."""

AVAILABLE: tuple[Kernel, ...] = ("ws", "tma", "pointer")
"""smkern's own kernels, among which dispatch chooses."""
OPTIONAL: tuple[Kernel, ...] = ("cutlass",)
"""Those that need an extra: the tuner chooses them where it is there, dispatch from a table."""

TILES = ((64, 64), (64, 128), (64, 256), (128, 64), (128, 128), (128, 256), (256, 64), (256, 128))
"""(block_m, block_n) of every kernel."""
WS_TILES = ((64, 192), (128, 96), (128, 160), (128, 192), (256, 96))
"""ws's column side may also be 5/4 or 3/2 of a power of two."""
SWAPPED_ROWS = (64, 128, 256)
SWAPPED_COLUMNS = (16, 32, 64, 128)
WS_SWAPPED_COLUMNS = (48, 80, 96, 160, 192)
CUTLASS_COLUMNS = tuple(range(24, 257, 8))
"""cutlass's column side has one accumulator of any width that the matrix unit has."""
MAX_STAGES = 12
MAX_GROUP = 16
"""Row tiles of a raster group."""


def tiles_of(kernel: Kernel, swap: bool) -> tuple[tuple[int, int], ...]:
    """A kernel's tiles (block_m, block_n), weights on the row side if `swap`."""
    if kernel == "cutlass":
        found = tuple(product((64, 128), CUTLASS_COLUMNS))
        return tuple((columns, rows) for rows, columns in found) if swap else found
    ws = kernel == "ws"
    if not swap:
        return TILES + WS_TILES * ws
    columns = SWAPPED_COLUMNS + WS_SWAPPED_COLUMNS * ws
    return tuple((m, n) for n in SWAPPED_ROWS for m in columns)


def element_bytes(dtype: Dtype) -> int:
    return 4 if dtype == "fp32" else 2


def shared_limit(capability: Capability) -> int:
    """Shared memory limit of a CTA, bytes; an unknown device gets that of similar ones."""
    alike = (9, 0) if (9, 0) <= capability < (12, 0) else (8, 6)
    return SHARED_BYTES.get(capability, SHARED_BYTES[alike])


def ctas_fit(each: int, count: int, capability: Capability) -> bool:
    """Whether CTAs of so many bytes fit an SM's shared memory: the system reserves 1 KB each."""
    limit = shared_limit(capability)
    return each <= limit and count * (each + 1024) <= limit + 1024


def holds_operands(dtype: Dtype, capability: Capability) -> bool:
    """Whether matrix products read their operands from registers, not from shared memory."""
    return dtype == "fp32" or capability[0] not in (9, 10)


def is_by_element(problem: GemmProblem, capability: Capability) -> bool:
    """Whether operands come element by element, as rows that are not 16-byte aligned do.

    sm_90's choices stay as they were, which spill as well.
    """
    return not problem.aligned and capability[0] != 9


def shared_bytes(config: GemmConfig, dtype: Dtype = "bf16", residual: bool = False) -> int:
    """Shared memory of one CTA: the pipeline's stages, plus the epilogue of ws.

    ws converts its accumulator's layout in chunks; the figures are upper bounds of what the
    compiler takes for that.
    """
    size = element_bytes(dtype)
    stages = config.num_stages * (config.block_m + config.block_n) * config.block_k * size
    if config.kernel != "ws":
        return stages + (1024 if config.kernel == "cutlass" else 256)
    return stages + _epilogue_bytes(config, residual) + 512


def _epilogue_bytes(config: GemmConfig, residual: bool) -> int:
    """Chunks are 16-bit, except fp32 for a swapped tile with a residual."""
    if config.swap:
        wide = config.num_warps == 8 or config.block_n == 256
        if not residual:
            return 4096 if wide else 2048
        return min(4 * config.block_m * config.block_n, 32 * 1024 if wide else 16 * 1024)
    extra = config.block_n - (1 << (config.block_n.bit_length() - 1))
    if extra or config.num_warps == 8:
        return min(2 * config.block_m * (extra or config.block_n), 32 * 1024)
    return 8 * 1024


def registers(config: GemmConfig, holds_operands: bool) -> int:
    """Registers of one CTA: the accumulator plus at least 28 per thread.

    ws has four more warps for copying, compiled for the same count. Operands take twice as many as
    the accumulator: 8, 16, 32 and 64 accumulators compiled to 72, 128, 168 and 255 registers.
    """
    threads = 32 * config.num_warps
    accumulators = -(-config.block_m * config.block_n // threads)
    if config.kernel == "cutlass":
        return REGISTERS_PER_SM  # those that the copying warps leave, the others take
    if config.kernel == "ws":
        return (threads + 128) * (accumulators + 28)
    if holds_operands:
        return threads * min(255, 3 * accumulators + 64)
    return threads * (accumulators + 40)


def num_ctas(config: GemmConfig, budget: Budget) -> int:
    """Size of the grid: `ctas_per_sm` per SM under a mask, else at most one per SM."""
    ctas = budget.most_ctas(config.ctas_per_sm)
    return min(ctas, config.max_ctas) if config.max_ctas else ctas


def num_tiles(problem: GemmProblem, config: GemmConfig) -> int:
    return ceil(problem.m / config.block_m) * ceil(problem.n / config.block_n)


def k_steps(problem: GemmProblem, config: GemmConfig) -> int:
    return max(1, ceil(problem.k / config.block_k))


def gate_up_bytes(problem: GemmProblem) -> int:
    """Bytes of gate and up that the plain GEMM writes for `silu_and_mul`."""
    return element_bytes(problem.dtype) * problem.m * problem.n


def gate_up_at(gemm_workspace_bytes: int) -> int:
    """Offset of the plain GEMM's result in a workspace: behind the GEMM's own part and the
    counters, which other launches on the stream rely on."""
    return -(-max(gemm_workspace_bytes, COUNTER_BYTES) // 256) * 256


def partials_fit(config: GemmConfig, split: int, tiles: int, ctas: int) -> bool:
    """The counters and fp32 partial tiles of a split launch fit the largest workspace."""
    if split == 1:
        return True
    # two slots per CTA; stream-K streams fewer than two waves of tiles
    counters = tiles if split > 1 else 2 * ctas
    partials = 4 * config.block_m * config.block_n * 2 * min(ctas, max(1, split) * tiles)
    return COUNTER_BYTES + partials <= MAX_WORKSPACE_BYTES and 4 * counters <= COUNTER_BYTES


Constraint = Callable[[GemmProblem, GemmConfig, Budget, Capability], bool]


def serves_dtype(problem: GemmProblem, config: GemmConfig, *_: object) -> bool:
    """fp32 runs in the pointer kernel only."""
    return problem.dtype != "fp32" or config.kernel == "pointer"


def runs_on_device(
    problem: GemmProblem, config: GemmConfig, budget: Budget, capability: Capability
) -> bool:
    """ws and cutlass need sm_90's warpgroup instructions, tma sm_90 or later."""
    hopper = capability[0] == 9
    needed = {"ws": hopper, "cutlass": hopper, "tma": capability >= (9, 0)}
    return capability >= (8, 0) and needed.get(config.kernel, True)


def serves_alignment(problem: GemmProblem, config: GemmConfig, *_: object) -> bool:
    """Bulk copies and 16-byte loads need 16-byte rows and bases."""
    return problem.aligned or config.kernel == "pointer"


def has_tile(problem: GemmProblem, config: GemmConfig, *_: object) -> bool:
    """The matrix unit's row side needs 64 rows; ws and cutlass have odd columns, block_k = 64.

    With SwiGLU a tile of tma or pointer is two tiles of half the weight rows.
    """
    if config.kernel in LIBRARIES:
        return True
    if config.kernel == "cutlass" and problem.epilogue.swiglu and config.block_n % 16:
        return False
    halves = config.kernel in ("tma", "pointer")
    if problem.epilogue.swiglu and config.swap and halves and config.block_n < 128:
        return False
    if config.block_k not in (64, 128) and not (problem.dtype == "fp32" and config.block_k == 32):
        return False
    columns = config.block_m if config.swap else config.block_n
    if (columns & (columns - 1) or config.kernel == "cutlass") and config.block_k != 64:
        return False
    return (config.block_m, config.block_n) in tiles_of(config.kernel, config.swap)


def has_warps(
    problem: GemmProblem, config: GemmConfig, budget: Budget, capability: Capability
) -> bool:
    """4 or 8 warps, and no more accumulators per thread than its registers hold.

    A step in fp32 is fully unrolled, so its operands are in registers as well, and so are those of
    unaligned rows.
    """
    if config.kernel in LIBRARIES:
        return True
    most = ACCUMULATORS
    if config.kernel == "cutlass":
        most = _cutlass_accumulators(problem, config)
    if holds_operands(problem.dtype, capability):
        most = ACCUMULATORS_BESIDE_OPERANDS
        if problem.dtype == "fp32":
            most = most * 32 // max(config.block_k, 32)
    threads = 32 * config.num_warps
    if config.kernel == "cutlass" and config.num_warps != 4:
        return False
    elements = (config.block_m + config.block_n) * config.block_k
    most_elements = UNALIGNED_SWIGLU if problem.epilogue.swiglu else UNALIGNED_OPERANDS
    if is_by_element(problem, capability) and elements > most_elements * threads:
        return False
    return config.num_warps in (4, 8) and config.block_m * config.block_n <= most * threads


def _cutlass_accumulators(problem: GemmProblem, config: GemmConfig) -> int:
    """Above this, its compiler spills: it loads bias and residual early."""
    if problem.epilogue.bias or problem.epilogue.activation:
        return 176
    return 184 if config.swap else 200


def has_stages(problem: GemmProblem, config: GemmConfig, *_: object) -> bool:
    return 2 <= config.num_stages <= MAX_STAGES


def fits_shared(
    problem: GemmProblem, config: GemmConfig, budget: Budget, capability: Capability
) -> bool:
    """The stages of all resident CTAs fit the SM."""
    if config.kernel in LIBRARIES:
        return True
    each = shared_bytes(config, problem.dtype, problem.epilogue.residual)
    return ctas_fit(each, config.ctas_per_sm, capability)


def fits_registers(
    problem: GemmProblem, config: GemmConfig, budget: Budget, capability: Capability
) -> bool:
    each = registers(config, holds_operands(problem.dtype, capability))
    if is_by_element(problem, capability):
        each = 32 * config.num_warps * 255  # what it compiles to
    return config.kernel in LIBRARIES or config.ctas_per_sm * each <= REGISTERS_PER_SM


def has_release(problem: GemmProblem, config: GemmConfig, *_: object) -> bool:
    """Only ws can choose when to release a stage."""
    return config.kernel == "ws" or not config.eager


def has_residency(problem: GemmProblem, config: GemmConfig, *_: object) -> bool:
    return 1 <= config.ctas_per_sm <= 3 and config.max_ctas >= 0


def has_groups(problem: GemmProblem, config: GemmConfig, *_: object) -> bool:
    return 1 <= config.group_m <= MAX_GROUP


def has_pieces(problem: GemmProblem, config: GemmConfig, *_: object) -> bool:
    """Every K piece has work, so that its CTA arrives; cutlass splits no K loop."""
    if config.kernel == "cutlass" and config.split != 1:
        return False
    return config.split >= STREAM_K and config.split <= k_steps(problem, config)


def fits_workspace(
    problem: GemmProblem, config: GemmConfig, budget: Budget, capability: Capability
) -> bool:
    ctas = num_ctas(config, budget)
    return partials_fit(config, config.split, num_tiles(problem, config), ctas)


def keeps_invariance(problem: GemmProblem, config: GemmConfig, *_: object) -> bool:
    """Where K is cut may depend on (n, k, dtype) only: no stream-K, no library kernels."""
    if not problem.batch_invariant:
        return True
    return config.split == 1 and config.kernel not in LIBRARIES


def serves_library(
    problem: GemmProblem, config: GemmConfig, budget: Budget, capability: Capability
) -> bool:
    """cuBLASLt: bf16 or fp16, bias and residual, and only where its clusters can launch."""
    if config.kernel != "cublaslt":
        return True
    epilogue = problem.epilogue
    plain = epilogue.activation is None and not epilogue.swiglu
    return plain and budget.clusters and problem.dtype != "fp32"


def serves_swiglu(problem: GemmProblem, config: GemmConfig, *_: object) -> bool:
    """SwiGLU has no other epilogue and pairs rows; unfused, gate and up fit the workspace."""
    epilogue = problem.epilogue
    if not epilogue.swiglu:
        return config.kernel != "unfused"
    if config.kernel == "unfused" and gate_up_bytes(problem) > MAX_GATE_UP_BYTES:
        return False
    alone = not epilogue.bias and not epilogue.residual and epilogue.activation is None
    return alone and problem.n % 2 == 0


CONSTRAINTS: tuple[Constraint, ...] = (
    serves_dtype,
    runs_on_device,
    serves_alignment,
    has_tile,
    has_warps,
    has_stages,
    has_release,
    has_residency,
    has_groups,
    fits_shared,
    fits_registers,
    has_pieces,
    fits_workspace,
    keeps_invariance,
    serves_library,
    serves_swiglu,
)


def violations(
    problem: GemmProblem, config: GemmConfig, budget: Budget, capability: Capability
) -> list[str]:
    """Names of the constraints that `config` breaks; empty when it is legal."""
    return [each.__name__ for each in CONSTRAINTS if not each(problem, config, budget, capability)]


class Operands(Protocol):
    """Of any GEMM: whether rows and bases are 16-byte aligned, and what is multiplied."""

    @property
    def aligned(self) -> bool: ...

    @property
    def dtype(self) -> str: ...


def may_serve_extras(problem: Operands, capability: Capability) -> bool:
    """Whether any configuration of a kernel that needs an extra runs a problem."""
    return problem.aligned and problem.dtype != "fp32" and capability[0] == 9


def is_legal(
    problem: GemmProblem, config: GemmConfig, budget: Budget, capability: Capability
) -> bool:
    return all(each(problem, config, budget, capability) for each in CONSTRAINTS)


CUBLASLT = GemmConfig("cublaslt", 128, 128, 64)
"""The library's configuration; it chooses the rest itself."""

UNFUSED = GemmConfig("unfused", 128, 128, 64)
"""SwiGLU as a plain GEMM, configured as such, followed by `silu_and_mul`."""
