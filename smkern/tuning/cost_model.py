"""How long a GEMM takes in a budget of SMs: waves, tile efficiency, bandwidth, reduction, power.

Wave quantization follows Bullet (section 2.2.1), plus the cost of a persistent kernel's K pieces.
Launches apart from each other, of whole or split loops, are never predicted slower on more SMs;
for stream-K fewer CTAs are considered too (`Estimate.grids`).
"""

from __future__ import annotations

from functools import lru_cache
from math import sqrt
from typing import NamedTuple, Protocol

from smkern.tuning.config import STREAM_K, Budget, Confinement, GemmConfig, GemmProblem
from smkern.tuning.cost_constants import DEFAULTS, CostConstants
from smkern.tuning.cost_variant import costs_of


class DeviceFacts(Protocol):
    """The part of `smkern.device.DeviceInfo` that the model reads."""

    @property
    def l2_bytes(self) -> int: ...
    @property
    def sm_clock_mhz(self) -> int: ...
    @property
    def flops_per_clock(self) -> int: ...


class CeilingSource(Protocol):
    """The part of `smkern.profile.Profile` that the model reads."""

    @property
    def info(self) -> DeviceFacts: ...
    def bandwidth(self, num_sms: int, *, confined: Confinement) -> float: ...
    def flops(self, num_sms: int) -> float: ...


class Ceilings:
    """A budget's ceilings in bytes and FLOPs per us, looked up once per number of active SMs."""

    __slots__ = ("_bandwidth", "_constants", "_flops", "_profile", "budget", "l2_bytes", "peak")

    def __init__(self, budget: Budget, profile: CeilingSource, constants: CostConstants) -> None:
        info = profile.info
        self.budget = budget
        self.l2_bytes = info.l2_bytes
        self.peak = info.flops_per_clock * info.sm_clock_mhz
        self._profile = profile
        self._constants = constants
        self._bandwidth: dict[int, float] = {}
        self._flops: dict[int, float] = {}

    def dram(self, num_sms: int) -> float:
        """Bytes per us that `num_sms` SMs read from memory."""
        rate = self._bandwidth.get(num_sms)
        if rate is None:
            rate = self._profile.bandwidth(num_sms, confined=self.budget.confined)
            rate *= 1e6 * self._constants.dram_efficiency
            self._bandwidth[num_sms] = rate
        return rate

    def power(self, num_sms: int) -> float:
        """FLOPs per us of `num_sms` SMs under the power limit."""
        rate = self._flops.get(num_sms)
        if rate is None:
            rate = self._profile.flops(num_sms) * 1e6 * self._constants.power_efficiency
            self._flops[num_sms] = rate
        return rate

    def l2(self, num_sms: int) -> float:
        """Bytes per us from L2 to `num_sms` SMs."""
        return 1e6 * min(self._constants.l2_tbps_per_sm * num_sms, self._constants.l2_tbps)


class _Parts(NamedTuple):
    """Times of a launch by resource, us, the share of split tiles, and what `_shared` says."""

    busy_us: float
    dram_us: float
    l2_us: float
    cut: float
    shared: float


class Estimate:
    """The cost model of one compiled variant for one problem and budget.

    `launch_us(split, max_ctas)` evaluates run-time numbers, so that a search over them shares what
    the variant fixes.
    """

    __slots__ = (
        "_again", "_ceilings", "_config", "_constants", "_costs", "_l2_bytes", "_latency_us",
        "_padded_flops", "_problem", "_sharers", "_weights", "ctas", "steps", "tiles",
    )  # fmt: skip

    def __init__(
        self,
        problem: GemmProblem,
        config: GemmConfig,
        ceilings: Ceilings,
        constants: CostConstants,
        group_m: int,
    ) -> None:
        block_k = config.block_k
        rows = -(-problem.m // config.block_m)
        self.tiles = tiles = rows * -(-problem.n // config.block_n)
        self.steps = steps = -(-problem.k // block_k) or 1
        budget = ceilings.budget
        self.ctas = budget.num_sms * (config.ctas_per_sm if budget.confined == "mask" else 1)
        self._problem, self._config = problem, config
        self._ceilings, self._constants = ceilings, constants
        self._costs = costs = costs_of(config, problem.dtype == "fp32", ceilings.peak, constants)
        self._l2_bytes = float(tiles * steps * costs.stage_bytes)
        self._padded_flops = 2.0 * tiles * costs.tile_values * steps * block_k
        # w is read again for every raster group unless L2 keeps it; swapped, groups are of w
        self._weights = weights = costs.size * problem.n * problem.k
        lost = 0.0 if config.swap else max(0.0, weights - constants.l2_kept * ceilings.l2_bytes)
        self._again = problem.bytes_moved + lost * (-(-rows // group_m) - 1)
        # row tiles that share a column's weights: those of a raster group, or swapped, all
        self._sharers = rows if config.swap else min(rows, group_m)
        # of a stage, from the share of reads that L2 serves
        from_memory = min(1.0, self._again / self._l2_bytes)
        self._latency_us = constants.l2_latency_us + from_memory * constants.dram_latency_us

    def _chain_step_us(self, ctas: int) -> float:
        """A CTA's block_k step: the longest of compute, wait for the stage, wait for the SM."""
        config, constants, costs = self._config, self._constants, self._costs
        ahead = config.num_stages - 1
        if costs.prefetches and not config.eager:
            ahead = max(1, ahead - 1)  # a stage is released only when the next product runs
        resident: float = 1
        if self._ceilings.budget.confined == "mask":
            resident = min(config.ctas_per_sm, -(-ctas // self._ceilings.budget.num_sms))
            resident += constants.misplaced * (resident < config.ctas_per_sm)
        return max(
            costs.alone_us,
            self._latency_us / ahead,
            resident * costs.mma_us / constants.crowd_efficiency,
            resident * costs.copied_us,
        )

    def at_least_us(self) -> float:
        """Lower bound over all splits and grids: perfect balance, no partial tiles."""
        ceilings, costs, sms = self._ceilings, self._costs, self._ceilings.budget.num_sms
        loops = self.tiles * self.steps
        ctas = min(self.ctas, loops)
        total = self._total_us(
            max(
                loops * max(costs.alone_us, costs.copied_us) / ctas,
                self._padded_flops / ceilings.power(sms),
            ),
            self._again / ceilings.dram(sms),
            self._l2_bytes / ceilings.l2(sms),
        )
        return total * costs.least_factor

    def grids(self, split: int) -> tuple[int, ...]:
        """Caps of the grid worth trying; 0 is no cap.

        With fewer tiles than CTAs, stream-K cuts each tile into `ctas / tiles` pieces. A tile then
        costs 1 / pieces of its K loop plus summing `pieces` partials: least at sqrt(loop / partial)
        pieces. With more tiles, a remainder under a quarter wave is streamed together with a whole
        wave; fewer CTAs make it a quarter wave. Some smaller grids give equal pieces, which keeps
        the CTAs in step.
        """
        tiles, ctas = self.tiles, self.ctas
        if split != STREAM_K:
            return (0,)
        if tiles < ctas:
            loop = self.steps * self._chain_step_us(ctas)
            best = int(tiles * max(1.0, sqrt(loop / self._costs.gather_us)))
        else:
            best = 4 * tiles // (4 * (tiles // ctas) + 1)
        found = (best, equal_pieces(tiles, ctas, self.steps))
        return (0, *(cap for cap in dict.fromkeys(found) if 0 < cap < ctas))

    @property
    def may_overlap(self) -> bool:
        """Whether a launch can begin before the previous kernel has ended."""
        return self._costs.prefetches and self._ceilings.budget.confined == "mask"

    def launch_us(self, split: int = 1, max_ctas: int = 0, overlap: bool = True) -> float:
        """Predicted time, us, of one launch with cold caches."""
        return self._launch_us(self._parts(split, max_ctas), overlap and self.may_overlap)

    def fastest_us(self, split: int, max_ctas: int) -> tuple[float, bool]:
        """Time with or without overlap, whichever is faster, us, and whether overlap is."""
        parts = self._parts(split, max_ctas)
        apart_us = self._launch_us(parts, False)
        if not self.may_overlap:
            return apart_us, True  # the default of `overlap`, which has no effect here
        return min((self._launch_us(parts, True), True), (apart_us, False))

    def _launch_us(self, parts: _Parts, overlaps: bool) -> float:
        constants = self._constants
        dram_us, l2_us = parts.dram_us, parts.l2_us
        if overlaps:
            dram_us *= 1 + constants.overlap_dram * parts.shared
            l2_us /= constants.overlap_l2
        total = self._total_us(parts.busy_us, dram_us, l2_us)
        apart_us = 0.0 if overlaps else constants.apart_us
        return self._costs.factor(parts.cut) * (total + apart_us)

    def _parts(self, split: int, max_ctas: int) -> _Parts:
        constants, ceilings, costs = self._constants, self._ceilings, self._costs
        tiles, steps = self.tiles, self.steps
        ctas = min(self.ctas, max_ctas) if max_ctas else self.ctas
        memory, l2_bytes = self._again, self._l2_bytes
        streamed = 0
        if split == STREAM_K:
            streamed = streamed_tiles(tiles, ctas)
        elif split > 1:
            streamed = tiles
            ctas = min(ctas, tiles * split)
        ctas = min(ctas, streamed * steps + tiles - streamed if streamed else tiles)
        sms = min(ctas, ceilings.budget.num_sms)
        step = self._chain_step_us(ctas)
        chain = -(-(tiles - streamed) // ctas) * (steps * step + costs.tile_us)
        if streamed:
            quantum = -(-streamed * steps // ctas)
            in_step = steps % quantum == 0
            pieces = 2.0 if steps <= quantum else steps / quantum + (not in_step)
            segments = 1 if in_step else 1 + -(-(quantum - 1) // steps)
            chain += quantum * step + segments * (costs.tile_us + constants.piece_us)
            chain += costs.leave_us + pieces * costs.gather_us
            l2_bytes += 8.0 * costs.tile_values * streamed * pieces
            if not in_step:
                memory += self._out_of_step(streamed, ctas)
        return _Parts(
            max(chain, self._padded_flops / ceilings.power(ceilings.budget.num_sms)),
            memory / ceilings.dram(sms),
            l2_bytes / ceilings.l2(sms),
            streamed / tiles,
            self._shared(ctas),
        )

    def _shared(self, ctas: int) -> float:
        """The part of a launch's CTAs that begins beside the one before, times hundreds of SMs.

        0 where all of them do, or none: then they have SMs as evenly as a launch apart.
        """
        room = self.ctas / ctas - 1
        return room * self._ceilings.budget.num_sms / 100 if room < 1 else 0.0

    def _out_of_step(self, streamed: int, ctas: int) -> float:
        """Bytes read again from memory because CTAs on the same operands are at different K.

        Tiles with whole loops walk along K together, so each weight is read once for all rows and
        each row once for all active columns. Streamed loops begin at different K, so L2 has to
        bridge the distance, and what it cannot hold is read again: a factor of 2 in time was seen
        for 3584x18944 weights.
        """
        constants, problem = self._constants, self._problem
        weights = self._weights * min(1.0, streamed / self.tiles)
        rows = float(self._costs.size * problem.m * problem.k)
        lost = 1 - constants.stream_kept * self._ceilings.l2_bytes / max(weights + rows, 1.0)
        if lost <= 0:
            return 0.0
        columns = min(-(-problem.n // self._config.block_n), max(1.0, ctas / self._sharers))
        return lost * (weights * (self._sharers - 1) + constants.stream_rows * rows * (columns - 1))

    def _total_us(self, busy_us: float, dram_us: float, l2_us: float) -> float:
        """The launch plus compute, memory and L2 times, blended to just above the longest.

        These three slow each other down, unlike the ceilings within `busy_us`, which coincide.
        """
        constants = self._constants
        largest, blend = max(busy_us, dram_us, l2_us), constants.blend
        spread = (busy_us / largest) ** blend + (dram_us / largest) ** blend
        spread += (l2_us / largest) ** blend
        return constants.launch_us + self._latency_us + largest * spread ** (1 / blend)


def streamed_tiles(tiles: int, ctas: int) -> int:
    """Tiles that stream-K spreads: the partial wave, plus a full one if it is small."""
    rest = tiles % ctas
    if rest == 0 or tiles < ctas:
        return 0 if rest == 0 else tiles
    return rest if 4 * rest >= ctas else rest + ctas


@lru_cache(maxsize=4096)
def equal_pieces(tiles: int, ctas: int, steps: int) -> int:
    """The most CTAs below `ctas`, but at least 3/4 of it, with equal K pieces; 0: none."""
    for fewer in range(ctas - 1, 3 * ctas // 4, -1):
        streamed = streamed_tiles(tiles, fewer)
        if streamed and steps % -(-streamed * steps // fewer) == 0:
            return fewer
    return 0


def predict_us(
    problem: GemmProblem,
    config: GemmConfig,
    budget: Budget,
    profile: CeilingSource,
    constants: CostConstants = DEFAULTS,
) -> float:
    """Predicted time of one launch with cold caches, us.

    The busiest CTA's chain of tiles or the power limit, whichever is longer, blended with memory
    and L2 by `constants.blend`, plus the launch. For backends that choose their own tiles it is the
    best time that the budget's ceilings allow.
    """
    ceilings = Ceilings(budget, profile, constants)
    if config.kernel in ("cublaslt", "unfused"):
        sms = budget.num_sms
        unfused = config.kernel == "unfused"
        bytes_moved = problem.bytes_moved + unfused * 4 * problem.m * problem.n
        floor = max(bytes_moved / ceilings.dram(sms), problem.flops / ceilings.power(sms))
        return (1 + unfused) * constants.launch_us + floor
    estimate = Estimate(problem, config, ceilings, constants, config.group_m)
    return estimate.launch_us(config.split, config.max_ctas, config.overlap)
