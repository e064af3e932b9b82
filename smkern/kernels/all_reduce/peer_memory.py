"""Memory of one GPU that the processes of the others reach: allocated once, told by handles."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

from smkern.errors import DeviceError
from smkern.kernels.all_reduce.exchange import COPY_SLOTS, MAX_CTAS, header_bytes
from smkern.kernels.driver import check, copy_async, libcuda

_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("bytes", ctypes.c_ubyte * 64),)


class PeerMemory:
    """Zeroed memory on this rank's GPU, and where the others' is; the primary context is current.

    Args:
        num_bytes: Of each rank's memory.

    Attributes:
        handle: What the other processes open it by.
        addresses: Of each rank's memory, as this GPU sees it, once they are opened.

    Raises:
        DeviceError: no memory.
    """

    def __init__(self, num_bytes: int) -> None:
        lib, own = libcuda(), ctypes.c_uint64()
        check(lib.cuMemAlloc_v2(ctypes.byref(own), ctypes.c_size_t(num_bytes)), "cuMemAlloc")
        self._own = own
        self.addresses: list[int] = []
        handle = _Handle()
        try:
            zeros = lib.cuMemsetD8_v2(own, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes))
            check(zeros, "cuMemsetD8")
            check(lib.cuCtxSynchronize(), "cuCtxSynchronize")
            check(lib.cuIpcGetMemHandle(ctypes.byref(handle), own), "cuIpcGetMemHandle")
        except DeviceError:
            self.close()
            raise
        self.handle = bytes(handle)

    def open(self, rank: int, handles: Sequence[bytes]) -> None:
        """Map the memory of all ranks.

        Args:
            rank: This process.
            handles: By rank.

        Raises:
            DeviceError: no peer access to one of them.
        """
        for index, given in enumerate(handles):
            at = self._own if index == rank else _opened(index, given)
            self.addresses.append(int(at.value))

    def unmap(self) -> None:
        """Let go of the others'; nothing of it may run here."""
        lib, own = libcuda(), self._own.value
        for address in self.addresses:
            if address != own:
                lib.cuIpcCloseMemHandle(ctypes.c_uint64(address))
        self.addresses = []

    def close(self) -> None:
        """Unmap and free it; nothing of it may run, on any rank. Closing twice is fine."""
        self.unmap()
        if self._own.value:
            libcuda().cuMemFree_v2(self._own)
        self._own = ctypes.c_uint64()


class Copies:
    """Copies into the others' memory by a copy engine, each with its number behind it.

    Args:
        rank: This process.
        addresses: Of each rank's memory, as this GPU sees it.
        slot_bytes: Bytes of a copy at most.
    """

    def __init__(self, rank: int, addresses: Sequence[int], slot_bytes: int) -> None:
        self._rank, self._addresses, self._slot_bytes = rank, addresses, slot_bytes
        self._calls = 0

    def begin(self) -> int:
        """The number of the next copy."""
        self._calls = (self._calls + 1) % (1 << 32)
        return self._calls

    def send(self, call: int, stream: int, x: int, num_bytes: int) -> None:
        """Copy to all others.

        Args:
            call: Its number.
            stream: Raw stream handle.
            x: Device address.
            num_bytes: At most a slot's.
        """
        ranks = len(self._addresses)
        for to, base in enumerate(self._addresses):
            if to == self._rank:
                continue
            slot = call % COPY_SLOTS * (ranks - 1) + self._rank - (self._rank > to)
            at = base + header_bytes(ranks) + slot * self._slot_bytes
            check(copy_async()(at, x, num_bytes, stream), "copying to another GPU")
            flag = base + 4 * self._rank * MAX_CTAS
            check(_write_value()(stream, flag, call, 0), "telling another GPU")


@cache
def _write_value() -> Any:
    """`cuStreamWriteValue32(stream, address, value, flags)`: behind what the stream copied."""
    prototype = ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint
    )
    return prototype(("cuStreamWriteValue32_v2", libcuda()))


def _opened(rank: int, given: bytes) -> ctypes.c_uint64:
    handle, at = _Handle.from_buffer_copy(given), ctypes.c_uint64()
    opened = libcuda().cuIpcOpenMemHandle_v2
    opened.argtypes = (ctypes.c_void_p, _Handle, ctypes.c_uint)
    try:
        check(opened(ctypes.byref(at), handle, _PEER_ACCESS), "cuIpcOpenMemHandle")
    except DeviceError as error:
        raise DeviceError(
            f"the memory of rank {rank} cannot be reached ({error}): GPUs that share a model need "
            "peer access; look at nvidia-smi topo -m"
        ) from None
    return at
