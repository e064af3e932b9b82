"""What a compiled variant costs whatever the problem: its steps, its tiles, its partials."""

from __future__ import annotations

from math import exp

from smkern.tuning.config import GemmConfig
from smkern.tuning.cost_constants import CostConstants, variant_key

CUTLASS_TIME = 0.94
"""Time of CUTLASS's tiles over what the constants of our own kernels tell of them.

With it the faster by the model, ours or CUTLASS's, took 1.003 of the faster of the two in 1,633
cells of an H200 (64 to 8,192 rows, also on all SMs), without it 1.022. An H100's 2,082 tuned cells
that they won ask for 0.93."""


class VariantCosts:
    """The numbers of a variant that an estimate for any problem begins with; times are us.

    Attributes:
        prefetches: Whether a warp of its own copies, across tiles.
        size: Bytes of an element.
        tile_values: Elements of a tile.
        tile_us: Time of a tile beside its K loop.
        stage_bytes: Of both operands.
        mma_us: Time of a block_k step on the matrix unit.
        alone_us: The same in a CTA that waits for no bytes.
        copied_us: The same where copying a stage takes longest.
        leave_us: Time to write a partial tile.
        gather_us: Time to read one.
        least_factor: Least of measured over modelled time, whatever is split.
    """

    __slots__ = (
        "_logs", "_unfitted", "alone_us", "copied_us", "gather_us", "least_factor", "leave_us",
        "mma_us", "prefetches", "size", "stage_bytes", "tile_us", "tile_values",
    )  # fmt: skip

    def __init__(
        self, config: GemmConfig, fp32: bool, peak: float, constants: CostConstants
    ) -> None:
        block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
        self.prefetches = config.kernel in ("ws", "cutlass")
        self.size = size = 4 if fp32 else 2
        self.tile_values = values = block_m * block_n
        self.stage_bytes = stage = (block_m + block_n) * block_k * size
        self.tile_us = constants.tile_us + values * size / (constants.store_tbps_per_sm * 1e6)
        if not self.prefetches:
            self.tile_us += constants.drain_us
        if config.kernel == "cutlass":
            self.tile_us = constants.tile_us  # one group stores while the other multiplies
        sixteenths = block_k / 16
        each = _mma_us(config, fp32, peak)
        own = sixteenths * max(each / constants.mma_efficiency, constants.issue_us)
        own += constants.step_us + config.eager * constants.eager_step_us
        if not self.prefetches:
            tma = config.kernel == "tma"
            own += constants.tma_step_us if tma else constants.pointer_step_us
        self.mma_us, self.alone_us = sixteenths * each, own
        self.copied_us = stage / (constants.l2_tbps_per_sm * 1e6)
        self.leave_us = 4 * values / (constants.partial_write_tbps * 1e6)
        read_us = 4 * values / (constants.partial_read_tbps * 1e6)
        self.gather_us = constants.partial_latency_us + read_us
        self._logs = constants.variants.get(variant_key(config))
        self._unfitted = CUTLASS_TIME if config.kernel == "cutlass" else 1.0
        self.least_factor = min(self.factor(cut) for cut in (0.0, 1.0))

    def factor(self, cut: float) -> float:
        """Measured over modelled time of the variant if a share `cut` of its tiles is split."""
        if self._logs is None:
            return self._unfitted
        whole, split = self._logs
        return exp(whole + cut * (split - whole))


def costs_of(config: GemmConfig, fp32: bool, peak: float, constants: CostConstants) -> VariantCosts:
    """The costs of a variant by these constants, which keep them: as many as there are variants.

    What a launch decides (`split`, `group_m` and so on) changes none of them.
    """
    c = config
    key = (
        c.kernel, c.block_m, c.block_n, c.block_k, c.num_warps, c.ctas_per_sm, c.swap, c.eager,
        fp32, peak,
    )  # fmt: skip
    found = constants.costs.get(key)
    if found is None:
        found = constants.costs[key] = VariantCosts(config, fp32, peak, constants)
    return found


def _mma_us(config: GemmConfig, fp32: bool, peak: float) -> float:
    """Matrix unit time of one CTA for 16 elements of K.

    A 64 x n x 16 product takes n / 2 cycles, or as long as reading its operands from shared memory
    at 128 B per cycle, 16 + n / 4, which is longer below 64 columns. A width that is not a power of
    two takes two products, but not in cutlass.
    """
    rows, columns = config.block_m, config.block_n
    if config.swap:
        rows, columns = columns, rows
    first = 1 << (columns.bit_length() - 1)
    if config.kernel == "cutlass":
        first = columns
    parts = (first, columns - first) if columns > first else (first,)
    flops = 2.0 * rows * sum(max(part, 32 + part / 2) for part in parts) * 16
    # fp32 runs on the vector units
    return flops / (peak / 16 if fp32 else peak)
