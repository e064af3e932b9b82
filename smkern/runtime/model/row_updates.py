"""Changes of rows of requests, collected on the host and made on the device by one launch."""

from __future__ import annotations

import ctypes
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from smkern.device import device_info
from smkern.errors import DeviceError
from smkern.kernels.driver import check, copy_async
from smkern.kernels.slots_launch import FINISHED, RECORD, SET_FINISHED, SET_VALUES, SlotKernel
from smkern.runtime.model.row_state import RowState

STAGE_WORDS = 16_384
"""Words that one launch reads: 64 KiB, or 500 requests that come with 8 pages each."""
STAGES = 32
"""Changes on their way: a send waits for the one so many sends ago, over unless the device is far
behind."""
MAX_CTAS = 32
"""CTAs of a launch, each on an SM for a few microseconds."""
_WORD = 4


@dataclass(slots=True, eq=False)
class Records:
    """What one launch changes: no row is read that another of its records writes.

    Attributes:
        words: The records, `RECORD` words each, one behind another.
        numbers: The values and page ids that they name.
        sources, targets: Rows read and written.
    """

    words: list[int] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    sources: set[int] = field(default_factory=set)
    targets: set[int] = field(default_factory=set)


class RowChange(NamedTuple):
    """One row's change.

    `row`: The row. `source`: Row whose values, finished and first `taken` page entries it takes,
    and which is finished then; -1: none. `flags`: `SET_VALUES` and the like. `values`: Packed;
    None: they stay. `first`: Entry of the first of `pages`. `pages`: Page ids.
    """

    row: int
    source: int = -1
    taken: int = 0
    flags: int = 0
    values: tuple[int, ...] | None = None
    first: int = 0
    pages: Sequence[int] = ()


class Sender(Protocol):
    """Makes the changes, in the order of the current stream."""

    @property
    def nbytes(self) -> int:
        """Device memory of its own, bytes."""
        ...

    def send(self, records: Records) -> None:
        """Change the rows behind what the current stream has."""
        ...


class HostSender:
    """Makes changes of rows on a CPU, in plain torch."""

    __slots__ = ("_begins", "_state", "_steps")

    def __init__(self, state: RowState) -> None:
        begins, steps = zip(*state.layout.steps, strict=True)
        self._state = state
        self._begins, self._steps = torch.tensor(begins), torch.tensor(steps)

    @property
    def nbytes(self) -> int:
        """Nothing."""
        return 0

    def send(self, records: Records) -> None:
        """Change the rows; all is over when this returns."""
        for at in range(0, len(records.words), RECORD):
            self._change(records.words[at : at + RECORD], records.numbers)

    def _change(self, record: Sequence[int], numbers: list[int]) -> None:
        target, source, flags, taken, first, count, pages_at, values_at = record
        state = self._state
        where = self._begins + target * self._steps
        if source >= 0:
            state.words[where] = state.words[self._begins + source * self._steps]
            state.finished[target] = state.finished[source]
            state.page_table[target, :taken] = state.page_table[source, :taken]
            state.finished[source] = True
        if flags & SET_VALUES:
            state.words[where] = torch.tensor(
                numbers[values_at : values_at + state.layout.values], dtype=torch.int32
            )
        if flags & SET_FINISHED:
            state.finished[target] = bool(flags & FINISHED)
        if count:
            entries = torch.tensor(numbers[pages_at : pages_at + count], dtype=torch.int32)
            state.page_table[target, first : first + count] = entries


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

    Raises:
        DeviceError: the driver refuses.
    """

    def __init__(self, state: RowState) -> None:
        self._state = state
        self._index = state.words.get_device()
        self._pinned = torch.empty(STAGES, STAGE_WORDS, dtype=torch.int32, pin_memory=True)
        self._device = torch.empty(STAGES, STAGE_WORDS, dtype=torch.int32, device=state.device)
        self._stages = [_stage(self._pinned[i], self._device[i]) for i in range(STAGES)]
        self._next = 0
        sm = device_info(self._index).sm
        with torch.cuda.device(self._index):
            self._kernel = SlotKernel(state.layout, MAX_CTAS, self._index, sm)
        self._addresses = (
            state.words.data_ptr(),
            state.finished.data_ptr(),
            state.page_table.data_ptr(),
        )
        here = torch.cuda.current_stream(self._index)
        self._kernel.launch(here.cuda_stream, *self._addresses, self._stages[0].device_address, 0)
        self._streams: dict[int, torch.cuda.Stream] = {}
        self._read: tuple[int, torch.cuda.Event] | None = None
        """The last send that read a prefill row: its stream and its end."""
        # the arrays were filled on the stream that was current then, not on those of the lanes
        here.synchronize()

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


class RowUpdate:
    """Changes of rows, to be sent once on the stream of the launch that needs them.

    Attributes:
        sent: Whether they were.
    """

    __slots__ = ("_before", "_made", "_most", "_sender", "launches", "ordered", "sent")

    def __init__(self, state: RowState, sender: Sender, before: deque[RowUpdate] | None) -> None:
        self.launches: list[Records] = []
        self.sent = False
        self.ordered = False
        """Whether updates of slots that were taken earlier must be sent before."""
        self._before = before
        self._made = 0
        """Launches that the sender has taken."""
        self._sender = sender
        self._most = STAGE_WORDS - RECORD - state.layout.values

    @property
    def has_any(self) -> bool:
        """Whether anything is to be sent, of this or of updates that go before it."""
        return not self.sent and (self.ordered or bool(self.launches))

    def put(self, changes: Iterable[RowChange]) -> None:
        """Collect changes, one behind another."""
        for change in changes:
            row, source, taken, flags, values, first, pages = change
            records = self.launches[-1] if self.launches else None
            if records is None or (
                len(records.words) + len(records.numbers) > self._most
                or row in records.targets
                or source in records.targets
                or row in records.sources
            ):
                records = Records()
                self.launches.append(records)
            numbers = records.numbers
            values_at = len(numbers)
            if values is not None:
                flags |= SET_VALUES
                numbers += values
            room = STAGE_WORDS - len(records.words) - RECORD - len(numbers)
            now = pages if len(pages) <= room else pages[:room]
            records.words += (row, source, flags, taken, first, len(now), len(numbers), values_at)
            numbers += now
            records.targets.add(row)
            if source >= 0:
                records.sources.add(source)
            if len(now) < len(pages):
                self.launches.append(Records())
                self.put([RowChange(row, first=first + len(now), pages=pages[len(now) :])])

    def send(self) -> None:
        """Make the changes, in the order of the current stream; a second time does nothing.

        Where the sender raises, what it has not taken is sent another time: by this, or with the
        next update in order.
        """
        if self.ordered and self._before is not None:
            while self._before and not self.sent:
                self._before[0]._send()
                self._before.popleft()
        self._send()

    def _send(self) -> None:
        while self._made < len(self.launches):
            self._sender.send(self.launches[self._made])
            self._made += 1
        self.sent = True
