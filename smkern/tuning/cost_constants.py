"""Fitted constants of the GEMM's cost model, per GPU and per compiled variant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from smkern.atomic import read_whole
from smkern.errors import TableError
from smkern.strict_json import parse
from smkern.tuning.cells import shipped_path
from smkern.tuning.config import GemmConfig, Kernel

MAX_CONSTANT = 1e5
"""Constants are of this to one over it: the least digit that the fit writes."""
MAX_LOG = 10
"""A variant's time is at most e^10 times the model's, or as much less."""


@dataclass(frozen=True, slots=True)
class CostConstants:
    """Constants that `smkern.autotune.fit` fits to measured candidates.

    The defaults are an H200's. `variants` holds, per compiled variant (`variant_key`), the log of
    measured over modelled time with whole K loops and with split ones. Unless it is empty, a
    variant that it lacks was never the best of a measured cell, and is not chosen.
    """

    launch_us: float = 1.63
    """Time of a kernel in a graph apart from its work: launch, tensor maps."""
    apart_us: float = 0.95
    """Extra cost of a launch that begins only after the previous kernel has ended."""
    overlap_l2: float = 0.92
    """Share of L2's rate for an overlapping launch: its CTAs are placed around the others."""
    overlap_dram: float = 0.24
    """Extra time from memory, on 100 SMs, of an overlapping launch times the share of its CTAs that
    find room beside the one before, where not all do: they share SMs unevenly."""
    l2_latency_us: float = 0.43
    """Latency of a stage from L2, divided among the stages in flight."""
    dram_latency_us: float = 0.39
    """Extra latency of a stage from memory."""
    issue_us: float = 0.017
    """Minimum time of a product over 16 elements of K, however small the tile."""
    step_us: float = 0.027
    """Overhead of a block_k step: barriers and issue, hidden only by another CTA on the SM."""
    eager_step_us: float = 0.074
    """Extra cost of a step that waits for its product before the next is issued (`eager`)."""
    tma_step_us: float = 0.025
    """Extra cost of a step in the tma kernel: the same warps copy and multiply."""
    pointer_step_us: float = 0.12
    """Extra cost of a step in the pointer kernel: addresses and masks."""
    tile_us: float = 0.1
    """Overhead of a tile: the fixed part of the epilogue and moving on to the next tile."""
    drain_us: float = 1.35
    """Refilling the pipeline at each tile, in kernels that do not prefetch across tiles (tma)."""
    store_tbps_per_sm: float = 0.04
    """Rate at which one CTA writes a tile, TB/s."""
    piece_us: float = 0.56
    """Overhead of a K piece: fence, counter and waiting for both."""
    partial_write_tbps: float = 1.0
    """Rate at which one CTA writes a partial tile, TB/s."""
    partial_read_tbps: float = 0.0223
    """Rate at which one CTA reads partial tiles, one after the other, TB/s."""
    partial_latency_us: float = 0.42
    """Latency until the first bytes of a partial arrive."""
    mma_efficiency: float = 1.15
    """Share of the tensor peak inside a long K loop, before it is blended with the rest."""
    crowd_efficiency: float = 0.93
    """The same share where several CTAs of an SM take turns."""
    misplaced: float = 0.77
    """Extra resident CTAs on the busiest SM when fewer CTAs are launched than fit: the hardware
    does not spread them evenly."""
    power_efficiency: float = 0.97
    """Share of the profile's power-limited rate."""
    dram_efficiency: float = 1.04
    """Share of the partition's read bandwidth, before it is blended with the rest."""
    l2_tbps_per_sm: float = 0.33
    """Rate from L2 to the shared memory of one SM."""
    l2_tbps: float = 12.5
    """Rate from L2 to shared memory, all SMs together."""
    l2_kept: float = 0.43
    """Share of L2 available to keep weights from one raster group to the next."""
    stream_kept: float = 0.05
    """Share of L2 that serves CTAs whose K loops are out of step."""
    stream_rows: float = 0.43
    """Share of the active columns that read a row tile again when they are out of step."""
    blend: float = 2.46
    """Exponent that blends the ceilings' times; if large, only the longest counts."""
    variants: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    costs: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What follows from them for each variant, once asked for (`cost_variant.costs_of`)."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CostConstants:
        """Read a file's `constants` and `variants`; KeyError, TypeError or ValueError if none."""
        numbers = data["constants"]
        unknown = sorted(set(numbers) - set(NAMES))
        if unknown:
            raise KeyError(f"unknown cost constants {unknown}; known: {sorted(NAMES)}")
        variants = {
            str(key): (float(whole), float(cut)) for key, (whole, cut) in data["variants"].items()
        }
        constants = {name: float(value) for name, value in numbers.items()}
        for name, value in constants.items():
            if not 1 / MAX_CONSTANT <= value <= MAX_CONSTANT:
                raise ValueError(f"{name} is {value}, of {1 / MAX_CONSTANT:g} to {MAX_CONSTANT:g}")
        for name, logs in variants.items():
            if max(map(abs, logs)) > MAX_LOG:
                raise ValueError(f"{name} is {logs}, of -{MAX_LOG} to {MAX_LOG}")
        return cls(**constants, variants=variants)

    def knows(self, config: GemmConfig) -> bool:
        """Whether a configuration's variant may be chosen; always true for kernels not fitted."""
        if not self.variants or config.kernel not in FITTED:
            return True
        return variant_key(config) in self.variants


FITTED: tuple[Kernel, ...] = ("ws", "tma")
"""Kernels whose variants are measured one by one."""
NAMES = tuple(item.name for item in fields(CostConstants) if item.init and item.name != "variants")
"""Names of the numeric constants."""
DEFAULTS = CostConstants()


@lru_cache(maxsize=4096)
def variant_key(config: GemmConfig) -> str:
    """Name of a compiled variant without its stages (as many as fit): `ws:64x128x64:w4:c2:swap`"""
    parts = [f"{config.kernel}:{config.block_m}x{config.block_n}x{config.block_k}"]
    parts += [f"w{config.num_warps}:c{config.ctas_per_sm}"]
    return ":".join(parts + ["swap"] * config.swap + ["eager"] * config.eager)


@lru_cache(maxsize=8)
def load_constants(gpu: str, capability: tuple[int, int] | None = None) -> CostConstants:
    """The cost model's constants fitted on `gpu`, or on a GPU of the same generation.

    On a GPU without a fit they only rank candidates, as ceilings come from the profile. Kernels
    differ between generations, so a new generation takes the defaults.

    Raises:
        TableError: the file exists but holds no constants.
    """
    path = shipped_path(gpu, "cost_model")
    if not path.exists() and capability is not None and capability[0] == 9:
        path = shipped_path("h200", "cost_model")
    if not path.exists():
        return DEFAULTS
    remedy = "delete it, or fit it again: python -m smkern.autotune.fit RAW --out PATH"
    return read_constants(path, "of the cost model", remedy)


def read_constants(path: Path, which: str, remedy: str) -> CostConstants:
    """The constants of a file.

    Raises:
        TableError: the file is missing or holds none; names those wanted and the remedy.
    """
    try:
        return CostConstants.from_json(parse(read_whole(path)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise TableError(f"{path} holds no constants {which} ({error}); {remedy}") from error
