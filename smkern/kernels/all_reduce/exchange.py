"""Launches of kernels that exchange rows between the GPUs of a host: `csrc/all_reduce/`."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from smkern.kernels.cuda_source import compile_cuda
from smkern.kernels.driver import OVERLAP_FROM, Run, check, launcher, load_function
from smkern.kernels.ledger import ledger

_PARAMS = struct.Struct("14Q 3i f I 4x")
_DTYPES = {"bf16": 0, "fp16": 1}
MAX_RANKS = 8
MAX_CTAS = 256
"""kMaxCtas of the source."""
THREADS = 512
"""Of a CTA: kThreads, and kGroup times kGroups, of the sources."""
VECTOR_BYTES = 16
SLOTS, COPY_SLOTS = 2, 4
"""Calls whose rows a rank has room for: of kernels that send, and of copies."""


def header_bytes(ranks: int) -> int:
    """Bytes in front of the slots: flags by sender and CTA, and counters."""
    return 4 * ranks * MAX_CTAS + 256


def memory_bytes(ranks: int, slot_bytes: int, slots: int = SLOTS) -> int:
    """Bytes of a rank's memory for calls in which each other one sends at most so many."""
    return header_bytes(ranks) + slots * (ranks - 1) * slot_bytes


@dataclass(frozen=True, slots=True, order=True)
class ExchangeVariant:
    """One compiled kernel.

    Attributes:
        kernel: Its name, and its file's.
        ranks, dtype, capability: What it is for.
        defines: Of its own.
    """

    kernel: str
    ranks: int
    dtype: str
    capability: int
    defines: tuple[str, ...] = ()

    def compile(self) -> bytes:
        """Device code, compiled or from the disk cache. Needs no GPU."""
        arch = f"sm_{self.capability}" + ("a" if self.capability >= 90 else "")
        shared = (
            f"RANKS={self.ranks}",
            f"DTYPE={_DTYPES[self.dtype]}",
            f"PDL={int(self.capability >= OVERLAP_FROM)}",
        )
        return compile_cuda(f"all_reduce/{self.kernel}.cu", (*shared, *self.defines), arch)


class Exchange:
    """Launches over one memory, which all GPUs reach; its calls come in the same order on all.

    Args:
        rank: This process.
        addresses: Of each rank's memory, as this GPU sees it.
        slot_bytes: Bytes that a rank sends to another in a call, at most.
        limit_s: A wait of so long ends the launch with an error of the device.
    """

    def __init__(
        self, rank: int, addresses: Sequence[int], slot_bytes: int, limit_s: float
    ) -> None:
        self.slot_bytes = slot_bytes
        self._rank = rank
        self._shared = (*addresses, *[0] * (MAX_RANKS - len(addresses)))
        self._limit_ns = int(1e9 * limit_s)
        self._functions: dict[str, ctypes.c_void_p] = {}
        self._runs: dict[tuple[str, int, bool], Run] = {}
        self._lock = threading.Lock()
        self._buffer = ctypes.create_string_buffer(_PARAMS.size)
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._buffer))

    def load(self, name: str, variant: ExchangeVariant) -> None:
        """Load a kernel into the current context, to be launched by this name."""
        self._functions[name] = load_function(variant.compile(), variant.kernel, 0)
        ledger().append(variant)

    def run(
        self, name: str, stream: int, num_ctas: int, rows: int, width: int, *pointers: int,
        eps: float = 0.0, call: int = 0, overlap: bool = False,
    ) -> None:  # fmt: skip
        """Launch a kernel.

        Args:
            name: As it was loaded.
            stream: Raw stream handle.
            num_ctas: CTAs, the same on all ranks.
            rows, width: Rows, and 16-byte vectors of one that a rank has.
            pointers: Device addresses of x, residual, weight and out; 0 where there is none.
            eps: Of the norm.
            call: Its number, where the host counts.
            overlap: Whether it may begin while the launch before it ends.
        """
        key = name, min(num_ctas, MAX_CTAS), overlap
        with self._lock:
            run = self._runs.get(key) or self._made(*key)
            _PARAMS.pack_into(
                self._buffer, 0, *self._shared, *pointers, self.slot_bytes, self._limit_ns,
                self._rank, rows, width, eps, call,
            )  # fmt: skip
            code = run(stream, self._pointers)
        if code:
            check(code, f"launching {key[1]} CTAs of {name!r} over ranks")

    def _made(self, name: str, num_ctas: int, overlap: bool) -> Run:
        """The launch of a grid, made once."""
        function: Any = self._functions[name]
        run = self._runs[name, num_ctas, overlap] = launcher(
            function, num_ctas, THREADS, 0, overlap=overlap
        )
        return run
