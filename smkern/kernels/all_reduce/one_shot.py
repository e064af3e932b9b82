"""Launches of `csrc/all_reduce/one_shot.cu`: a sum over ranks with what follows it, in one."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from smkern.kernels.cuda_source import compile_cuda
from smkern.kernels.driver import OVERLAP_FROM, Run, check, launcher, load_function
from smkern.kernels.ledger import ledger

Mode = Literal["sum", "add", "norm"]
_MODES: dict[str, int] = {"sum": 0, "add": 1, "norm": 2}
_DTYPES = {"bf16": 0, "fp16": 1}
_PARAMS = struct.Struct("14Q 3i f")
MAX_RANKS = 8
MAX_CTAS = 256
"""kMaxCtas of the source."""
ROWS = 4
"""Rows of a CTA at a time: kGroups of the source."""
GROUP = 128
"""Threads of a row: kGroup of the source."""
VECTOR_BYTES = 16
MAX_WIDTH = 16 * GROUP * VECTOR_BYTES // 2
"""Numbers of a row, at most: a thread holds 16 vectors of it."""


def header_bytes(ranks: int) -> int:
    """Bytes in front of the slots: flags by sender and CTA, and counters."""
    return 4 * ranks * MAX_CTAS + 256


def memory_bytes(ranks: int, slot_bytes: int) -> int:
    """Bytes of a rank's memory for calls of at most so many bytes of rows."""
    return header_bytes(ranks) + 2 * ranks * slot_bytes


@dataclass(frozen=True, slots=True, order=True)
class OneShotVariant:
    """One compiled kernel."""

    ranks: int
    dtype: str
    mode: str
    vectors: int
    capability: int

    @property
    def defines(self) -> tuple[str, ...]:
        return (
            f"RANKS={self.ranks}", f"DTYPE={_DTYPES[self.dtype]}", f"MODE={_MODES[self.mode]}",
            f"VECTORS={self.vectors}", f"PDL={int(self.capability >= OVERLAP_FROM)}",
        )  # fmt: skip

    def compile(self) -> bytes:
        """Device code, compiled or from the disk cache. Needs no GPU."""
        arch = f"sm_{self.capability}" + ("a" if self.capability >= 90 else "")
        return compile_cuda("all_reduce/one_shot.cu", self.defines, arch)


class OneShotKernels:
    """The kernels of one width of rows, loaded into the current context.

    Args:
        rank: This process.
        addresses: Of each rank's memory, as this GPU sees it.
        slot_bytes: Bytes of the rows of a call, at most.
        dtype: "bf16" or "fp16".
        width: Numbers of a row, a multiple of 8 up to 16,384.
        capability: Compute capability, such as 90.
        limit_s: A wait of so long ends the launch with an error of the device.
    """

    def __init__(
        self,
        rank: int,
        addresses: Sequence[int],
        slot_bytes: int,
        dtype: str,
        width: int,
        capability: int,
        limit_s: float,
    ) -> None:
        ranks, self._width = len(addresses), 2 * width // VECTOR_BYTES
        self.slot_bytes = slot_bytes
        self._rank = rank
        self._shared = (*addresses, *[0] * (MAX_RANKS - ranks))
        self._limit_ns = int(1e9 * limit_s)
        vectors = -(-self._width // GROUP)
        self._functions = {}
        for mode in _MODES:
            variant = OneShotVariant(ranks, dtype, mode, vectors, capability)
            self._functions[mode] = load_function(variant.compile(), "all_reduce", 0)
            ledger().append(variant)
        self._runs: dict[tuple[str, int, bool], Run] = {}
        self._lock = threading.Lock()
        self._buffer = ctypes.create_string_buffer(_PARAMS.size)
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._buffer))

    def launch(
        self, mode: Mode, stream: int, rows: int, num_sms: int, x: int, *, residual: int = 0,
        weight: int = 0, out: int = 0, eps: float = 0.0, overlap: bool = False,
    ) -> None:  # fmt: skip
        """Sum rows over the ranks, on at most `num_sms` SMs.

        Args:
            mode: "sum": into x; "add": into the residual; "norm": also its norm into out.
            stream: Raw stream handle.
            rows: Rows of x, the same on all ranks.
            num_sms: CTAs at most, the same on all ranks.
            x, residual, weight, out: Device addresses, rows without gaps.
            eps: Added to the mean of squares.
            overlap: Whether it may begin while the launch before it ends.
        """
        key = mode, min(rows, num_sms, MAX_CTAS), overlap
        with self._lock:
            run = self._runs.get(key) or self._run(*key)
            _PARAMS.pack_into(
                self._buffer, 0, *self._shared, x, residual, weight, out, self.slot_bytes,
                self._limit_ns, self._rank, rows, self._width, eps,
            )  # fmt: skip
            code = run(stream, self._pointers)
        if code:
            check(code, f"launching {key[1]} CTAs of a sum over ranks")

    def _run(self, mode: str, num_ctas: int, overlap: bool) -> Run:
        """The launch of a grid, made once."""
        run = self._runs[mode, num_ctas, overlap] = launcher(
            self._functions[mode], num_ctas, GROUP * ROWS, 0, overlap=overlap
        )
        return run
