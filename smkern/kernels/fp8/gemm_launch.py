"""From a GEMM of e4m3 to its launch: kernels loaded once, tensor maps, parameters of a call."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from smkern.kernels.aot import KernelSet, LoadedKernel
from smkern.kernels.driver import (
    TENSOR_MAP_BYTES,
    check,
    encode_tensor_map,
    launcher,
    may_overlap,
    replace_address,
)
from smkern.kernels.fp8.gated_launch import GatedPlan, GatedVariant
from smkern.kernels.fp8.gemm_compile import PAIRS, UNIT, ScaledVariant, variant_of
from smkern.kernels.gemm_schedule import make_schedule
from smkern.tuning import fp8
from smkern.tuning.config import Budget, GemmConfig
from smkern.tuning.constraints import COUNTER_BYTES
from smkern.tuning.fp8 import ScaledProblem

Launch = Callable[[int, int, int, int, int, int, int, int, int], None]
"""launch(a, w, a_scale, w_scale, out, bias, residual, workspace, stream): addresses."""


class Strides(NamedTuple):
    """Elements between rows of matrices, and between scales; see `smkern.ops.fp8.scales`."""

    a: int
    w: int
    out: int
    residual: int
    a_step: int
    a_block_step: int
    w_step: int


@dataclass(frozen=True, slots=True, eq=False)
class ScaledPlan:
    """One problem, configuration and budget with its loaded kernel; `bind` makes launches."""

    problem: ScaledProblem
    config: GemmConfig
    budget: Budget
    variant: ScaledVariant
    loaded: LoadedKernel

    @property
    def overlap(self) -> bool:
        """Whether launches may begin before the previous kernel has ended."""
        return may_overlap(self.config.overlap, self.budget, self.variant.capability)

    @property
    def workspace_bytes(self) -> int:
        """Counters and partial tiles, bytes."""
        if self.variant.kernel != "ws":
            return 0
        slots = make_schedule(self.problem.twin, self.config, self.budget).partial_slots
        each = 4 * self.config.block_m * self.config.block_n
        return COUNTER_BYTES + slots * each if slots else 0

    def bind(self, strides: Strides, *, static_weights: bool = False) -> Launch:
        """The launch for operands that lie so; thread-safe.

        Args:
            strides: Of all operands.
            static_weights: No running kernel writes w, so its first stages are fetched at once.
        """
        if self.variant.kernel == "pointer":
            return self._bind_pointer(strides)
        early = self.config.num_stages if static_weights and self.overlap else 0
        return self._bind_ws(strides, early)

    def _bind_pointer(self, strides: Strides) -> Launch:
        p, config, unit = self.problem, self.config, self.variant.unit
        ctas = fp8.num_ctas(p, config, self.budget)
        tiles = (-(-p.m // config.block_m), -(-p.n // config.block_n))
        numbers = (
            p.m, p.n, p.k // unit, strides.a // unit, strides.w // unit, *strides[2:], *tiles,
            min(config.group_m, tiles[0]),
        )  # fmt: skip
        run = self.loaded.bind("7Q13q", ctas, overlap=self.overlap)

        def launch(
            a: int, w: int, a_scale: int, w_scale: int, out: int, bias: int, residual: int,
            workspace: int, stream: int,
        ) -> None:  # fmt: skip
            run(stream, a, w, out, bias, residual, a_scale, w_scale, *numbers)

        return launch

    def _bind_ws(self, strides: Strides, early: int) -> Launch:
        p, variant, artifact = self.problem, self.variant, self.loaded.artifact
        s = make_schedule(p.twin, self.config, self.budget)
        buffer = ctypes.create_string_buffer(3 * TENSOR_MAP_BYTES + 8 * 32)
        start = ctypes.addressof(buffer)
        a_map = start + -start % TENSOR_MAP_BYTES
        w_map, at = a_map + TENSOR_MAP_BYTES, a_map + 2 * TENSOR_MAP_BYTES
        for where, rows, stride, side in (
            (a_map, p.m, strides.a, int(variant.swap)),
            (w_map, p.n, strides.w, int(not variant.swap)),
        ):
            encode_tensor_map(
                where, PAIRS, (p.k // 2, rows), (stride,), artifact.boxes[side][::-1],
                artifact.swizzles[side],
            )  # fmt: skip
        numbers = (
            p.m, p.n // UNIT, strides.out // UNIT, strides.residual // UNIT, strides.a_step,
            strides.a_block_step, strides.w_step, s.tiles_x, s.tiles_y, s.k_iters, s.whole_tiles,
            s.stream_iters, s.quantum, s.group, early,
        )  # fmt: skip
        addresses = 7  # out, bias, residual, partials, counters, a's scales, w's
        struct.pack_into(
            f"{addresses + len(numbers) + 1}q", buffer, at - start, *[0] * addresses, *numbers, 0
        )
        *values, zero = (at + 8 * i for i in range(addresses + len(numbers) + 1))
        # a descriptor has the map, shape and strides; the kernel reads the map only
        absent = [zero] * 4
        x_map, y_map = (w_map, a_map) if variant.swap else (a_map, w_map)
        # the last two are Triton's scratch pointers, unused
        given = [x_map, *absent, y_map, *absent, *values, zero, zero]
        params = (ctypes.c_void_p * len(given))(*given)
        run = launcher(
            self.loaded.function, s.num_ctas, artifact.num_threads, artifact.shared_bytes,
            overlap=self.overlap,
        )  # fmt: skip
        move: Callable[[int, int], int] = replace_address()
        pack, offset, lock = struct.Struct("7Q").pack_into, at - start, threading.Lock()
        mapped = (0, 0)

        def launch(
            a: int, w: int, a_scale: int, w_scale: int, out: int, bias: int, residual: int,
            workspace: int, stream: int,
        ) -> None:  # fmt: skip
            nonlocal mapped
            with lock:
                code = 0
                pack(
                    buffer, offset, out, bias, residual, workspace + COUNTER_BYTES, workspace,
                    a_scale, w_scale,
                )  # fmt: skip
                if mapped != (a, w):
                    code = move(a_map, a) or move(w_map, w)
                    mapped = (a, w)
                code = code or run(stream, params)
            if code:
                check(code, f"launching {s} of {variant} (a {a:#x}, w {w:#x})")

        return launch


class ScaledGemmKernels:
    """The GEMMs of e4m3 of one device; each is compiled and loaded once, and counted.

    Args:
        capability: Compute capability, such as 90.
    """

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self._set = KernelSet()

    def variants(self, problem: ScaledProblem) -> tuple[ScaledVariant | GatedVariant, ...]:
        """All kernels for a problem's kind, for any number of rows and budget."""
        if problem.epilogue.swiglu:
            return (GatedVariant(problem.out_dtype, self.capability),)
        found: dict[ScaledVariant, None] = {}
        capability = divmod(self.capability, 10)
        if fp8.serves_ws(problem, capability):
            for confined in (True, False):
                for config in fp8.variants(
                    problem.epilogue.residual, confined, capability, problem.blocks
                ):
                    for split in (1, 0):
                        named = replace(config, split=split)
                        found[variant_of(problem, named, self.capability)] = None
            return tuple(found)
        config = fp8.pointer_config(problem, Budget(1, "grid"))
        return (variant_of(problem, config, self.capability),)

    def variant(self, problem: ScaledProblem, config: GemmConfig) -> ScaledVariant | GatedVariant:
        """The kernel that runs a configuration."""
        if problem.epilogue.swiglu:
            return GatedVariant(problem.out_dtype, self.capability)
        return variant_of(problem, config, self.capability)

    def is_loaded(self, problem: ScaledProblem, config: GemmConfig | None = None) -> bool:
        """Whether `prepare` would compile and load nothing; None: by any configuration."""
        if config is not None:
            return self._set.is_loaded(self.variant(problem, config))
        return all(self._set.is_loaded(x) for x in self.variants(problem))

    def prepare(
        self, problem: ScaledProblem, config: GemmConfig, budget: Budget
    ) -> ScaledPlan | GatedPlan:
        """The plan of a problem by a configuration; loads its kernel on first use."""
        variant = self.variant(problem, config)
        loaded = self._set.load(variant, variant.compile)
        if isinstance(variant, GatedVariant):
            return GatedPlan(problem, config, budget, loaded)
        return ScaledPlan(problem, config, budget, variant, loaded)
