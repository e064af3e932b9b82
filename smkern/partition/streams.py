"""How many SMs a stream has: smkern's own by a look-up, others by asking the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

from smkern.device import Budget, device_info, torch_device
from smkern.errors import DeviceError, PartitionError
from smkern.limits import as_int

_DEFAULT_STREAMS = (0, 1, 2)  # null, legacy, per-thread: none can have a green context


class StreamBudgets:
    """The budgets of one device's streams.

    Args:
        whole: budget of a stream without a green context: all SMs.
        green_sms: raw stream to the SM count of its green context, or None if it has none.
    """

    def __init__(self, whole: Budget, green_sms: Callable[[int], int | None]) -> None:
        self.whole = whole
        self._green_sms = green_sms
        self._own: dict[int, Budget] = dict.fromkeys(_DEFAULT_STREAMS, whole)
        self._closed: set[int] = set()
        self._listeners: list[Callable[[int], None]] = []

    def add(self, stream: int, budget: Budget) -> None:
        """Register a partition's stream until `remove`."""
        self._closed.discard(stream)
        self._own[stream] = budget

    def forget(self, stream: int) -> None:
        """Notify the listeners to release what they keep for a stream (workspaces)."""
        for listener in self._listeners:
            listener(stream)

    def remove(self, stream: int) -> None:
        """Unregister a stream that is about to be detached; its handle is not reused."""
        self._own.pop(stream, None)
        self._closed.add(stream)

    def reusable(self, stream: int) -> None:
        """A closed stream was destroyed: its handle may be reused."""
        self._closed.discard(stream)

    def at_close(self, listener: Callable[[int], None]) -> None:
        """Call `listener(raw_stream)` before a partition's stream is closed."""
        self._listeners.append(listener)

    def budget(self, stream: int) -> Budget:
        """The budget of work on a stream.

        The driver is asked about streams of others each time (about 1 us), as handles are reused.

        Raises:
            PartitionError: the stream belonged to a partition that is closed.
        """
        found = self._own.get(stream)
        if found is not None:
            return found
        if stream in self._closed:
            raise PartitionError(
                f"stream {stream:#x} belonged to a partition that is closed: leave its `with` "
                "block before close(), or make a new ladder"
            )
        count = self._green_sms(stream)
        if count is None or count >= self.whole.num_sms:
            return self.whole
        return Budget(count, "mask", clusters=False)


@cache
def stream_budgets(device: int) -> StreamBudgets:
    """The budgets of a device's streams, made once."""
    info = device_info(device)
    return StreamBudgets(Budget(info.num_sms, "mask", clusters=True), _green_sms(device))


def _green_sms(device: int) -> Callable[[int], int | None]:
    """Ask through ctypes first (0.3 us), as most streams have no green context."""
    try:
        get = ctypes.CDLL("libcuda.so.1").cuStreamGetGreenCtx
    except (OSError, AttributeError):
        return lambda stream: None  # the driver does not know green contexts
    from smkern.partition.driver import cuda_driver

    def ask(stream: int) -> int | None:
        handle = ctypes.c_void_p()
        code = get(ctypes.c_void_p(stream), ctypes.byref(handle))
        if code:
            raise DeviceError(
                f"cuStreamGetGreenCtx of stream {stream:#x} failed with {code}: it is not a stream "
                "of this process, or was destroyed"
            )
        return cuda_driver(device).stream_num_sms(stream) if handle.value else None

    return ask


def budget_of_stream(stream: int, device: int) -> Budget:
    """The budget of work on a raw stream, whether torch, another library or the driver made it.

    Args:
        stream: CUstream handle as an int.
        device: index of its GPU.
    """
    return stream_budgets(device).budget(stream)


def current_budget(device: int | None = None) -> Budget:
    """The budget of work on torch's current stream."""
    import torch

    index = torch_device("cuda").index if device is None else device
    return stream_budgets(index).budget(torch.cuda.current_stream(index).cuda_stream)


def current_num_sms(device: int | None = None) -> int:
    """SMs of the current stream's partition; the whole device's without one.

    Args:
        device: GPU index; torch's current GPU by default.

    Returns:
        The realised count, also for streams that smkern did not make.

    Raises:
        DeviceError: no GPU.
        PartitionError: the stream's partition is closed.

    Example:
        >>> with smkern.ladder([32]).split(decode=32).decode:   # doctest: +SKIP
        ...     smkern.current_num_sms()
        32
    """
    return current_budget(None if device is None else as_int("device", device, 0)).num_sms
