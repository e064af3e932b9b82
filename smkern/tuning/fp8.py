"""GEMMs of e4m3 with scales: problem, candidates, and the cost model's choice.

A product of K in e4m3 moves the bytes and takes the matrix unit's time of one of K / 2 in bf16, so
the cost model is asked about that twin, whose `block_k` of 64 are 128 e4m3.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import log
from operator import itemgetter
from typing import TYPE_CHECKING, Literal

from smkern.device import check_budget
from smkern.errors import ArgumentError
from smkern.tuning import candidates, constraints, cost_model, fp8_cutlass
from smkern.tuning.config import Budget, Dtype, Epilogue, GemmConfig, GemmProblem, Kernel
from smkern.tuning.cost_constants import DEFAULTS, load_constants
from smkern.tuning.grouped import GroupedConfig
from smkern.tuning.select import INVARIANT_BUDGETS, INVARIANT_ROWS, Nominal

if TYPE_CHECKING:
    from smkern.profile import Profile

Scales = Literal["matrix", "row", "mixed", "block"]
"""One number for all of a and one for all of w; one a row of both; rows of one side alone, or in
vectors that begin anywhere; 1 x 128 of a by 128 x 128 of w."""
_PLURALS = {"matrix": "matrices", "row": "rows", "mixed": "rows", "block": "blocks"}
STEP = 64
"""`block_k` of the twin: 128 e4m3."""
TILES = ((64, 64), (64, 128), (128, 64), (128, 128), (128, 192), (128, 256))
"""(block_m, block_n): 64 rows a warpgroup. The last two with scales of blocks only: on the whole
chip 128 x 256 is 2 to 5% faster than 128 x 128 there, with scales of rows 5 to 13% slower."""
SWAPPED = ((16, 64), (32, 64), (64, 64), (16, 128), (32, 128), (64, 128))
"""(block_m, block_n) with weights on the row side."""
COLUMNS = (16, 32, 64)
"""Columns of swapped tiles."""
TURNS = 4
"""Steps whose sums take turns, and whose scales of rows are fetched at once."""
CROWDED = 1.2
"""Time over the twin's where a tile is wide or several share an SM, of more than 64 rows.

Sums are promoted between steps, which nothing hides there: 192 tuned cells of an H200 and an H100
took 1.18 in the median of what the twin is predicted to, 384 of 128 x 128, one an SM, 0.94."""
FEW_ROWS = {
    (16, 64, True, 1): (0.73, 0.78),
    (16, 64, True, 2): (0.83, 0.92),
    (16, 64, True, 3): (0.99, 1.08),
    (16, 128, True, 1): (0.81, 0.92),
    (16, 128, True, 2): (1.03, 1.11),
    (16, 128, True, 3): (1.00, 1.05),
    (32, 64, True, 1): (0.78, 0.88),
    (32, 64, True, 2): (0.89, 1.07),
    (32, 64, True, 3): (1.04, 1.25),
    (32, 128, True, 1): (0.82, 1.01),
    (32, 128, True, 2): (1.06, 1.22),
    (64, 64, False, 1): (0.86, 0.89),
    (64, 64, False, 2): (1.04, 1.07),
    (64, 64, False, 3): (1.11, 1.14),
    (64, 64, True, 1): (0.84, 1.0),
    (64, 64, True, 2): (1.02, 1.0),
    (64, 128, False, 1): (0.86, 0.85),
    (64, 128, False, 2): (1.04, 1.04),
    (64, 128, True, 1): (0.86, 1.0),
}
"""Time over the twin's of up to 64 rows on few SMs, by (block_m, block_n, swap, CTAs an SM), with
scales of rows and of blocks; on all SMs the logarithm is a third of that.

Fitted to 3,819 times of 300 cells of an H200, 16 to 60 SMs. By them the model's choice takes 1.010
of the best candidate's time, 1.123 at worst, where it took 1.026 and 1.244; 1.011 with the weights
left out of the fit. What an H200's cells of more SMs and an H100's of all take over what is told
spreads by 0.054 and 0.064, where it did by 0.090 and 0.087."""
OTHER_REGISTERS = 32
"""Registers of a multiplying thread beside its sums and its scales."""
COPY_REGISTERS = 24
MAX_SWAPPED_ROWS = 192
MAX_SWAPPED_COLUMNS = 32
"""Of a swapped tile with scales of blocks."""
LIBRARY_ROWS: dict[Scales, int] = {"matrix": 64, "row": 768}
"""Rows above which cuBLASLt serves the whole device, by scales. Ours took 1.11 times its time there
by matrices on an H100 (60 products, 0.94 to 1.64), 1.10 on an H200 (72, 0.74 to 1.56), and 1.05 and
1.04 by rows (24 each, 0.98 to 1.15); below 0.96, 1.02 and 0.89, 0.84."""
PLAIN = Epilogue()
GATED = GemmConfig("ws", 128, 256, STEP, 8, 4, eager=True)
"""The kernel of gate, up and what follows: 128 columns of both, as results share their scales."""
GATED_UNIT = 16
"""Elements of its result that it stores at once, and that the stride of their rows counts."""
GATED_ROWS = 257
"""Rows from which it is taken: 256 took 1.10 of two kernels' time on 84 and 132 SMs, 512 0.93."""


@dataclass(frozen=True, slots=True, order=True)
class ScaledProblem:
    """out [m, n] = (a [m, k] @ w [n, k]^T), scaled, in e4m3.

    `aligned`: a, w and out have 16-byte rows and bases. `kernel`: the one that is asked for, "own"
    for any of ours, "model" for the cost model's whatever tables have, or "".
    """

    m: int
    n: int
    k: int
    out_dtype: Dtype = "bf16"
    epilogue: Epilogue = PLAIN
    scales: Scales = "row"
    aligned: bool = True
    batch_invariant: bool = False
    kernel: str = ""

    @property
    def blocks(self) -> bool:
        """Whether scales change along K."""
        return self.scales == "block"

    @property
    def twin(self) -> GemmProblem:
        """The GEMM of 16-bit elements that takes as long."""
        return GemmProblem(
            self.m, self.n, -(-self.k // 2), self.out_dtype, self.epilogue, self.aligned,
            self.batch_invariant,
        )  # fmt: skip

    @property
    def dtype(self) -> str:
        """What is multiplied, in words."""
        return f"e4m3 by {_PLURALS[self.scales]}"

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def bytes_moved(self) -> int:
        """Each operand read once, the output written once; scales are 1/32 at most."""
        return self.twin.bytes_moved


def parts(config: GemmConfig) -> int:
    """Warpgroups that multiply 64 rows each."""
    return config.num_warps // 4


def is_wide(config: GemmConfig) -> bool:
    """Whether a tile's columns are multiplied 64 at a time, summed by themselves."""
    return config.block_n > 128 and not config.swap and config.kernel == "ws"


def base_registers(config: GemmConfig | GroupedConfig) -> int:
    """Registers a thread that a launch gets; warpgroups exchange them later."""
    threads = 32 * (config.num_warps + 4)  # the copying warp's group is four warps wide
    return min(constraints.REGISTERS_PER_SM // (threads * config.ctas_per_sm) // 8 * 8, 255)


def multiply_registers(config: GemmConfig | GroupedConfig, copying: int = COPY_REGISTERS) -> int:
    """Registers of a multiplying thread, once the copying warpgroup has none but `copying`."""
    warps = config.num_warps
    found = (base_registers(config) * (warps + 4) - 4 * copying) // warps // 8 * 8
    return min(found, 240)


def fits_registers(config: GemmConfig) -> bool:
    """Whether two sums in tensor cores and the one in fp32 fit without spills.

    Of a wide tile the two are of 64 columns, and a thread holds 16 registers of rows. Swapped, it
    has scales of a quarter of the columns, of this step and of the next.
    """
    if is_wide(config):
        needed = config.block_n // 2 + 64 + 16
    else:
        columns = config.block_m if config.swap else config.block_n
        needed = (3 + config.swap) * columns // 2
    return needed + OTHER_REGISTERS <= multiply_registers(config)


def shared_bytes(config: GemmConfig, residual: bool) -> int:
    """Shared memory of one CTA; each warpgroup converts its results in a chunk of its own."""
    if config.swap:
        # with scales of blocks, those of rows of TURNS steps
        scales = parts(config) * TURNS * 4 * config.block_m
        scales *= config.block_m <= MAX_SWAPPED_COLUMNS
        return constraints.shared_bytes(config, "bf16", residual) + scales
    stages = config.num_stages * 2 * STEP * (config.block_m + config.block_n)
    return stages + parts(config) * 8 * 1024 + 512


def fits_shared(config: GemmConfig, residual: bool, capability: tuple[int, int]) -> bool:
    """The stages of all resident CTAs fit the SM."""
    each = shared_bytes(config, residual)
    return constraints.ctas_fit(each, config.ctas_per_sm, capability)


@lru_cache(maxsize=64)
def variants(
    residual: bool, confined: bool, capability: tuple[int, int], blocks: bool
) -> tuple[GemmConfig, ...]:
    """Compiled variants of the warp-specialised kernel, each as deep as fits; split 1.

    Swapped, a thread multiplies by the scales of a quarter of the columns: with those of blocks,
    that change every step, wide tiles took twice as long.
    """
    found = []
    for swap, tiles in ((False, TILES), (True, SWAPPED)):
        for (m, n), ctas in product(tiles, (1, 2, 3) if confined else (1,)):
            if m > MAX_SWAPPED_COLUMNS if blocks and swap else n > 128 and not blocks:
                continue
            warps = (n if swap else m) // 16
            for stages in range(constraints.MAX_STAGES, 2, -1):
                config = GemmConfig("ws", m, n, STEP, warps, stages, swap, ctas, eager=True)
                if fits_shared(config, residual, capability):
                    if fits_registers(config):
                        found.append(config)
                    break
    return tuple(found)


def variants_for(
    problem: ScaledProblem, confined: bool, capability: tuple[int, int], kernel: Kernel
) -> tuple[GemmConfig, ...]:
    """Those of the warp-specialised kernel or of CUTLASS's."""
    if kernel == "cutlass":
        return fp8_cutlass.variants(capability)
    return variants(problem.epilogue.residual, confined, capability, problem.blocks)


def sensible(m: int, config: GemmConfig) -> bool:
    """Whether no other tile is clearly better for `m` rows."""
    if config.kernel == "cutlass":
        return fp8_cutlass.pays(m)
    if not config.swap:
        return m > 32 and config.block_m < 2 * m
    tiles = -(-m // config.block_m)
    lowest = min(columns for columns in COLUMNS if -(-m // columns) <= tiles)
    return m <= MAX_SWAPPED_ROWS and tiles <= 3 and config.block_m == lowest


def serves_ws(problem: ScaledProblem, capability: tuple[int, int]) -> bool:
    """Whether the warp-specialised kernel can run: bulk copies want 16-byte rows."""
    asked = problem.kernel in ("", "own", "model", "ws", "cutlass")
    return problem.aligned and capability[0] == 9 and asked


def serves_library(problem: ScaledProblem, budget: Budget, profile: Profile) -> bool:
    """Whether cuBLASLt can run a problem: on sm_90, on the whole device, as its SM count is a hint.

    With scales of blocks it would read those of `a` by columns; `quantize` writes them by rows.
    """
    info, epilogue = profile.info, problem.epilogue
    whole = budget.num_sms == info.num_sms and budget.clusters and info.capability == (9, 0)
    fits = problem.aligned and problem.n % 16 == 0 and problem.scales in LIBRARY_ROWS
    plain = not (epilogue.activation or epilogue.swiglu or problem.batch_invariant)
    return whole and fits and plain


def is_librarys(problem: ScaledProblem, budget: Budget, profile: Profile) -> bool:
    """Whether cuBLASLt does run it: asked for, or of so many rows that it is the faster.

    Raises:
        ArgumentError: it is asked for, and cannot.
    """
    serves = serves_library(problem, budget, profile)
    if problem.kernel == "cublaslt" and not serves:
        raise ArgumentError(
            f"backend='cublaslt' cannot run {problem.m}x{problem.n}x{problem.k} in e4m3 (scales of "
            f"{problem.scales}, epilogue {problem.epilogue.key!r}, {budget.num_sms} SMs, 16-byte "
            f"aligned: {problem.aligned}, batch_invariant={problem.batch_invariant}): it takes "
            "scales of matrices, or of rows of both that begin at whole 16 bytes, aligned rows, n "
            "in multiples of 16, bias and residual alone and the whole of an sm_90 device; leave "
            "backend at None"
        )
    if problem.kernel:
        return problem.kernel == "cublaslt"
    return serves and problem.m > LIBRARY_ROWS[problem.scales]


def serves_gated(problem: ScaledProblem, capability: tuple[int, int]) -> bool:
    """Whether one kernel multiplies, gates and quantizes: K is whole there, scales are of blocks.

    A batch-invariant product takes one kernel for any number of rows.
    """
    if not (problem.blocks and serves_ws(problem, capability)) or problem.n % GATED.block_n:
        return False
    free = not problem.batch_invariant and problem.kernel != "cutlass"
    return free and problem.m >= GATED_ROWS


def pointer_config(problem: ScaledProblem, budget: Budget) -> GemmConfig:
    """The pointer kernel's tile: larger ones spill, as operands go through registers."""
    config = GemmConfig("pointer", 64, 64, STEP, 8, 3)
    group = candidates.group_m(problem.m, config, budget.num_sms)
    return replace(config, group_m=group, overlap=False)


def ranked(
    problem: ScaledProblem, budget: Budget, profile: Profile, kernel: Kernel = "ws"
) -> Iterator[tuple[float, GemmConfig]]:
    """Configurations of a kernel, "ws" or "cutlass", and their predicted times, us; unsorted."""
    constants = load_constants(profile.info.name, profile.info.capability)
    ceilings = cost_model.Ceilings(budget, profile, constants)
    twin = problem.twin
    capability, masked = profile.info.capability, budget.confined == "mask"
    for variant in variants_for(problem, masked, capability, kernel):
        if problem.kernel != "cutlass" and not sensible(problem.m, variant):
            continue
        group = candidates.group_m(problem.m, variant, budget.num_sms)
        estimate = cost_model.Estimate(twin, variant, ceilings, constants, group)
        longer = _over_twin(problem, variant, budget.num_sms / profile.info.num_sms)
        cuts: tuple[int, ...] = (1,)
        if kernel != "cutlass":
            cuts = candidates.splits(estimate.tiles, estimate.ctas, estimate.steps)
        for split in cuts:
            for cap in estimate.grids(split):
                config = replace(variant, split=split, group_m=group, max_ctas=cap)
                if can_split(twin, config, cap or estimate.ctas):
                    us, overlap = estimate.fastest_us(split, cap)
                    yield longer * us, replace(config, overlap=overlap)


def _over_twin(problem: ScaledProblem, config: GemmConfig, share: float) -> float:
    """Time of a product over its twin's, on a share of the device's SMs."""
    if config.kernel == "cutlass":
        return fp8_cutlass.over_twin(problem.blocks, config)
    if problem.m > COLUMNS[-1]:
        return CROWDED if config.ctas_per_sm > 1 or is_wide(config) else 1.0
    tile = config.block_m, config.block_n, config.swap, config.ctas_per_sm
    few = FEW_ROWS.get(tile, (1.0, 1.0))[problem.blocks]
    return few ** (1 - 2 / 3 * share)


def predict_us(
    problem: ScaledProblem, config: GemmConfig, budget: Budget, profile: Profile
) -> float:
    """The model's time of one configuration, us."""
    constants = load_constants(profile.info.name, profile.info.capability)
    twin_us = cost_model.predict_us(problem.twin, config, budget, profile, constants)
    return _over_twin(problem, config, budget.num_sms / profile.info.num_sms) * twin_us


def can_split(twin: GemmProblem, config: GemmConfig, ctas: int) -> bool:
    """Whether a split's partial tiles fit the workspace; each warpgroup counts its own."""
    tiles = parts(config) * constraints.num_tiles(twin, config)
    return constraints.partials_fit(config, config.split, tiles, ctas)


def choose(problem: ScaledProblem, budget: Budget, profile: Profile) -> GemmConfig:
    """The configuration that the model predicts to be fastest.

    With `batch_invariant` it depends on (n, k) and the kind alone, and K is not split.

    Raises:
        BudgetError: a budget below one SM.
    """
    check_budget(budget)
    capability = profile.info.capability
    if problem.epilogue.swiglu:
        return replace(GATED, group_m=candidates.group_m(problem.m, GATED, budget.num_sms))
    if not serves_ws(problem, capability):
        return pointer_config(problem, budget)
    if problem.kernel == "cutlass":
        return min(ranked(problem, budget, profile, "cutlass"), key=itemgetter(0))[1]
    if problem.batch_invariant:
        config = invariant_config(problem.n, problem.k, capability, problem.blocks)
        return replace(config, group_m=candidates.group_m(problem.m, config, budget.num_sms))
    # the first of equals
    return min(ranked(problem, budget, profile), key=itemgetter(0))[1]


@lru_cache(maxsize=1024)
def invariant_config(n: int, k: int, capability: tuple[int, int], blocks: bool) -> GemmConfig:
    """The one configuration for (n, k) and a kind: the best geomean over a few rows and budgets."""
    ceilings = [
        cost_model.Ceilings(Budget(num_sms, "mask", False), Nominal(), DEFAULTS)
        for num_sms in INVARIANT_BUDGETS
    ]

    def cost(variant: GemmConfig) -> float:
        total = 0.0
        for m, ceiling in product(INVARIANT_ROWS, ceilings):
            group = candidates.group_m(m, variant, ceiling.budget.num_sms)
            twin = ScaledProblem(m, n, k).twin
            estimate = cost_model.Estimate(twin, variant, ceiling, DEFAULTS, group)
            total += log(estimate.fastest_us(1, 0)[0])
        return total

    # leaves room for a residual, and for a grid of one CTA an SM: one serves every epilogue. Not of
    # 192 columns: it led by 7% at most, where the model expects 8% too much of it, and took 64 rows
    # of 10240 x 5120 on 16 SMs from 50 us to 79 (both predicted)
    made = variants(True, True, capability, blocks)
    return min((x for x in made if x.ctas_per_sm == 1 and x.block_n != 192), key=cost)


def num_ctas(problem: ScaledProblem, config: GemmConfig, budget: Budget) -> int:
    """CTAs of the pointer kernel: at most one a tile."""
    tiles = constraints.num_tiles(problem.twin, config)
    return max(1, min(constraints.num_ctas(config, budget), tiles))
