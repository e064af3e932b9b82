"""Ahead-of-time compilation of GEMM variants, without a GPU, through Triton's disk cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from smkern.kernels.aot import KernelSource, compile_source, matrices
from smkern.kernels.compile import Artifact, compile_all
from smkern.kernels.gemm_variants import Variant

_POINTERS = ("out_ptr", "bias_ptr", "residual_ptr")
_SCRATCH = ("partials", "counters")
_NUMBERS = (
    "m", "n", "out_stride", "residual_stride", "tiles_x", "tiles_y", "k_iters",
    "whole_tiles", "stream_iters", "quantum", "group",
)  # fmt: skip


def compile_variant(variant: Variant) -> Artifact:
    """Compile one variant (or take it from its cache). Needs no GPU.

    Raises `DeviceError` if the variant exceeds the device's shared memory, or is CUTLASS's and can
    neither be compiled here nor was before.
    """
    if variant.kernel == "cutlass":
        from smkern.kernels.cute import compile as cute

        return cute.compile_variant(variant)
    return compile_source(source_of(variant))


def source_of(variant: Variant) -> KernelSource:
    """What is compiled of a variant that is not CUTLASS's."""
    return _ws_source(variant) if variant.kernel == "ws" else _triton_source(variant)


def precompile(
    variants: Iterable[Variant], *, workers: int, done: Callable[[int, int], None] | None = None
) -> int:
    """Compile variants into Triton's disk cache with `workers` processes; returns how many.

    `done(finished, total)` is called after each one.
    """
    wanted = sorted(set(variants))
    compile_all(compile_tasks(wanted), workers=workers, done=done)
    return len(wanted)


@dataclass(frozen=True, slots=True)
class Compile:
    """A variant to compile into its cache, or several of CUTLASS's; one task, whoever wants it."""

    variants: tuple[Variant, ...]

    def __call__(self) -> None:
        if self.variants[0].kernel != "cutlass":
            compile_variant(self.variants[0])
            return
        from smkern.kernels.cute import compile as cute

        cute.compile_many(self.variants, workers=1)


def compile_tasks(variants: Sequence[Variant]) -> list[Compile]:
    """What compiles variants into their caches: one each, but CUTLASS's many at a time."""
    tasks = [Compile((each,)) for each in variants if each.kernel != "cutlass"]
    if others := [each for each in variants if each.kernel == "cutlass"]:
        from smkern.kernels.cute import compile as cute

        batches = [others[i : i + cute.BATCH] for i in range(0, len(others), cute.BATCH)]
        tasks += [Compile(tuple(batch)) for batch in batches]
    return tasks


def _signature(variant: Variant, operands: dict[str, str], *more: str) -> dict[str, str]:
    """Types of a kernel's parameters, in Triton's notation."""
    pointers = dict.fromkeys(_POINTERS, "*" + variant.dtype)
    scratch = {"partials": "*fp32", "counters": "*i32"}
    return operands | pointers | scratch | dict.fromkeys((*_NUMBERS, *more), "i32")


def _constants(variant: Variant) -> dict[str, Any]:
    return {
        "BLOCK_X": variant.block_x,
        "BLOCK_Y": variant.block_y,
        "BLOCK_K": variant.block_k,
        "STAGES": variant.num_stages,
        "STREAM": variant.stream,
        "SWAP": variant.swap,
        "BIAS": variant.bias,
        "RESIDUAL": variant.residual,
        "ACT": variant.activation,
    }


def _triton_source(variant: Variant) -> KernelSource:
    from smkern.kernels.gemm_triton import gemm_pointer, gemm_tma

    fn = gemm_tma if variant.kernel == "tma" else gemm_pointer
    more: tuple[str, ...] = ()
    if variant.kernel == "tma":
        # SwiGLU: a box of gate rows, then one of up rows
        x, y = _stored(variant, variant.block_x, variant.block_y)
        operands = {
            f"{side}_desc": f"tensordesc<{variant.dtype}[{block}, {variant.block_k}]>"
            for side, block in (("x", x), ("y", y))
        }
    else:
        operands = dict.fromkeys(("x_ptr", "y_ptr"), "*" + variant.dtype)
        more = ("x_stride", "y_stride", "k")
    whole: tuple[str, ...] = _POINTERS if variant.unit == 8 else ()
    if more and whole:
        whole += ("x_ptr", "y_ptr")
    return KernelSource(
        fn, _signature(variant, operands, *more), _constants(variant) | {"UNIT": variant.unit},
        (*_SCRATCH, *whole), variant.num_warps, variant.capability, variant.num_stages,
    )  # fmt: skip


def _ws_source(variant: Variant) -> KernelSource:
    from triton.experimental.gluon import language as gl

    from smkern.kernels.gemm_ws import gemm_ws
    from smkern.kernels.gemm_ws_copy import PAIR

    warps, x, extra = variant.num_warps, variant.block_x, variant.extra_y
    y = variant.block_y - extra
    boxes = {}
    for side, rows, is_weights in (("x", x, variant.swap), ("y", extra or y, not variant.swap)):
        box = [rows, variant.block_k]
        if is_weights and variant.interleaves:
            box = [rows // PAIR.value, 2, PAIR.value // 2, variant.block_k]
        boxes[side] = box
    warps_x = warps if x >= 16 * warps else 4
    warps_y = warps // warps_x

    def mma(columns: int) -> Any:
        return gl.NVMMADistributedLayout(
            version=[3, 0],
            warps_per_cta=[warps_x, warps_y],
            instr_shape=[16, min(columns // warps_y, 256), 16],
        )

    part = min(part_columns(variant), extra or y)
    constants = _constants(variant) | {
        "BLOCK_Y": y,
        "EXTRA_Y": extra,
        "EAGER": variant.eager,
        "PART_Y": part,
        "MMA": mma(y),
        "EXTRA_MMA": mma(extra or y),
        "LAYOUT": _store_layout(gl, *_stored(variant, x, part), warps, variant.swap),
        "COPY_REGS": 24,
    }
    threads = 32 * (warps + 4)  # the copying warp's group is four warps wide
    registers = 65_536 // (threads * variant.ctas_per_sm) // 8 * 8
    signature = _signature(variant, matrices(variant.dtype, **boxes), "early")
    whole = _POINTERS if variant.unit == 8 else ()
    return KernelSource(
        gemm_ws, signature, constants, (*_SCRATCH, *whole), warps, variant.capability,
        maxnreg=min(registers, 255),
    )  # fmt: skip


def part_columns(variant: Variant) -> int:
    """Columns that the epilogue stages in shared memory at a time: 64 elements per thread."""
    return max(16, min(variant.block_y, 64 * 32 * variant.num_warps // variant.block_x))


def _stored(variant: Variant, x: int, y: int) -> tuple[int, int]:
    """Shape stored for x by y accumulators: SwiGLU combines a gate and an up into one."""
    if not variant.swiglu:
        return x, y
    return (x // 2, y) if variant.swap else (x, y // 2)


def _store_layout(gl: Any, x: int, y: int, warps: int, swap: bool) -> Any:
    """16 bytes per thread, contiguous along the output's rows (X when swapped)."""
    if swap:
        lanes = min(32, x // 8)
        return gl.BlockedLayout([8, 1], [lanes, 32 // lanes], [1, warps], [0, 1])
    lanes = min(32, y // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [warps, 1], [1, 0])
