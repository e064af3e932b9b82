"""How many SMs a stream has: ours by a look-up, others' by asking the driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

from smkern.device import Budget, device_info, torch_device
from smkern.errors import DeviceError, PartitionError

_DEFAULT_STREAMS = (0, 1, 2)  # null, legacy, per-thread: none can have a green context


class StreamBudgets:
    """The budgets of one device's streams.

    Args:
        whole: the budget of a stream without a green context: all SMs, so nothing is outside.
        green_sms: raw stream to the SM count of its green context, or None where it has none.
    """

    def __init__(self, whole: Budget, green_sms: Callable[[int], int | None]) -> None:
        self.whole = whole
        self._green_sms = green_sms
        self._own: dict[int, Budget] = dict.fromkeys(_DEFAULT_STREAMS, whole)
        self._closed: set[int] = set()
        self._listeners: list[Callable[[int], None]] = []

    def add(self, stream: int, budget: Budget) -> None:
        """Remember a stream of ours until `remove`."""
        self._closed.discard(stream)
        self._own[stream] = budget

    def forget(self, stream: int) -> None:
        """Have everyone who keeps things for a stream (workspaces) let go of them."""
        for listener in self._listeners:
            listener(stream)

    def remove(self, stream: int) -> None:
        """A stream of ours is about to be detached; its handle is not used again."""
        self._own.pop(stream, None)
        self._closed.add(stream)

    def reusable(self, stream: int) -> None:
        """A closed stream was destroyed: another may come by its handle."""
        self._closed.discard(stream)

    def at_close(self, listener: Callable[[int], None]) -> None:
        """Call `listener(raw_stream)` before one of our streams is closed."""
        self._listeners.append(listener)

    def budget(self, stream: int) -> Budget:
        """What work on a stream may use.

        Others' streams are asked for each time (about 1 us): their handles may be reused.

        Raises:
            PartitionError: the stream was a partition's that is closed.
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
    """By ctypes first (0.3 us), because most streams have no green context."""
    try:
        get = ctypes.CDLL("libcuda.so.1").cuStreamGetGreenCtx
    except (OSError, AttributeError):
        return lambda stream: None  # a driver without green contexts makes none
    from smkern.partition.driver import cuda_driver

    def ask(stream: int) -> int | None:
        handle = ctypes.c_void_p()
        code = get(ctypes.c_void_p(stream), ctypes.byref(handle))
        if code:
            raise DeviceError(
                f"cuStreamGetGreenCtx of stream {stream:#x} failed with {code}: it is no stream "
                "of this process, or was destroyed"
            )
        return cuda_driver(device).stream_num_sms(stream) if handle.value else None

    return ask


def budget_of_stream(stream: int, device: int) -> Budget:
    """What work on a raw stream may use; right for streams of torch, other libraries, the driver.

    Args:
        stream: the CUstream as an int.
        device: index of its GPU.
    """
    return stream_budgets(device).budget(stream)


def current_budget(device: int | None = None) -> Budget:
    """What work on torch's current stream may use."""
    import torch

    index = torch_device("cuda").index if device is None else device
    return stream_budgets(index).budget(torch.cuda.current_stream(index).cuda_stream)


def current_num_sms(device: int | None = None) -> int:
    """SMs of the partition that the current stream belongs to; the device's where it has none.

    Args:
        device: index of the GPU; torch's current one by default.

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
    return current_budget(device).num_sms
