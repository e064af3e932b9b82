"""From a configuration to a launch: variants are loaded once, a plan is one problem's launch."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from smkern.errors import ArgumentError
from smkern.kernels.compile import Artifact, compile_variant
from smkern.kernels.driver import load_function, may_overlap
from smkern.kernels.frame import Frame, Launch, Operands
from smkern.kernels.variants import Variant, variant_of
from smkern.tuning.config import STREAM_K, Budget, GemmConfig, GemmProblem

COUNTER_BYTES = 65_536
"""Head of a workspace: int32 arrival counters, zero before and after every launch."""
MAX_COUNTERS = COUNTER_BYTES // 4
_MAX_FRAMES = 1024


@dataclass(frozen=True, slots=True)
class Counters:
    """How many variants were compiled (or fetched from disk) and how many modules were loaded."""

    compilations: int
    module_loads: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """Run-time numbers of a launch; `smkern.kernels.schedule` is what the kernel does with them."""

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


def make_schedule(problem: GemmProblem, config: GemmConfig, budget: Budget) -> Schedule:
    """Deal the tiles of `problem` to at most `budget` SMs; pure arithmetic, no GPU."""
    tiles_m = -(-problem.m // config.block_m)
    tiles_n = -(-problem.n // config.block_n)
    tiles = tiles_m * tiles_n
    k_iters = max(1, -(-problem.k // config.block_k))
    ctas = budget.num_sms * (config.ctas_per_sm if budget.confined == "mask" else 1)
    if config.max_ctas:
        ctas = min(ctas, config.max_ctas)
    if config.split == 1:
        stream = 0
    elif config.split == STREAM_K:
        stream = _streamed_tiles(tiles, ctas)
    else:
        stream = tiles
        ctas = min(ctas, tiles * config.split)
    if stream > MAX_COUNTERS:
        raise ArgumentError(
            f"split {config.split} of {tiles} tiles needs {stream} counters; the limit is "
            f"{MAX_COUNTERS}. Use split 1 or stream-K for so large an output."
        )
    ctas = min(ctas, tiles if stream == 0 else stream * k_iters + tiles - stream)
    quantum = max(1, -(-stream * k_iters // ctas))
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


def _streamed_tiles(tiles: int, ctas: int) -> int:
    """Tiles that stream-K spreads: the partial wave, and a full one if its pieces were small."""
    rest = tiles % ctas
    if rest == 0 or tiles < ctas:
        return 0 if rest == 0 else tiles
    return rest if 4 * rest >= ctas else rest + ctas


class GemmPlan:
    """One problem, configuration and budget, ready to launch; safe to call from several threads.

    What depends on M is a schedule and a few bytes a binding; the rest is a `Frame`'s, which
    `frame_of` gives.
    """

    __slots__ = (
        "_frame_of", "_problem", "config", "num_ctas", "overlap", "schedule", "variant",
        "workspace_bytes",
    )  # fmt: skip

    def __init__(
        self, problem: GemmProblem, config: GemmConfig, budget: Budget, variant: Variant,
        frame_of: Callable[[Operands], Frame],
    ) -> None:  # fmt: skip
        schedule = make_schedule(problem, config, budget)
        wanted = config.overlap and config.kernel == "ws"
        self.overlap = may_overlap(wanted, budget, variant.capability)
        self.config, self.schedule, self.variant = config, schedule, variant
        self.num_ctas = schedule.num_ctas
        partial_bytes = schedule.partial_slots * 4 * variant.block_x * variant.block_y
        self.workspace_bytes = COUNTER_BYTES + partial_bytes if partial_bytes else 0
        self._problem, self._frame_of = problem, frame_of

    def launch(
        self, a_ptr: int, w_ptr: int, out_ptr: int, bias_ptr: int, residual_ptr: int,
        a_stride: int, w_stride: int, out_stride: int, residual_stride: int,
        workspace_ptr: int, stream: int,
    ) -> None:  # fmt: skip
        """Launch on `stream`. Pointers are device addresses, strides elements between rows.

        `workspace_ptr` holds `workspace_bytes`, with the counters at its head zero.
        """
        launch = self.bind(a_stride, w_stride, out_stride, residual_stride)
        launch(a_ptr, w_ptr, out_ptr, bias_ptr, residual_ptr, workspace_ptr, stream)

    def bind(
        self, a_stride: int, w_stride: int, out_stride: int, residual_stride: int,
        static_weights: bool = False,
    ) -> Launch:  # fmt: skip
        """The launch for operands whose rows lie so many elements apart: 3 us of host time.

        With `static_weights` nothing that runs writes w: a launch that overlaps the kernel before
        it fetches its first weights at once.
        """
        problem = self._problem
        early = self.config.num_stages if static_weights and self.overlap else 0
        frame = self._frame_of(Operands(
            problem.n, problem.k, a_stride, w_stride, out_stride, residual_stride, self.overlap,
            early,
        ))  # fmt: skip
        return frame.bind(problem.m, self.schedule)


@cache
def ledger() -> list[object]:
    """Every kernel variant that this process has compiled (or fetched from disk) and loaded."""
    return []


def counters() -> Counters:
    """How many kernels this process has compiled and loaded so far: it only grows.

    In a serving loop it must stand still; `smkern.warmup` makes it so.
    """
    return Counters(compilations=len(ledger()), module_loads=len(ledger()))


class GemmKernels:
    """The GEMM kernels of one device: compiled and loaded once a variant, counted."""

    def __init__(self, device_index: int, capability: int) -> None:
        self.device_index, self.capability = device_index, capability
        self._loaded: dict[Variant, tuple[Artifact, ctypes.c_void_p]] = {}
        self._frames: dict[tuple[Variant, Operands], Frame] = {}
        self._lock = threading.Lock()

    def is_loaded(self, problem: GemmProblem, config: GemmConfig) -> bool:
        """Whether `prepare` would compile and load nothing."""
        return variant_of(problem, config, self.capability) in self._loaded

    def prepare(self, problem: GemmProblem, config: GemmConfig, budget: Budget) -> GemmPlan:
        """The plan that runs `problem` by `config` within `budget`; loads its variant if new."""
        variant = variant_of(problem, config, self.capability)
        with self._lock:
            if variant not in self._loaded:
                artifact = compile_variant(variant)
                function = load_function(artifact.cubin, artifact.name, artifact.shared_bytes)
                self._loaded[variant] = artifact, function
                ledger().append(variant)
        return GemmPlan(problem, config, budget, variant, partial(self._frame, variant))

    def _frame(self, variant: Variant, operands: Operands) -> Frame:
        """What all launches of a loaded variant over such operands share, of any M."""
        key = (variant, operands)
        with self._lock:
            found = self._frames.get(key)
            if found is None:
                if len(self._frames) >= _MAX_FRAMES:
                    self._frames.clear()
                found = self._frames[key] = Frame(variant, *self._loaded[variant], operands)
        return found
