"""How long a GEMM takes in a budget of SMs: waves, tile efficiency, bandwidth, reduction, power.

`waves` is the wave quantization of Bullet (section 2.2.1). `predict_us` adds what a persistent
kernel with K pieces costs. Whole and split loops are never predicted slower on more SMs: every term
falls or stays as SMs are added; stream-K asks about fewer CTAs too (`Estimate.grids`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from math import sqrt
from typing import Protocol

from smkern.tuning.config import STREAM_K, Budget, Confinement, GemmConfig, GemmProblem


class DeviceFacts(Protocol):
    """What the model reads of `smkern.device.DeviceInfo`."""

    @property
    def l2_bytes(self) -> int: ...
    @property
    def sm_clock_mhz(self) -> int: ...


class CeilingSource(Protocol):
    """What the model reads of `smkern.device.Profile`."""

    @property
    def info(self) -> DeviceFacts: ...
    def bandwidth(self, num_sms: int, *, confined: Confinement) -> float: ...
    def flops(self, num_sms: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Waves:
    """Bullet's three figures: waves, SMs active in the last one, idle share of SM cycles."""

    waves: int
    tail: int
    idle: float


def waves(tiles: int, ctas_per_sm: int, num_sms: int) -> Waves:
    """Wave quantization of `tiles` thread blocks (Bullet, section 2.2.1).

    w = ceil(g / (b N)), tail = ceil(g / b - N (w - 1)), idle = (N - tail) / (N w), with g thread
    blocks, b of them resident on an SM, and N SMs.
    """
    if tiles == 0:
        return Waves(0, 0, 0.0)
    count = -(-tiles // (ctas_per_sm * num_sms))
    tail = -(-tiles // ctas_per_sm) - num_sms * (count - 1)
    return Waves(count, tail, (num_sms - tail) / (num_sms * count))


@dataclass(frozen=True, slots=True)
class CostConstants:
    """What the model does not derive. `smkern.autotune.fit` fits them to measured candidates."""

    launch_us: float = 2.0
    """A kernel in a graph: launch, tensor maps, first bytes."""
    load_latency_us: float = 0.85
    """From asking for a stage to having it; the stages in flight share it."""
    step_us: float = 0.03
    """Of one block_k step: barriers and issue, hidden only by another CTA of the SM."""
    tile_us: float = 0.5
    """Of one tile: the epilogue's fixed part and the way to the next tile."""
    piece_us: float = 1.0
    """Of one K piece: fence, counter and the wait for them."""
    store_tbps_per_sm: float = 0.12
    """Writing a tile or a partial, reading a partial: TB/s of one CTA."""
    eager_step_us: float = 0.02
    """Extra cost of a step whose product is awaited before the next is issued (`eager`)."""
    tma_step_us: float = 0.02
    """Extra cost of a step in the tma kernel: the same warps copy and multiply."""
    drain_us: float = 0.9
    """Refill of the pipeline at each tile, in kernels that do not load ahead over tiles (tma)."""
    pointer_step_us: float = 0.12
    """Extra cost of a step in the pointer kernel: addresses and masks."""
    mma_efficiency: float = 0.95
    """Share of the tensor peak inside a long K loop."""
    power_efficiency: float = 1.0
    """Share of the profile's power-limited rate."""
    dram_efficiency: float = 0.92
    """Share of the partition's read bandwidth."""
    l2_tbps_per_sm: float = 0.16
    """L2 to shared memory, of one SM."""
    l2_tbps: float = 10.0
    """L2 to shared memory, of the chip."""
    l2_kept: float = 0.6
    """Share of L2 that operands can count on when tiles share them."""
    blend: float = 6.0
    """Exponent that blends the ceilings: large means that only the highest counts."""

    @classmethod
    def from_mapping(cls, values: Mapping[str, float]) -> CostConstants:
        """Constants from stored data; unknown names raise KeyError, missing ones keep defaults."""
        names = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - names)
        if unknown:
            raise KeyError(f"unknown cost constants {unknown}; known: {sorted(names)}")
        return cls(**{name: float(value) for name, value in values.items()})


DEFAULTS = CostConstants()


class Ceilings:
    """A budget's ceilings in bytes and FLOPs per us, looked up once per count of active SMs."""

    __slots__ = ("_bandwidth", "_constants", "_flops", "_profile", "budget", "l2_bytes", "peak")

    def __init__(self, budget: Budget, profile: CeilingSource, constants: CostConstants) -> None:
        info = profile.info
        self.budget = budget
        self.l2_bytes = info.l2_bytes * constants.l2_kept
        # 4,096 dense bf16 FLOPs an SM and clock on sm_90
        self.peak = 4096 * info.sm_clock_mhz * constants.mma_efficiency
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
        """FLOPs per us that the power limit leaves `num_sms` SMs."""
        rate = self._flops.get(num_sms)
        if rate is None:
            rate = self._profile.flops(num_sms) * 1e6 * self._constants.power_efficiency
            self._flops[num_sms] = rate
        return rate

    def l2(self, num_sms: int) -> float:
        """Bytes per us from L2 to `num_sms` SMs."""
        return 1e6 * min(self._constants.l2_tbps_per_sm * num_sms, self._constants.l2_tbps)


def _mma_us(config: GemmConfig, fp32: bool, peak: float) -> float:
    """Matrix unit time of one block_k step of one CTA.

    A 64 x n x 16 product takes n / 2 cycles, or what its operands take to leave shared memory at
    128 B a cycle, 16 + n / 4: the latter binds below 64 columns.
    """
    rows, columns = config.block_m, config.block_n
    if config.swap:
        rows, columns = columns, rows
    flops = 2.0 * rows * max(columns, 32 + columns // 2) * config.block_k
    # fp32 runs on the vector units
    return flops / (peak / 16 if fp32 else peak)


def _step_us(config: GemmConfig, mma_us: float, constants: CostConstants) -> float:
    """One block_k step of a CTA's chain: multiply and issue, or wait for the stage."""
    own = mma_us + constants.step_us
    ahead = config.num_stages - 1
    if config.kernel == "tma":
        own += constants.tma_step_us
    elif config.kernel == "pointer":
        own += constants.pointer_step_us
    elif config.eager:
        own += constants.eager_step_us
    else:
        ahead = max(1, ahead - 1)  # a stage is given back only when the next product runs
    return max(own, constants.load_latency_us / ahead)


class Estimate:
    """The cost model of one compiled variant for one problem and budget.

    `launch_us(split, ctas)` asks it about the run-time numbers, so that a search over them shares
    what the variant fixes.
    """

    __slots__ = (
        "_ceilings",
        "_constants",
        "_dram_bytes",
        "_l2_bytes",
        "_mma",
        "_padded_flops",
        "_partial_us",
        "_step",
        "_tile_us",
        "_tile_values",
        "ctas",
        "steps",
        "tiles",
    )

    def __init__(
        self,
        problem: GemmProblem,
        config: GemmConfig,
        ceilings: Ceilings,
        constants: CostConstants,
        group_m: int,
    ) -> None:
        block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
        size = 4 if problem.dtype == "fp32" else 2
        tiles_m = -(-problem.m // block_m)
        self.tiles = tiles = tiles_m * -(-problem.n // block_n)
        self.steps = steps = -(-problem.k // block_k) or 1
        budget = ceilings.budget
        self.ctas = budget.num_sms * (config.ctas_per_sm if budget.confined == "mask" else 1)
        self._ceilings = ceilings
        self._constants = constants
        self._mma = mma = _mma_us(config, problem.dtype == "fp32", ceilings.peak)
        self._step = _step_us(config, mma, constants)
        self._tile_values = values = block_m * block_n
        rate = constants.store_tbps_per_sm * 1e6
        self._tile_us = constants.tile_us + values * size / rate
        if config.kernel != "ws":
            self._tile_us += constants.drain_us
        self._partial_us = 4 * values / rate
        self._l2_bytes = float(tiles * steps * (block_m + block_n) * block_k * size)
        self._padded_flops = 2.0 * tiles * values * steps * block_k
        # w comes again for every raster group when L2 cannot keep it; swapped, groups are of w
        again = 0.0 if config.swap else max(0.0, size * problem.n * problem.k - ceilings.l2_bytes)
        self._dram_bytes = problem.bytes_moved + again * (-(-tiles_m // group_m) - 1)

    def at_least_us(self) -> float:
        """A bound that no split and no grid goes below: perfect balance, no partial tiles."""
        ceilings, sms = self._ceilings, self._ceilings.budget.num_sms
        loops = self.tiles * self.steps
        return self._total_us(
            max(
                loops * self._step / self.ctas + self._tile_us,
                loops * self._mma / sms,
                self._padded_flops / ceilings.power(sms),
            ),
            self._dram_bytes / ceilings.dram(sms),
            self._l2_bytes / ceilings.l2(sms),
        )

    def grids(self, split: int) -> tuple[int, ...]:
        """Caps of the grid worth asking about; 0 is no cap.

        Fewer tiles than CTAs, streamed, are cut into `ctas / tiles` pieces each. A tile then costs
        1 / pieces of its K loop and `pieces` partials to sum: least at sqrt(loop / partial). Of
        more tiles, a rest under a quarter wave is streamed with a whole wave more; on fewer CTAs
        it is a quarter.
        """
        tiles, ctas = self.tiles, self.ctas
        if split != STREAM_K:
            return (0,)
        if tiles < ctas:
            best = int(tiles * max(1.0, sqrt(self.steps * self._step / self._partial_us)))
        else:
            best = 4 * tiles // (4 * (tiles // ctas) + 1)
        return (0, best) if 0 < best < ctas else (0,)

    def launch_us(self, split: int = 1, max_ctas: int = 0) -> float:
        """Predicted time, us, of one launch with cold caches."""
        constants, ceilings = self._constants, self._ceilings
        tiles, steps, step, mma = self.tiles, self.steps, self._step, self._mma
        ctas = min(self.ctas, max_ctas) if max_ctas else self.ctas
        l2_bytes = self._l2_bytes
        streamed = 0
        if split == STREAM_K:
            streamed = streamed_tiles(tiles, ctas)
        elif split > 1:
            streamed = tiles
            ctas = min(ctas, tiles * split)
        whole = -(-(tiles - streamed) // ctas)
        sms = min(ctas, ceilings.budget.num_sms)
        chain = whole * (steps * step + self._tile_us)
        if streamed:
            quantum = -(-streamed * steps // ctas)
            pieces = 1 + steps / quantum
            chain += quantum * step + self._tile_us + 2 * constants.piece_us
            chain += (2 + pieces) * self._partial_us
            busiest = (whole * ctas * steps + ctas * quantum) / sms * mma
            l2_bytes += 8.0 * self._tile_values * streamed * pieces
        else:
            busiest = -(-tiles // sms) * steps * mma
        return self._total_us(
            max(chain, busiest, self._padded_flops / ceilings.power(sms)),
            self._dram_bytes / ceilings.dram(sms),
            l2_bytes / ceilings.l2(sms),
        )

    def _total_us(self, busy_us: float, dram_us: float, l2_us: float) -> float:
        """The launch, and multiplying, memory and L2 blended into a little more than the largest.

        They are in each other's way; the ceilings within `busy_us` are not, they coincide.
        """
        constants = self._constants
        largest, blend = max(busy_us, dram_us, l2_us), constants.blend
        spread = (busy_us / largest) ** blend + (dram_us / largest) ** blend
        spread += (l2_us / largest) ** blend
        return constants.launch_us + constants.load_latency_us + largest * spread ** (1 / blend)


def streamed_tiles(tiles: int, ctas: int) -> int:
    """Tiles whose K loops stream-K spreads: the partial wave, and a full one if it is small."""
    rest = tiles % ctas
    if rest == 0 or tiles < ctas:
        return 0 if rest == 0 else tiles
    return rest if 4 * rest >= ctas else rest + ctas


def predict_us(
    problem: GemmProblem,
    config: GemmConfig,
    budget: Budget,
    profile: CeilingSource,
    constants: CostConstants = DEFAULTS,
) -> float:
    """Predicted time of one launch with cold caches, us.

    Of the longest CTA's chain of tiles, the busiest SM's matrix unit and the power limit the
    largest; that, memory and L2 blended by `constants.blend`; plus the launch. What chooses for
    itself (cuBLASLt, SwiGLU unfused): what the budget's ceilings allow at best.
    """
    ceilings = Ceilings(budget, profile, constants)
    if config.kernel in ("cublaslt", "unfused"):
        sms = budget.num_sms
        apart = 4 * problem.m * problem.n if config.kernel == "unfused" else 0
        bytes_moved = problem.bytes_moved + apart
        floor = max(bytes_moved / ceilings.dram(sms), problem.flops / ceilings.power(sms))
        return constants.launch_us + floor
    estimate = Estimate(problem, config, ceilings, constants, config.group_m)
    return estimate.launch_us(config.split, config.max_ctas)
