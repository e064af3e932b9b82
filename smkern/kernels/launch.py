"""From a configuration to a launch: variants are loaded once, a plan is one problem's launch."""

from __future__ import annotations

import ctypes
import struct
import threading
from dataclasses import dataclass
from functools import cache

from smkern.errors import ArgumentError
from smkern.kernels.compile import Artifact, compile_variant
from smkern.kernels.driver import TENSOR_MAP_BYTES, TensorMap, check, libcuda, load_function
from smkern.kernels.variants import Variant, variant_of
from smkern.tuning.config import STREAM_K, Budget, GemmConfig, GemmProblem

COUNTER_BYTES = 65_536
"""Head of a workspace: int32 arrival counters, zero before and after every launch."""
MAX_COUNTERS = COUNTER_BYTES // 4
_ITEM = {"bf16": 2, "fp16": 2, "fp32": 4}


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


# What a call changes, in the order of the plan's buffer: 8 bytes each.
_DYNAMIC = struct.Struct("11Q")
_OUT, _BIAS, _RESIDUAL, _PARTIALS, _COUNTERS, _OUT_STRIDE, _RESIDUAL_STRIDE = range(7)
_X, _Y, _X_STRIDE, _Y_STRIDE = range(7, 11)


class GemmPlan:
    """One problem, configuration and budget, ready to launch; safe to call from several threads."""

    __slots__ = (
        "_a_map", "_buffer", "_dynamic_at", "_function", "_item", "_lock", "_params", "_shape",
        "_swap", "_unit", "_w_map", "config", "num_ctas", "schedule", "variant", "workspace_bytes",
    )  # fmt: skip

    def __init__(
        self, problem: GemmProblem, config: GemmConfig, schedule: Schedule, variant: Variant,
        artifact: Artifact, function: ctypes.c_void_p,
    ) -> None:  # fmt: skip
        self.config, self.schedule, self.variant = config, schedule, variant
        self.num_ctas = schedule.num_ctas
        partial_bytes = schedule.partial_slots * 4 * variant.block_x * variant.block_y
        self.workspace_bytes = COUNTER_BYTES + partial_bytes if partial_bytes else 0
        self._swap, self._unit, self._item = config.swap, artifact.unit, _ITEM[problem.dtype]
        self._function, self._lock = function, threading.Lock()
        self._shape = tuple(
            ctypes.c_uint32(v)
            for v in (schedule.num_ctas, 1, 1, artifact.num_threads, 1, 1, artifact.shared_bytes)
        )
        self._lay_out(problem, artifact)

    def _lay_out(self, problem: GemmProblem, artifact: Artifact) -> None:
        """Put all parameters into one buffer: tensor maps, what a call changes, constants."""
        buffer = ctypes.create_string_buffer(4 * TENSOR_MAP_BYTES + 128)
        start = ctypes.addressof(buffer)
        maps_at = start + -start % TENSOR_MAP_BYTES
        dynamic_at = maps_at + 2 * TENSOR_MAP_BYTES
        constants_at = dynamic_at + TENSOR_MAP_BYTES
        s = self.schedule
        constants = (
            problem.m, problem.n // self._unit, s.tiles_x, s.tiles_y, s.k_iters, s.whole_tiles,
            s.stream_iters, s.quantum, s.group, problem.k // self._unit, 0,
        )  # fmt: skip
        struct.pack_into(f"{len(constants)}q", buffer, constants_at - start, *constants)
        self._buffer, self._dynamic_at = buffer, dynamic_at - start

        dynamic = [dynamic_at + 8 * i for i in range(11)]
        m, n, *schedule, k, zero = (constants_at + 8 * i for i in range(len(constants)))
        rows = (problem.n, problem.m) if self._swap else (problem.m, problem.n)
        maps, operands = [], []
        for side in range(2):
            if not self.variant.uses_tma:
                operands.append(dynamic[_X + side])
                continue
            at = maps_at + side * TENSOR_MAP_BYTES
            box, swizzle = artifact.boxes[side], artifact.swizzles[side]
            maps.append(TensorMap(at, problem.dtype, rows[side], problem.k, box, swizzle))
            # a descriptor is the map, its shape and its strides; these kernels read the map only
            operands += [at, zero, zero, zero, zero]
        params = [*operands, *dynamic[_OUT : _COUNTERS + 1], m, n]
        params += [dynamic[_OUT_STRIDE], dynamic[_RESIDUAL_STRIDE], *schedule]
        if self.variant.kernel == "pointer":
            params += [dynamic[_X_STRIDE], dynamic[_Y_STRIDE], k]
        params += [zero, zero]  # Triton's two scratch pointers, unused
        self._params = (ctypes.c_void_p * len(params))(*params)
        x_map, y_map = maps or (None, None)
        self._a_map, self._w_map = (y_map, x_map) if self._swap else (x_map, y_map)

    def launch(
        self, a_ptr: int, w_ptr: int, out_ptr: int, bias_ptr: int, residual_ptr: int,
        a_stride: int, w_stride: int, out_stride: int, residual_stride: int,
        workspace_ptr: int, stream: int,
    ) -> None:  # fmt: skip
        """Launch on `stream`. Pointers are device addresses, strides elements between rows.

        `workspace_ptr` holds `workspace_bytes`, with the counters at its head zero.
        """
        unit = self._unit
        x, x_stride, y, y_stride = a_ptr, a_stride, w_ptr, w_stride
        if self._swap:
            x, x_stride, y, y_stride = y, y_stride, x, x_stride
        with self._lock:
            _DYNAMIC.pack_into(
                self._buffer, self._dynamic_at, out_ptr, bias_ptr, residual_ptr,
                workspace_ptr + COUNTER_BYTES, workspace_ptr, out_stride // unit,
                residual_stride // unit, x, y, x_stride // unit, y_stride // unit,
            )  # fmt: skip
            if self._a_map is not None:
                self._a_map.encode(a_ptr, a_stride * self._item)
                if self._w_map.key != (w_ptr, w_stride * self._item):
                    self._w_map.encode(w_ptr, w_stride * self._item)
            code = libcuda().cuLaunchKernel(
                self._function, *self._shape, ctypes.c_void_p(stream), self._params, None
            )
        if code:
            check(code, f"cuLaunchKernel({self.num_ctas} CTAs of {self.variant})")


@cache
def _ledger() -> list[Variant]:
    """Every variant that this process has compiled (or fetched from disk) and loaded."""
    return []


def counters() -> Counters:
    """How many kernels this process has compiled and loaded so far: it only grows.

    In a serving loop it must stand still; `smkern.warmup` makes it so.
    """
    return Counters(compilations=len(_ledger()), module_loads=len(_ledger()))


class GemmKernels:
    """The GEMM kernels of one device: compiled and loaded once a variant, counted."""

    def __init__(self, device_index: int, capability: int) -> None:
        self.device_index, self.capability = device_index, capability
        self._loaded: dict[Variant, tuple[Artifact, ctypes.c_void_p]] = {}
        self._lock = threading.Lock()

    def is_loaded(self, problem: GemmProblem, config: GemmConfig) -> bool:
        """Whether `prepare` would compile and load nothing."""
        return variant_of(problem, config, self.capability) in self._loaded

    def prepare(self, problem: GemmProblem, config: GemmConfig, budget: Budget) -> GemmPlan:
        """The plan that runs `problem` by `config` within `budget`; loads its variant if new."""
        variant = variant_of(problem, config, self.capability)
        schedule = make_schedule(problem, config, budget)
        with self._lock:
            if variant not in self._loaded:
                artifact = compile_variant(variant)
                function = load_function(artifact.cubin, artifact.name, artifact.shared_bytes)
                self._loaded[variant] = artifact, function
                _ledger().append(variant)
            artifact, function = self._loaded[variant]
        return GemmPlan(problem, config, schedule, variant, artifact, function)
