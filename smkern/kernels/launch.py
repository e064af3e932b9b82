"""From a configuration to a launch: variants are loaded once, a plan is one problem's launch."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from smkern.errors import ArgumentError
from smkern.kernels.compile import Artifact, compile_variant
from smkern.kernels.driver import (
    TENSOR_MAP_BYTES,
    check,
    encode_tensor_map,
    launcher,
    load_function,
    may_overlap,
    replace_address,
)
from smkern.kernels.variants import Variant, variant_of
from smkern.tuning.config import STREAM_K, Budget, GemmConfig, GemmProblem

COUNTER_BYTES = 65_536
"""Head of a workspace: int32 arrival counters, zero before and after every launch."""
MAX_COUNTERS = COUNTER_BYTES // 4
_MAX_BOUND = 1024
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


# What a call changes, in the order of a binding's buffer, 8 bytes each.
_DYNAMIC = struct.Struct("7Q")
_OUT, _BIAS, _RESIDUAL, _PARTIALS, _COUNTERS, _X, _Y = range(7)
_DYNAMIC_BYTES = 64

Launch = Callable[[int, int, int, int, int, int, int], None]
"""launch(a, w, out, bias, residual, workspace, stream): addresses, 0 for what is absent."""


class GemmPlan:
    """One problem, configuration and budget, ready to launch; safe to call from several threads."""

    __slots__ = (
        "_artifact", "_bound", "_function", "_problem", "config", "num_ctas", "overlap",
        "schedule", "variant", "workspace_bytes",
    )  # fmt: skip

    def __init__(
        self, problem: GemmProblem, config: GemmConfig, budget: Budget, variant: Variant,
        artifact: Artifact, function: ctypes.c_void_p,
    ) -> None:  # fmt: skip
        schedule = make_schedule(problem, config, budget)
        wanted = config.overlap and config.kernel == "ws"
        self.overlap = may_overlap(wanted, budget, variant.capability)
        self.config, self.schedule, self.variant = config, schedule, variant
        self.num_ctas = schedule.num_ctas
        partial_bytes = schedule.partial_slots * 4 * variant.block_x * variant.block_y
        self.workspace_bytes = COUNTER_BYTES + partial_bytes if partial_bytes else 0
        self._problem, self._artifact, self._function = problem, artifact, function
        self._bound: dict[tuple[int, int, int, int, bool], Launch] = {}

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
        key = (a_stride, w_stride, out_stride, residual_stride, static_weights)
        found = self._bound.get(key)
        if found is None:
            if len(self._bound) >= _MAX_BOUND:
                self._bound.clear()
            found = self._bound[key] = self._bind(*key)
        return found

    def _bind(
        self, a_stride: int, w_stride: int, out_stride: int, residual_stride: int,
        static_weights: bool,
    ) -> Launch:  # fmt: skip
        swap, artifact = self.config.swap, self._artifact
        buffer = ctypes.create_string_buffer(4 * TENSOR_MAP_BYTES + 256)
        start = ctypes.addressof(buffer)
        maps_at = start + -start % TENSOR_MAP_BYTES
        dynamic_at = maps_at + 2 * TENSOR_MAP_BYTES
        x_stride, y_stride = (w_stride, a_stride) if swap else (a_stride, w_stride)
        if self.variant.uses_tma:
            self._encode_maps(maps_at, x_stride, y_stride)
        early = self.config.num_stages if static_weights and self.overlap else 0
        params = self._parameters(
            buffer, maps_at, dynamic_at, (x_stride, y_stride, out_stride, residual_stride), early
        )
        x_map, y_map = maps_at, maps_at + TENSOR_MAP_BYTES
        a_map, w_map = (y_map, x_map) if swap else (x_map, y_map)
        uses_tma, offset, lock = self.variant.uses_tma, dynamic_at - start, threading.Lock()
        pack, num_ctas = _DYNAMIC.pack_into, self.num_ctas
        replace: Any = replace_address() if uses_tma else None
        run = launcher(
            self._function, num_ctas, artifact.num_threads, artifact.shared_bytes,
            overlap=self.overlap,
        )  # fmt: skip
        w_mapped = 0

        def launch(
            a: int, w: int, out: int, bias: int, residual: int, workspace: int, stream: int
        ) -> None:
            nonlocal w_mapped
            with lock:
                if swap:
                    pack(buffer, offset, out, bias, residual, workspace + COUNTER_BYTES,
                         workspace, w, a)  # fmt: skip
                else:
                    pack(buffer, offset, out, bias, residual, workspace + COUNTER_BYTES,
                         workspace, a, w)  # fmt: skip
                code = 0
                if uses_tma:
                    code = replace(a_map, a)
                    if w != w_mapped:
                        code = code or replace(w_map, w)
                        w_mapped = w
                code = code or run(stream, params)
            if code:
                check(code, f"launching {num_ctas} CTAs of {self.variant} (a {a:#x}, w {w:#x})")

        return launch

    def _encode_maps(self, maps_at: int, x_stride: int, y_stride: int) -> None:
        problem, artifact, swap = self._problem, self._artifact, self.config.swap
        for side, stride in enumerate((x_stride, y_stride)):
            pitch = stride * _ITEM[problem.dtype]
            is_weights = swap == (side == 0)
            dims: tuple[int, ...] = (problem.k, problem.n if is_weights else problem.m)
            strides: tuple[int, ...] = (pitch,)
            if is_weights and self.variant.interleaves:
                inner = problem.n // 2
                dims, strides = (problem.k, 8, 2, inner // 8), (pitch, inner * pitch, 8 * pitch)
            encode_tensor_map(
                maps_at + side * TENSOR_MAP_BYTES, problem.dtype, dims, strides,
                artifact.boxes[side][::-1], artifact.swizzles[side],
            )  # fmt: skip

    def _parameters(
        self, buffer: Any, maps_at: int, dynamic_at: int, strides: tuple[int, int, int, int],
        early: int,
    ) -> Any:  # fmt: skip
        """Write the constants behind the dynamic part; addresses of all parameters, in order."""
        s, p, unit = self.schedule, self._problem, self._artifact.unit
        x_stride, y_stride, out_stride, residual_stride = (stride // unit for stride in strides)
        constants = (
            p.m, p.out_columns // unit, out_stride, residual_stride, s.tiles_x, s.tiles_y,
            s.k_iters, s.whole_tiles, s.stream_iters, s.quantum, s.group, early, x_stride,
            y_stride, p.k // unit, 0,
        )  # fmt: skip
        constants_at = dynamic_at + _DYNAMIC_BYTES
        at_offset = constants_at - ctypes.addressof(buffer)
        struct.pack_into(f"{len(constants)}q", buffer, at_offset, *constants)
        dynamic = [dynamic_at + 8 * i for i in range(7)]
        *common, ahead, x_step, y_step, k, zero = (
            constants_at + 8 * i for i in range(len(constants))
        )
        if self.variant.uses_tma:
            # a descriptor is the map, its shape and its strides; the kernels read the map only
            operands = []
            for side, box in enumerate(self._artifact.boxes):
                operands += [maps_at + side * TENSOR_MAP_BYTES, *[zero] * (2 * len(box))]
            rest = [ahead] if self.variant.kernel == "ws" else []
        else:
            operands, rest = [dynamic[_X], dynamic[_Y]], [x_step, y_step, k]
        # the two last are Triton's scratch pointers, unused
        params = [*operands, *dynamic[_OUT : _COUNTERS + 1], *common, *rest, zero, zero]
        return (ctypes.c_void_p * len(params))(*params)


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
            artifact, function = self._loaded[variant]
        return GemmPlan(problem, config, budget, variant, artifact, function)
