"""Ordered messages from rank 0 to the other ranks of a host, and their answers."""

from __future__ import annotations

import pickle
import shutil
import socket
import struct
import tempfile
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from typing import Any, NoReturn

from smkern.errors import RankError
from smkern.models.tensor_parallel import TensorParallel

BEATS = 4
"""Signs of life that rank 0 gives in the time that the others wait for one."""
BLAME_S = 1.0
"""A rank whose sum failed is not named before so long: another may be found dead, whose fault it
was."""
GRACE_S = 1.0
"""A rank may answer for so long behind an error here, however long ago it was asked."""


def described(error: Exception) -> str:
    """What was raised, as ranks tell each other."""
    return f"{type(error).__name__}: {error}"


class _Peer:
    """Rank 0's end to another rank.

    Attributes:
        rank: Which.
        answered: The last message that it has carried out.
        failed: What it raised, by message.
        is_gone: Whether its process has ended.
    """

    def __init__(self, rank: int, connection: Connection, changed: threading.Condition) -> None:
        self.rank = rank
        self.connection = connection
        self.answered = 0
        self.failed: dict[int, str] = {}
        self.is_gone = False
        self._changed = changed
        threading.Thread(target=self._listen, name=f"rank {rank}", daemon=True).start()

    def _listen(self) -> None:
        while not self.is_gone:
            try:
                number, error = self.connection.recv()
            except Exception:  # noqa: BLE001  a torn message is as good as none
                number, error = 0, None
            with self._changed:
                if not number:
                    self.is_gone = True
                elif error is not None:
                    self.failed[number] = error
                self.answered = max(self.answered, number)
                self._changed.notify_all()


class Links:
    """Rank 0's end of the channel: all other ranks get the same messages in the same order.

    A message is carried out by every rank, which answers with its number; the caller waits for
    answers only where it must. A rank that is gone, that does not answer for `timeout_s` or that
    raised where rank 0 did not ends the run: the others are told, and every call raises.

    Args:
        peers: The connection to each other rank, by rank.
        timeout_s: How long a rank may take to carry a message out.
        on_end: Called in a thread of its own when a rank has ended the run: sums that wait for it
            shall end.
    """

    def __init__(
        self,
        peers: dict[int, Connection],
        timeout_s: float,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._timeout_s = timeout_s
        self._on_end = on_end
        self._number = 0
        self._unanswered: deque[tuple[int, float]] = deque()
        self._overs: list[int] = []
        self._dead: RankError | None = None
        self._is_closed = threading.Event()
        self._peers = [_Peer(rank, link, self._changed) for rank, link in peers.items()]
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def tell(self, kind: str, *payload: Any) -> int:
        """Send a message to all; its number. Waits for nothing.

        Raises:
            RankError: a rank is gone, hangs or has failed.
        """
        self.check()
        self._number += 1
        overs, self._overs = self._overs, []
        self._unanswered.append((self._number, monotonic()))
        self._send((self._number, kind, overs, payload))
        return self._number

    def over(self, number: int) -> None:
        """A launch is over here; the others hear of it with the next message, and wait for theirs
        before they carry that out."""
        self._overs.append(number)

    def check(self) -> None:
        """Raise where the run has ended; takes well under a microsecond.

        Raises:
            RankError: naming the rank.
        """
        if self._dead is not None:
            raise self._dead
        for peer in self._peers:
            if peer.is_gone or peer.failed:
                self._die()
        if self._unanswered and monotonic() - self._unanswered[0][1] > self._timeout_s:
            self._drop_answered()
            if self._unanswered and monotonic() - self._unanswered[0][1] > self._timeout_s:
                self._die()

    def accepted(self, number: int) -> None:
        """Wait until all ranks have carried a message out.

        Raises:
            RankError: one raised, is gone, or does not answer.
        """
        self._await(number)
        self.check()
        self._name_silent(number)

    def failed_here(self, number: int, error: Exception) -> None:
        """What a message asked for raised on this rank: so it must have on all.

        Raises:
            RankError: it did not, or a rank is gone.
        """
        text = described(error)
        before = [peer for peer in self._peers if number in peer.failed]
        # A sum that waited for long waited for somebody else; one that raised at once did not.
        is_own = monotonic() - self._sent(number) < self._timeout_s / 2
        self._await(number)
        if all(peer.failed.get(number) == text for peer in self._peers):
            for peer in self._peers:
                del peer.failed[number]
            return
        if not any(peer.is_gone for peer in self._peers):
            if not is_own:
                self._name_silent(number)
            if before:
                self._name_failed(before[0])
            if is_own:
                self._end(f"rank 0 failed where others did not ({text})")
        self.check()
        self._name_silent(number)

    @property
    def is_dead(self) -> bool:
        """Whether a rank has ended the run."""
        return self._dead is not None

    def close(self) -> None:
        """Let the others go. Closing twice is fine."""
        if self._is_closed.is_set():
            return
        if self._dead is None:
            with suppress(RankError):
                self._await(self.tell("close"))
        self._is_closed.set()
        for peer in self._peers:
            with suppress(OSError):
                peer.connection.close()

    def _await(self, number: int) -> None:
        def is_known() -> bool:
            return all(p.answered >= number or p.is_gone for p in self._peers)

        if not is_known():
            limit = max(self._sent(number) + self._timeout_s - monotonic(), GRACE_S)
            with self._changed:
                self._changed.wait_for(is_known, limit)
        self._drop_answered()

    def _sent(self, number: int) -> float:
        """When a message was sent that not all have answered."""
        return next((at for told, at in self._unanswered if told == number), monotonic())

    def _drop_answered(self) -> None:
        answered = min(peer.answered for peer in self._peers)
        while self._unanswered and self._unanswered[0][0] <= answered:
            self._unanswered.popleft()

    def _die(self) -> NoReturn:
        """End the run on all ranks, naming who is to blame."""
        with self._changed:  # one whose sum failed may have lost another, which is gone soon
            self._changed.wait_for(lambda: any(p.is_gone for p in self._peers), BLAME_S)
        gone = [peer.rank for peer in self._peers if peer.is_gone]
        if gone:
            self._end(f"rank {gone[0]} is gone: its process has ended; see its last words")
        for peer in self._peers:
            if peer.failed:
                self._name_failed(peer)
        self._name_silent(self._number)
        raise AssertionError("a run that has ended for no reason")

    def _name_failed(self, peer: _Peer) -> NoReturn:
        error = next(iter(peer.failed.values()))
        self._end(f"rank {peer.rank} failed where rank 0 did not ({error})")

    def _name_silent(self, number: int) -> None:
        """End the run if a rank has not answered a message that it had time for."""
        least = min(self._peers, key=lambda peer: peer.answered)
        if least.answered < number and not least.is_gone:
            self._end(
                f"rank {least.rank} has not answered for {self._timeout_s:g} s: it hangs, or was "
                "stopped; look at what it does, or raise the time-out"
            )

    def _end(self, text: str) -> NoReturn:
        self._dead = RankError(f"{text}. All ranks end")
        with suppress(Exception):
            self._send((self._number + 1, "end", [], (str(self._dead),)))
        threading.Thread(target=self._on_end, name="end", daemon=True).start()
        raise self._dead

    def _send(self, message: tuple[Any, ...]) -> None:
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        with self._sending:
            for peer in self._peers:
                try:
                    peer.connection.send_bytes(data)
                except OSError:  # its listener finds it gone, or it is late with all that it has
                    continue

    def _beat(self) -> None:
        while not self._is_closed.wait(self._timeout_s / BEATS):
            self._send((0, "beat", [], ()))


class Link:
    """Another rank's end of the channel.

    Args:
        timeout_s: Rank 0 says something within so long.
    """

    def __init__(self, connection: Connection, timeout_s: float) -> None:
        self._connection = connection
        self.timeout_s = timeout_s

    def receive(self) -> tuple[int, str, list[int], tuple[Any, ...]]:
        """The next message: number, kind, launches that are over, and what it says.

        Raises:
            RankError: rank 0 is gone or hangs, or has ended the run.
        """
        while True:
            try:
                if not self._connection.poll(self.timeout_s):
                    raise RankError(
                        f"rank 0 has said nothing for {self.timeout_s:g} s: it hangs, or was "
                        "stopped; look at what it does, or raise the time-out"
                    )
                message: tuple[int, str, list[int], tuple[Any, ...]] = self._connection.recv()
            except (EOFError, OSError):
                raise RankError(
                    "rank 0 is gone: its process has ended; see its last words"
                ) from None
            if message[1] == "end":
                raise RankError(message[3][0])
            if message[1] != "beat":
                return message

    def answer(self, number: int, error: str | None = None) -> None:
        """A message was carried out, or what it raised."""
        with suppress(OSError):  # `receive` finds rank 0 gone
            self._connection.send((number, error))


def open_links(tp: TensorParallel) -> Links | Link:
    """The channel of a run; called on all ranks, and waits for all.

    Raises:
        RankError: a rank does not come.
    """
    if tp.rank:
        path = tp.everyones("")[0]
        link = tp.together("connecting to rank 0", lambda: _connected(path, tp))
        return Link(link, tp.timeout_s)
    folder = Path(tempfile.mkdtemp(prefix="smkern-"))  # ours alone: nobody else can connect
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / "ranks"))
            listener.listen(tp.size)
            tp.everyones(str(folder / "ranks"))
            peers = tp.together("waiting for the others", lambda: _came(listener, tp))
            return Links(peers, tp.timeout_s, on_end=partial(tp.close, abort=True))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _connected(path: str, tp: TensorParallel) -> Connection:
    found = socket.socket(socket.AF_UNIX)
    found.settimeout(tp.timeout_s)
    found.connect(path)
    connection = _connection(found, tp.timeout_s)
    connection.send(tp.rank)
    return connection


def _came(listener: socket.socket, tp: TensorParallel) -> dict[int, Connection]:
    listener.settimeout(tp.timeout_s)
    found: dict[int, Connection] = {}
    for _ in range(tp.size - 1):
        connection = _connection(listener.accept()[0], tp.timeout_s)
        found[connection.recv()] = connection
    return dict(sorted(found.items()))


def _connection(found: socket.socket, timeout_s: float) -> Connection:
    """A socket as a connection; a send to one that was stopped gives up after a while."""
    found.setblocking(True)
    seconds = max(int(timeout_s), 1)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, 0))
    return Connection(found.detach())
