"""State shared by the launches of one GEMM kernel for any M: parameter memory, w's tensor map."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from smkern.kernels.compile import Artifact
from smkern.kernels.driver import (
    TENSOR_MAP_BYTES,
    Run,
    check,
    encode_tensor_map,
    launcher,
    replace_address,
)
from smkern.kernels.gemm_schedule import Schedule
from smkern.kernels.gemm_variants import Variant
from smkern.tuning.constraints import COUNTER_BYTES

_ITEM = {"bf16": 2, "fp16": 2, "fp32": 4}
# Parameters that change with each call, 8 bytes each.
_DYNAMIC = struct.Struct("7Q")
_OUT, _BIAS, _RESIDUAL, _PARTIALS, _COUNTERS, _X, _Y = range(7)
_CONSTANTS = struct.Struct("16q")
_WHOLE_TILES, _GROUP = 7, 10
# A frame's buffer: w's map, a's map and the constants, the parameters of a call.
_ROWS_AT, _ROWS_BYTES = TENSOR_MAP_BYTES, TENSOR_MAP_BYTES + _CONSTANTS.size


Launch = Callable[[int, int, int, int, int, int, int], None]
"""launch(a, w, out, bias, residual, workspace, stream): addresses, 0 for what is absent."""


class Operands(NamedTuple):
    """Key of a frame beside its kernel: w [n, k], row strides in elements, overlap.

    `early`: stages of w that a launch fetches before the previous kernel has ended.
    """

    n: int
    k: int
    a_stride: int
    w_stride: int
    out_stride: int
    residual_stride: int
    overlap: bool
    early: int


class Frame:
    """The launches of a kernel for operands that differ in M and addresses; thread-safe.

    One buffer holds w's tensor map, a's map, the constants and the parameters of a call. A launch
    with another M than the previous one rewrites a's map and the constants first, which is safe as
    the driver copies all parameters at launch.
    """

    __slots__ = (
        "_artifact", "_buffer", "_function", "_held", "_lock", "_maps_at", "_operands", "_params",
        "_runs", "_variant",
    )  # fmt: skip

    def __init__(
        self, variant: Variant, artifact: Artifact, function: ctypes.c_void_p, operands: Operands
    ) -> None:
        self._variant, self._artifact, self._function = variant, artifact, function
        self._operands, self._lock = operands, threading.Lock()
        self._runs: dict[int, Run] = {}
        self._buffer, self._maps_at = _aligned_room(_ROWS_AT + _ROWS_BYTES + _DYNAMIC.size)
        self._params = self._parameters()
        self._held: list[Any] = [None, 0]
        """M that the buffer is written for, and the address in w's map."""
        if variant.uses_tma:
            self._encode(self._maps_at, operands.n, operands.w_stride, is_weights=True)

    def bind(self, m: int, schedule: Schedule) -> Launch:
        """The launch for `m` rows: 3 us of host time, 1 more after a launch with another M."""
        rows, run = self._rows(m, schedule), self._run(schedule.num_ctas)
        swap, uses_tma, params = self._variant.swap, self._variant.uses_tma, self._params
        buffer, lock, held, pack = self._buffer, self._lock, self._held, _DYNAMIC.pack_into
        w_map, a_map, move = self._maps_at, self._maps_at + _ROWS_AT, ctypes.memmove
        offset = a_map + _ROWS_BYTES - ctypes.addressof(buffer)
        replace: Any = replace_address() if uses_tma else None

        def launch(
            a: int, w: int, out: int, bias: int, residual: int, workspace: int, stream: int
        ) -> None:
            with lock:
                if held[0] is not rows:
                    move(a_map, rows, _ROWS_BYTES)
                    held[0] = rows
                if swap:
                    pack(buffer, offset, out, bias, residual, workspace + COUNTER_BYTES,
                         workspace, w, a)  # fmt: skip
                else:
                    pack(buffer, offset, out, bias, residual, workspace + COUNTER_BYTES,
                         workspace, a, w)  # fmt: skip
                code = 0
                if uses_tma:
                    code = replace(a_map, a)
                    if w != held[1]:
                        code = code or replace(w_map, w)
                        held[1] = w
                code = code or run(stream, params)
            if code:
                check(code, f"launching {schedule} of {self._variant} (a {a:#x}, w {w:#x})")

        return launch

    def _rows(self, m: int, schedule: Schedule) -> bytes:
        """The part of the buffer that depends on M: a's map and the constants."""
        s, o, variant = schedule, self._operands, self._variant
        unit, swap = 1 if variant.kernel == "cutlass" else variant.unit, variant.swap
        columns = o.n // 2 if self._variant.swiglu else o.n
        x_stride, y_stride = (o.w_stride, o.a_stride) if swap else (o.a_stride, o.w_stride)
        room, at = _aligned_room(TENSOR_MAP_BYTES)
        if self._variant.uses_tma:
            self._encode(at, m, o.a_stride, is_weights=False)
        begin = at - ctypes.addressof(room)
        return room[begin : begin + TENSOR_MAP_BYTES] + _CONSTANTS.pack(
            m, columns // unit, o.out_stride // unit, o.residual_stride // unit, s.tiles_x,
            s.tiles_y, s.k_iters, s.whole_tiles, s.stream_iters, s.quantum, s.group, o.early,
            x_stride // unit, y_stride // unit, o.k // unit, 0,
        )  # fmt: skip

    def _run(self, num_ctas: int) -> Run:
        """The driver launch of `num_ctas`; few are needed, as most M fill the budget."""
        found = self._runs.get(num_ctas)
        if found is None:
            artifact = self._artifact
            found = self._runs[num_ctas] = launcher(
                self._function, num_ctas, artifact.num_threads, artifact.shared_bytes,
                overlap=self._operands.overlap,
            )  # fmt: skip
        return found

    def _encode(self, at: int, rows: int, stride: int, *, is_weights: bool) -> None:
        """Write the tensor map of an operand with `rows` rows to `at`."""
        variant, k = self._variant, self._operands.k
        side = int(variant.swap != is_weights)
        pitch = stride * _ITEM[variant.dtype]
        dims: tuple[int, ...] = (k, rows)
        strides: tuple[int, ...] = (pitch,)
        if is_weights and variant.interleaves:
            inner = rows // 2
            dims, strides = (k, 8, 2, inner // 8), (pitch, inner * pitch, 8 * pitch)
        encode_tensor_map(
            at, variant.dtype, dims, strides, self._artifact.boxes[side][::-1],
            self._artifact.swizzles[side],
        )  # fmt: skip

    def _parameters(self) -> Any:
        """Addresses of all parameters in the kernel's order."""
        w_map, a_map = self._maps_at, self._maps_at + _ROWS_AT
        constants_at, dynamic_at = a_map + TENSOR_MAP_BYTES, a_map + _ROWS_BYTES
        dynamic = [dynamic_at + 8 * i for i in range(7)]
        *common, ahead, x_step, y_step, k, zero = (constants_at + 8 * i for i in range(16))
        if self._variant.kernel == "cutlass":  # has no scratch and splits no K loop
            maps = (w_map, a_map) if self._variant.swap else (a_map, w_map)
            numbers = [*common[:_WHOLE_TILES], common[_GROUP], ahead]
            params = [*maps, *dynamic[_OUT:_PARTIALS], *numbers]
            return (ctypes.c_void_p * len(params))(*params)
        if self._variant.uses_tma:
            # a descriptor has the map, shape and strides; the kernels read the map only
            operands = []
            maps = (w_map, a_map) if self._variant.swap else (a_map, w_map)
            for at, box in zip(maps, self._artifact.boxes, strict=True):
                operands += [at, *[zero] * (2 * len(box))]
            rest = [ahead] if self._variant.kernel == "ws" else []
        else:
            operands, rest = [dynamic[_X], dynamic[_Y]], [x_step, y_step, k]
        # the two last are Triton's scratch pointers, unused
        params = [*operands, *dynamic[_OUT : _COUNTERS + 1], *common, *rest, zero, zero]
        return (ctypes.c_void_p * len(params))(*params)


def _aligned_room(size: int) -> tuple[Any, int]:
    """A zeroed buffer and the first address in it aligned for a tensor map."""
    buffer = ctypes.create_string_buffer(size + TENSOR_MAP_BYTES)
    start = ctypes.addressof(buffer)
    return buffer, start + -start % TENSOR_MAP_BYTES
