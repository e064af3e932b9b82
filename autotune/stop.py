"""When the tuner ends before it is done: its time is up, or somebody wants it to stop."""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType
from typing import Any


class Stop:
    """A context manager: from its start so many seconds, or until SIGINT or SIGTERM.

    A signal is only noted, so that no measurement and no write is cut; the second one interrupts.

    Args:
        seconds: The time that all may take.
    """

    def __init__(self, seconds: float) -> None:
        self._ends_s = time.monotonic() + seconds
        self._signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            raise KeyboardInterrupt
        self._signal = number

    @property
    def left_s(self) -> float:
        return max(0.0, self._ends_s - time.monotonic())

    @property
    def why(self) -> str | None:
        """Why to stop now; None: go on."""
        if self._signal is not None:
            return f"stopped by {signal.Signals(self._signal).name}"
        return None if self.left_s else "the time is up"
