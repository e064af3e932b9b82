"""Changes of rows made on a GPU: one copy from pinned memory and one small kernel, no wait."""

from __future__ import annotations

import ctypes
from array import array
from dataclasses import dataclass

import torch
from torch import Tensor

from smkern.device import device_info
from smkern.errors import DeviceError
from smkern.kernels.driver import check, copy_async
from smkern.kernels.slots_launch import RECORD, SlotKernel
from smkern.runtime.model.row_state import RowState
from smkern.runtime.model.row_updates import STAGE_WORDS, Records

STAGES = 32
"""Changes on their way: a send waits for the one so many sends ago, over unless the device is far
behind."""
_WORD = 4


@dataclass(slots=True, eq=False)
class _Stage:
    """Pinned memory and its copy on the device, with the end of the last kernel that read them."""

    host: memoryview
    host_address: int
    device_address: int
    over: torch.cuda.Event


class CudaSender:
    """Makes changes of rows in the order of the current stream, without waiting.

    Launches before a send read the old rows, launches behind it the new ones. Nothing is allocated
    or loaded after this is made.

    Args:
        state: The arrays, on a GPU.
        max_ctas: CTAs of an update.

    Raises:
        DeviceError: the driver refuses.
    """

    def __init__(self, state: RowState, max_ctas: int) -> None:
        self._state = state
        self._index = state.words.get_device()
        self._pinned = torch.empty(STAGES, STAGE_WORDS, dtype=torch.int32, pin_memory=True)
        self._device = torch.empty(STAGES, STAGE_WORDS, dtype=torch.int32, device=state.device)
        self._stages = [_stage(self._pinned[i], self._device[i]) for i in range(STAGES)]
        self._next = 0
        major, minor = device_info(self._index).capability
        with torch.cuda.device(self._index):
            self._kernel = SlotKernel(state.layout, max_ctas, self._index, 10 * major + minor)
        self._addresses = (
            state.words.data_ptr(),
            state.finished.data_ptr(),
            state.page_table.data_ptr(),
        )
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._read: tuple[int, torch.cuda.Event] | None = None
        """The last send that read a prefill row: its stream and its end."""
        # the arrays were filled on the stream that was current then, not on those of the lanes
        torch.cuda.current_stream(self._index).synchronize()

    @property
    def nbytes(self) -> int:
        """Device memory, bytes."""
        return self._device.nbytes

    def send(self, records: Records) -> None:
        """Change the rows behind what the current stream has."""
        stage = self._stages[self._next]
        self._next = (self._next + 1) % STAGES
        try:
            stage.over.synchronize()
        except RuntimeError as error:
            raise DeviceError(
                f"the device failed before rows could be changed: {error}; what runs is lost, "
                "start a new process"
            ) from error
        raw: int = torch._C._cuda_getCurrentRawStream(self._index)
        stream = self._streams.get(raw)
        if stream is None:  # torch makes one in some microseconds
            stream = self._streams[raw] = torch.cuda.current_stream(self._index)
        self._order_prefill_rows(records, stream)
        words = records.words + records.numbers
        stage.host[: len(words)] = array("i", words)
        code = copy_async()(stage.device_address, stage.host_address, _WORD * len(words), raw)
        if code:
            check(code, f"copying {len(words)} words of changed rows to the device")
        self._kernel.launch(
            raw, *self._addresses, stage.device_address, len(records.words) // RECORD
        )
        stage.over.record(stream)
        if records.sources and min(records.sources) < self._state.first_slot:
            self._read = raw, stage.over

    def _order_prefill_rows(self, records: Records, stream: torch.cuda.Stream) -> None:
        """Let a prefill row be overwritten behind the move that reads it on another stream."""
        if self._read is None or self._read[0] == stream.cuda_stream:
            return
        if min(records.targets) < self._state.first_slot:
            stream.wait_event(self._read[1])


def _stage(pinned: Tensor, copied: Tensor) -> _Stage:
    address = pinned.data_ptr()
    host = memoryview((ctypes.c_int32 * STAGE_WORDS).from_address(address)).cast("B").cast("i")
    return _Stage(host, address, copied.data_ptr(), torch.cuda.Event())
