"""The protocol between the loop that schedules and what runs a model: on a device or simulated."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from smkern.kv import PagePool
from smkern.latency import Chunk
from smkern.models.config import ModelConfig
from smkern.runtime.device import Device, Work
from smkern.runtime.request import Request


class PrefillChunk(NamedTuple):
    """The next `count` tokens of a prompt from `start` on; all before are in its pages.

    `draws`: all its tokens are computed behind it, so that the next is drawn.
    """

    request: Request
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count, of no use for a chunk
    draws: bool

    @property
    def end(self) -> int:
        """Tokens that are computed behind it."""
        return self.start + self.count

    @property
    def ids(self) -> Sequence[int]:
        """Its tokens."""
        return self.request.ids[self.start : self.end]


def size_chunks(chunks: Sequence[PrefillChunk]) -> tuple[Chunk, ...]:
    """Pieces as a predictor sees them."""
    return tuple([Chunk(chunk.count, chunk.start) for chunk in chunks])


def ids_of_chunks(chunks: Sequence[PrefillChunk]) -> array[int]:
    """The tokens of all pieces, one behind the other."""
    ids = array("q")
    for chunk in chunks:
        ids.extend(chunk.ids)
    return ids


def cut(remaining: int, room: int, least: int) -> int:
    """Tokens of a prompt's next chunk; 0: none now.

    No chunk has `least` tokens or fewer, unless the prompt's rest has.
    """
    if remaining <= room:
        return remaining
    count = min(room, remaining - least - 1) if least else room
    return count if count > least else 0


@dataclass(slots=True, eq=False)
class Draw:
    """Tokens that a launch draws: filled in on the device's side, read when it is over.

    Attributes:
        requests: A request a row.
        read: The tokens by row; to be called once the launch is over.
    """

    requests: tuple[Request, ...]
    read: Callable[[], list[int]]


@dataclass(slots=True, eq=False)
class PrefillRun:
    """A batch of prompts on its way through the layers.

    Attributes:
        chunks: A chunk a request.
        slot: 0: the running batch; 1: the one that preempts it. Each has buffers of its own.
        state: The executor's own.
        draw: What its last launch draws for the chunks that draw; set by `prefill` with the head.
        cost: The chunks as a predictor sees them.
    """

    chunks: tuple[PrefillChunk, ...]
    slot: int
    state: Any = None
    draw: Draw | None = None
    cost: tuple[Chunk, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.cost = size_chunks(self.chunks)


@dataclass(slots=True, eq=False)
class MemoryReport:
    """Device memory of the runtime, bytes.

    Attributes:
        graphs: Number of decode graphs.
        graph_bytes: Memory of the graphs and their pool, without what they share.
        shared_bytes: Memory that all graphs share: attention's plan and workspaces.
        partition_bytes: Memory of the ladder's contexts and streams.
        activation_bytes: Activation buffers.
        state_bytes: Memory of slots, tables and staging.
        kv_bytes: Memory of the pages.
        by_graph: Bytes of each graph.
        refused: Graphs that the device had no memory for, and its words.
    """

    graphs: int = 0
    graph_bytes: int = 0
    shared_bytes: int = 0
    partition_bytes: int = 0
    activation_bytes: int = 0
    state_bytes: int = 0
    kv_bytes: int = 0
    by_graph: dict[str, int] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


class Executor(Protocol):
    """Runs a model's launches; it schedules nothing and gives out no pages.

    Every method prepares work and returns without waiting; what is prepared is launched in the
    order of the calls, or dropped. The pages of all that is written are there before. What has a
    default here is for executors that derive from this.

    Attributes:
        device: What it launches on.
        config: The model.
        pool: Pages of the requests (a `KvPool` where there is memory behind them).
        max_running: Rows that decode at a time.
        max_prefill: Requests of a prefill batch or of a mixed step's chunks.
        max_tokens: New tokens of one of these.
        max_context: Tokens of a request.
    """

    config: ModelConfig
    max_running: int
    max_prefill: int
    max_tokens: int
    max_context: int
    device: Device
    pool: PagePool

    def begin(self, chunks: Sequence[PrefillChunk], slot: int) -> PrefillRun:
        """Prepare a batch of prompts; nothing is launched. A slot holds one batch at a time."""
        ...

    def prefill(self, run: PrefillRun, first: int, count: int) -> Work:
        """Layers first..first+count of a batch; with the first layer what is before it, with the
        last the head and the draws (`run.draw`)."""
        ...

    def decode(self, requests: Sequence[Request], steps: int) -> list[tuple[Work, Draw]]:
        """`steps` decode steps of these requests, a work each, launched back to back.

        `num_tokens` of each counts what launches before these draw. The first step gives the
        requests their rows. One that the launch right before on the decode lane drew for
        (a `mixed`, a `decode`) goes on from where its token is on the device; of any other all
        tokens are in `request.ids`, so its row comes from the host: also what a prefill batch drew
        for, whose rows the next batch may have taken by then. Rows that end on the device (a stop
        token, a length) draw nothing of worth afterwards.
        """
        ...

    def prepare_next(self, requests: Sequence[Request], steps: int) -> None:
        """The next decode steps will be of the same requests as the last, which have their pages:
        they may be prepared while the device computes. By default they are not."""
        return

    def mixed(
        self, chunks: Sequence[PrefillChunk], requests: Sequence[Request]
    ) -> tuple[Work, Draw]:
        """One forward of prompts' chunks and one token of each decoding request, on the whole
        device. The draw has the chunks that draw, then the requests."""
        ...

    def ready_rungs(self, batch: int, longest: int) -> tuple[int | None, ...] | None:
        """Rungs, and None for the whole device, on which a decode step of so many requests of at
        most so many tokens runs as a graph. None, as by default: all."""
        return None

    def forget(self, request: Request) -> None:
        """A request has left, gave its pages back, or goes on behind a launch that raised: what is
        kept of it is dropped. It may come again with another `begin`, or in `decode` with the
        tokens it has."""
        ...

    def idle(self) -> None:
        """Nothing runs or waits: do what was put off until then; may wait. By default nothing."""
        return

    def memory_report(self) -> MemoryReport:
        """Device memory of the runtime."""
        ...

    def close(self) -> None:
        """Destroy graphs; all launches must be over. Closing twice is fine."""
        ...
