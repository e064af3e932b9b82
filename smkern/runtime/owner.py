"""Who may drive a runtime: one thread, one call at a time, until something stopped one midway."""

from __future__ import annotations

from threading import Thread, current_thread

from smkern.errors import ArgumentError, EngineDeadError


class Owner:
    """The thread that drives a runtime: the first that calls it, until that has ended.

    Attributes:
        dead: Why the runtime serves no more; None: it does.
        is_inside: Whether a call is under way; whoever entered sets it back, by itself: a function
            that does so might be interrupted before it has.
    """

    __slots__ = ("_thread", "dead", "is_inside")

    def __init__(self) -> None:
        self.dead: EngineDeadError | None = None
        self.is_inside = False
        self._thread: Thread | None = None

    def enter(self, what: str, *, is_last: bool = False) -> None:
        """A call begins.

        Args:
            what: Its name.
            is_last: Whether it is made of a dead runtime, too.

        Raises:
            ArgumentError: it comes from another thread, or from inside another call.
            EngineDeadError: the runtime is dead.
        """
        # Not its number, which a later thread may have again: 70 ns instead of 40.
        if current_thread() is not self._thread:
            self._take(what)
        if self.is_inside:
            raise ArgumentError(
                f"{what}() from inside a call of this Multiplexer, as by a policy or a tokenizer "
                "of it: call it behind that"
            )
        if self.dead is not None and not is_last:
            raise EngineDeadError(f"{what}(): {self.dead}") from self.dead.__cause__
        self.is_inside = True

    def _take(self, what: str) -> None:
        """Another thread drives it, if nobody did or the one that did has ended."""
        owner, thread = self._thread, current_thread()
        if owner is not None and owner.is_alive():
            raise ArgumentError(
                f"{what}() on thread {thread.name!r}: this Multiplexer is driven by thread "
                f"{owner.name!r}, and by one alone; call it there, and hand requests over by a "
                "queue.Queue"
            )
        self._thread = thread
