"""The pages of a simulated executor: what a launch may read and write, and when pages come back."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from smkern.errors import SmkernError
from smkern.kv import Event, PagePool
from smkern.runtime.place import Lane
from smkern.runtime.sim.device import SimDevice
from smkern.runtime.sim.event import SimEvent


class HazardError(SmkernError, RuntimeError):
    """A launch or a release that a GPU would have turned into wrong tokens without a word."""


class SimPool(PagePool):
    """A pool that knows which launches read and write their pages.

    Args:
        num_pages, page_size, reuse: As in `PagePool`.
        device: The device whose launches use the pages.

    Attributes:
        hazards: The messages of all `HazardError`s so far, since a loop may take them for errors
            of a model.
    """

    def __init__(self, num_pages: int, page_size: int, device: SimDevice, *, reuse: bool) -> None:
        super().__init__(num_pages, page_size, reuse=reuse)
        self.hazards: list[str] = []
        self._device = device
        self._users: dict[Hashable, dict[Lane, SimEvent]] = {}
        self._writers: dict[int, SimEvent] = {}

    def hazard(self, message: str) -> HazardError:
        """An error to be raised, which is kept."""
        self.hazards.append(message)
        return HazardError(message)

    def read(self, request: Hashable, num_tokens: int, event: SimEvent) -> None:
        """A launch reads the first tokens of a request, which it did not write itself.

        Raises:
            HazardError: some of them are not there yet, or may not be.
        """
        if num_tokens > self.room(request):
            raise self.hazard(
                f"launch {event.number} reads {num_tokens} tokens of {request!r}, whose pages "
                f"hold {self.room(request)}"
            )
        for page in self.held(request).pages[: self.pages_for(num_tokens)]:
            self._check_order(request, self._writers.get(page), event)

    def use(self, request: Hashable, event: SimEvent) -> None:
        """A launch reads or writes pages of a request.

        Raises:
            HazardError: it holds none, or an earlier launch of it is not over, and not in front
                of this one.
        """
        if request not in self._held:
            raise self.hazard(f"launch {event.number} uses pages of {request!r}, which has none")
        users = self._users.get(request)
        if users is None:
            users = self._users[request] = {}
        for user in users.values():
            self._check_order(request, user, event)
        users[event.lane] = event

    def write(self, request: Hashable, start: int, stop: int, event: SimEvent) -> None:
        """A launch writes tokens start..stop of a request.

        Raises:
            HazardError: it has no pages for them, or may not write these.
        """
        pages, size = self.held(request).pages, self.page_size
        if stop > len(pages) * size:
            raise self.hazard(
                f"launch {event.number} writes {request!r} up to token {stop}, its {len(pages)} "
                f"pages of {size} hold {len(pages) * size}"
            )
        if not self.reuse:
            return
        for page in pages[start // size : self.pages_for(stop)]:
            if page in self.index:
                raise self.hazard(
                    f"launch {event.number} writes page {page} for {request!r}, which others may "
                    "share: its block is full and known"
                )
            self._writers[page] = event

    def release(self, request: Hashable, event: Event | None = None) -> None:
        """As in `PagePool`.

        Raises:
            HazardError: a launch that reads or writes the pages is not over, and no event was
                given; or the event that was given turns out to end before that launch.
        """
        users = [x for x in self._users.get(request, {}).values() if x.is_pending]
        if users and not self._device.has_failed:
            if event is None:
                raise self.hazard(
                    f"{request!r} gives its pages back while {users} use them, with no event"
                )
            event = _Guard(self, request, event, users)
        super().release(request, event)
        self._users.pop(request, None)

    def _check_order(self, request: Hashable, before: SimEvent | None, event: SimEvent) -> None:
        if before is None or before is event or before.lane == event.lane:
            return
        if before.is_pending:
            raise self.hazard(
                f"launch {event.number} on the {event.lane} lane uses pages of {request!r} before "
                f"launch {before.number} on the {before.lane} lane, which writes them, is over"
            )


@dataclass(slots=True, eq=False)
class _Guard:
    """An event of a release, checked against the launches that use the pages."""

    _pool: SimPool
    _request: Hashable
    _event: Event
    _users: list[SimEvent]

    def query(self) -> bool:
        if not self._event.query():
            return False
        for user in self._users:
            if user.is_pending:
                raise self._pool.hazard(
                    f"pages of {self._request!r} come back while {user} uses them: its event ended"
                )
        return True
