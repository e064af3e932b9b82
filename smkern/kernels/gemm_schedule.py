"""How many CTAs run a GEMM and which tiles they get: run-time numbers, no device code."""

from __future__ import annotations

from dataclasses import dataclass

from smkern.errors import ArgumentError
from smkern.tuning.config import STREAM_K, Budget, GemmConfig, GemmProblem
from smkern.tuning.constraints import COUNTER_BYTES, k_steps, num_ctas
from smkern.tuning.cost_model import streamed_tiles

MAX_COUNTERS = COUNTER_BYTES // 4


@dataclass(frozen=True, slots=True)
class Schedule:
    """Run-time numbers of a launch; `gemm_tiles` shows how kernels use them."""

    num_ctas: int
    tiles_x: int
    tiles_y: int
    k_iters: int
    whole_tiles: int
    stream_iters: int
    quantum: int
    group: int

    @property
    def partial_slots(self) -> int:
        return 2 * self.num_ctas if self.stream_iters else 0


def make_schedule(
    problem: GemmProblem, config: GemmConfig, budget: Budget, turns: int = 1
) -> Schedule:
    """Distribute the tiles of `problem` over at most `budget` SMs; pure arithmetic, no GPU.

    K is cut behind multiples of `turns` steps, which a kernel takes faster than others.
    """
    tiles_m = -(-problem.m // config.block_m)
    tiles_n = -(-problem.n // config.block_n)
    tiles = tiles_m * tiles_n
    k_iters, ctas = k_steps(problem, config), num_ctas(config, budget)
    if config.split == 1:
        stream = 0
    elif config.split == STREAM_K:
        stream = streamed_tiles(tiles, ctas)
    else:
        stream = tiles
        ctas = min(ctas, tiles * config.split)
    if stream > MAX_COUNTERS:
        raise ArgumentError(
            f"split {config.split} of {tiles} tiles needs {stream} counters; the limit is "
            f"{MAX_COUNTERS}. Use split 1 or stream-K for so large an output."
        )
    ctas = min(ctas, tiles if stream == 0 else stream * k_iters + tiles - stream)
    quantum = max(1, -(-stream * k_iters // (ctas * turns))) * turns
    if stream == tiles:
        ctas = -(-stream * k_iters // quantum)
    across, along = (tiles_n, tiles_m) if config.swap else (tiles_m, tiles_n)
    return Schedule(
        num_ctas=ctas,
        tiles_x=across,
        tiles_y=along,
        k_iters=k_iters,
        whole_tiles=tiles - stream,
        stream_iters=stream * k_iters,
        quantum=quantum,
        group=min(config.group_m, across),
    )
