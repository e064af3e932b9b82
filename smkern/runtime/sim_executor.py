"""An executor with no model and no tensors: tokens by a formula, hazards found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from smkern.errors import ArgumentError
from smkern.latency import Chunk, Size
from smkern.models.config import ModelConfig
from smkern.models.request import Request
from smkern.runtime.device import Work
from smkern.runtime.executor import Draw, MemoryReport, Piece, PrefillRun
from smkern.runtime.place import Lane, Place
from smkern.runtime.sim_device import SimDevice
from smkern.runtime.sim_event import SimEvent
from smkern.runtime.sim_pool import HazardError, SimPool
from smkern.runtime.sim_rates import ConstantRates
from smkern.runtime.sim_tokens import TokenSource

LAYER_LAUNCHES = 12
"""Kernels of a layer of prompts."""
AFTER_END = -1
"""What a row draws behind its end: no token, so that one which is delivered shows."""


@dataclass(slots=True, eq=False)
class _Row:
    """What the device knows of a request.

    Attributes:
        key: Of its tokens.
        computed: Tokens whose keys and values are written, or are by what is launched.
        drawn: Tokens that it has, the prompt's included.
        is_finished: Whether it ended on the device.
        guest: The rows where its prefill drew its token: a slot's, until it is seated.
        is_overwritten: Whether others took these rows before.
    """

    key: int
    computed: int
    drawn: int = 0
    is_finished: bool = False
    guest: int | None = None
    is_overwritten: bool = False


@dataclass(slots=True, eq=False)
class _Launch:
    """What a launch drew, and its event once it is launched."""

    event: SimEvent | None = None
    tokens: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _State:
    """A batch's own: layers launched so far, and its rows."""

    layers: int = 0
    rows: list[_Row] = field(default_factory=list)


class SimExecutor:
    """Runs no model: its launches take time on a `SimDevice`, and tokens are a pure function.

    A request's tokens depend on its seed and prompt alone, so every schedule must deliver the
    same: `completion` says which. What a GPU would turn into wrong tokens without a word raises
    `HazardError`, and is kept in `hazards`: a decode step before its prefill is over, missing
    pages, pages that are shared or come back too early, a graph on the wrong partition, buffers
    used twice.

    Args:
        config: The model; only its sizes are used.
        device: Clock, lanes, partitions, and the predictor that prices the launches. None: 132 SMs
            with seven rungs at `ConstantRates`.
        num_pages, page_size: The pool.
        reuse: Whether prefixes are found again.
        max_running: Rows that decode at a time.
        max_prefill: Requests of a prefill batch or of a mixed step's chunks.
        max_tokens: New tokens of one of these.
        max_context: Tokens of a request. None: what the model and the pool hold.
        end_probability: That a drawn token is one of the model's end tokens.

    Attributes:
        device, config, pool, max_running, max_prefill, max_tokens, max_context: See `Executor`.

    Raises:
        ArgumentError: limits below 1.

    Example:
        >>> from smkern.models import preset
        >>> executor = SimExecutor(preset("qwen3-8b"), num_pages=64)
        >>> executor.pool.usage.free, executor.hazards
        (64, [])
    """

    def __init__(
        self,
        config: ModelConfig,
        device: SimDevice | None = None,
        *,
        num_pages: int,
        page_size: int = 64,
        reuse: bool = True,
        max_running: int = 128,
        max_prefill: int = 16,
        max_tokens: int = 8192,
        max_context: int | None = None,
        end_probability: float = 0.0,
    ) -> None:
        held = min(config.max_position, num_pages * page_size)
        self.max_context = held if max_context is None else max_context
        self.max_running = max_running
        self.max_prefill = max_prefill
        self.max_tokens = max_tokens
        for name in ("max_running", "max_prefill", "max_tokens", "max_context"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name}={getattr(self, name)}: give at least 1")
        if not 0 <= end_probability <= 1:
            raise ArgumentError(f"end_probability={end_probability}: give a number of 0 to 1")
        self.config = config
        if device is None:
            device = SimDevice(132, range(16, 113, 16), ConstantRates())
        self.device = device
        self._pool = SimPool(num_pages, page_size, device, reuse=reuse)
        self._source = TokenSource(config, end_probability)
        # A page is asked for with its first token, and complete with its last.
        self._edges = (0, page_size - 1)
        self._rows: dict[Request, _Row] = {}
        self._slots: dict[int, PrefillRun] = {}

    @property
    def pool(self) -> SimPool:
        """The books of pages."""
        return self._pool

    @property
    def hazards(self) -> list[str]:
        """What went wrong that a GPU would not have told; empty after a correct run."""
        return self._pool.hazards

    def completion(self, request: Request) -> list[int]:
        """The tokens that a request draws, whatever the schedule."""
        return self._source.completion(request)

    def begin(self, pieces: Sequence[Piece], slot: int) -> PrefillRun:
        """Prepare a batch of prompts.

        Raises:
            HazardError: the slot's buffers hold another batch, or this one is too large.
        """
        self._check_batch(pieces)
        old = self._slots.get(slot)
        if slot not in (0, 1) or (old is not None and self._is_running(old)):
            raise self._pool.hazard(
                f"slot {slot} for {[piece.request for piece in pieces]}: there are 0 and 1, "
                f"{sorted(self._slots)} hold batches"
            )
        run = self._slots[slot] = PrefillRun(tuple(pieces), slot, _State())
        for piece in pieces:
            run.state.rows.append(self._row(piece.request, piece.start))
        return run

    def prefill(self, run: PrefillRun, first: int, count: int) -> Work:
        """Layers of a batch; see `Executor`.

        Raises:
            HazardError: when it is launched: layers out of order, a wrong lane, pages that are
                missing or not written yet.
        """
        is_last = first + count >= self.config.num_layers
        drawing = tuple(piece.request for piece in run.pieces if piece.draws)
        launch = _Launch()
        if is_last:
            run.draw = self._draw(drawing, launch)

        def start(place: Place) -> None:
            event = launch.event = self._event("prefill", place, ("prefill", "whole"))
            if first != run.state.layers or self._slots.get(run.slot) is not run:
                raise self._pool.hazard(
                    f"layers {first}..{first + count} of slot {run.slot}, of which "
                    f"{run.state.layers} are launched"
                )
            if first == 0:
                self._overwrite(run.slot)
            for piece in run.pieces:
                if piece.request in self._rows:  # else it has left
                    self._chunk(piece, event, first == 0)
            run.state.layers += count
            if is_last:
                del self._slots[run.slot]
                launch.tokens = [self._end_of_prompt(p, run.slot) for p in run.pieces if p.draws]

        size = self._size(run.pieces, (), 0, count, bool(drawing) and is_last)
        about = {"first": first, "requests": [piece.request.index for piece in run.pieces]}
        return Work("prefill", start, size, count * LAYER_LAUNCHES, about)

    def decode(self, requests: Sequence[Request], steps: int) -> list[tuple[Work, Draw]]:
        """Decode steps; see `Executor`.

        Raises:
            HazardError: too many requests; when it is launched: see the class.
        """
        self._check_rows(requests)
        rows = tuple(requests)
        works = []
        for ahead in range(steps):
            launch = _Launch()
            start = self._decode_step(rows, launch)
            size = self._size((), rows, ahead, self.config.num_layers, False)
            about = {"ahead": ahead, "batch": len(rows)}
            works.append((Work("decode", start, size, 1, about), self._draw(rows, launch)))
        return works

    def mixed(self, pieces: Sequence[Piece], requests: Sequence[Request]) -> tuple[Work, Draw]:
        """One forward of chunks and decode rows; see `Executor`.

        Raises:
            HazardError: too much for the buffers; when it is launched: see the class.
        """
        self._check_batch(pieces)
        self._check_rows(requests)
        rows, num_layers = tuple(requests), self.config.num_layers
        drawing = tuple(piece.request for piece in pieces if piece.draws)
        launch = _Launch()

        def start(place: Place) -> None:
            event = launch.event = self._event("decode", place, ("whole",))
            if 0 in self._slots and self._is_running(self._slots[0]):
                raise self._pool.hazard("a mixed step while slot 0, whose rows it uses, is busy")
            drawn = [self._step(request, event) for request in rows]
            self._overwrite(0)
            for piece in pieces:
                self._row(piece.request, piece.start)
                self._chunk(piece, event, True)
            launch.tokens = [self._end_of_prompt(p, 0) for p in pieces if p.draws] + drawn

        size = self._size(pieces, rows, 0, num_layers, bool(drawing))
        about = {"requests": [piece.request.index for piece in pieces], "batch": len(rows)}
        work = Work("mixed", start, size, num_layers * LAYER_LAUNCHES, about)
        return work, self._draw((*drawing, *rows), launch)

    def forget(self, request: Request) -> None:
        """Drop what is kept of a request."""
        self._rows.pop(request, None)

    def memory_report(self) -> MemoryReport:
        """What the pages would take."""
        pool = self._pool
        return MemoryReport(
            kv_bytes=pool.num_pages * pool.page_size * self.config.kv_bytes_per_token
        )

    def close(self) -> None:
        """Nothing is held."""

    def _decode_step(self, rows: tuple[Request, ...], launch: _Launch) -> Callable[[Place], None]:
        def start(place: Place) -> None:
            event = launch.event = self._event("decode", place, ("decode", "whole"))
            launch.tokens = [self._step(request, event) for request in rows]

        return start

    def _step(self, request: Request, event: SimEvent) -> int:
        """A token of a decoding request."""
        row = self._rows.get(request)
        if row is None:  # it comes again, with the tokens that the host has
            row = self._row(request, len(request.ids) - 1)
            row.drawn = len(request.ids)
        if row.drawn != row.computed + 1:
            raise self._pool.hazard(
                f"a decode step of {request!r}, of which {row.computed} tokens are computed and "
                f"{row.drawn} drawn: its prompt is not through"
            )
        if row.guest is not None:
            if row.is_overwritten and len(request.ids) < row.drawn:
                raise self._pool.hazard(
                    f"{request!r} takes its seat after slot {row.guest}, where its token lay, was "
                    "used again, and before the host read it"
                )
            row.guest = None
        self._pool.use(request, event)
        if row.is_finished:
            return AFTER_END
        if row.computed % self._pool.page_size in self._edges:
            self._pool.write(request, row.computed, row.drawn, event)
        row.computed = row.drawn
        return self._advance(request, row)

    def _chunk(self, piece: Piece, event: SimEvent, is_first: bool) -> None:
        """Keys and values of a prompt's chunk."""
        row, stop = self._rows[piece.request], piece.start + piece.count
        if is_first:
            if row.computed != piece.start:
                raise self._pool.hazard(
                    f"a chunk of {piece.request!r} from {piece.start} on, of which "
                    f"{row.computed} tokens are computed"
                )
            self._pool.read(piece.request, piece.start, event)
        self._pool.use(piece.request, event)
        self._pool.write(piece.request, piece.start, stop, event)
        row.computed = stop

    def _end_of_prompt(self, piece: Piece, slot: int) -> int:
        """The token behind a prompt's last chunk."""
        row = self._rows.get(piece.request)
        if row is None:  # it has left
            return AFTER_END
        row.guest, row.is_overwritten = slot, False
        row.drawn = piece.start + piece.count
        return self._advance(piece.request, row)

    def _advance(self, request: Request, row: _Row) -> int:
        token = self._source.token(row.key, row.drawn)
        row.drawn += 1
        row.is_finished = (
            token in request.stop_token_ids
            or row.drawn - request.prompt_len >= request.max_new_tokens
        )
        return token

    def _row(self, request: Request, computed: int) -> _Row:
        """What is known of a request, with so many tokens computed where nothing was."""
        row = self._rows.get(request)
        if row is None:
            key = self._source.key(request.seed, request.ids[: request.prompt_len])
            row = self._rows[request] = _Row(key, computed)
        return row

    def _overwrite(self, slot: int) -> None:
        """A slot's rows are used by others from now on."""
        for row in self._rows.values():
            if row.guest == slot:
                row.is_overwritten = True

    def _is_running(self, run: PrefillRun) -> bool:
        """Whether a batch's layers are still to come, and any of its requests is there."""
        rows = zip(run.pieces, run.state.rows, strict=True)
        return any(self._rows.get(piece.request) is row for piece, row in rows)

    def _event(self, lane: Lane, place: Place, sides: tuple[str, ...]) -> SimEvent:
        """The event of the launch that is being made."""
        event = self.device.launching
        assert event is not None, "work of a simulated executor runs on its device alone"
        if event.lane != lane or place.side not in sides:
            raise self._pool.hazard(
                f"launch {event.number} on the {event.lane} lane at {place}: it belongs to the "
                f"{lane} lane, on one of {sides}"
            )
        return event

    def _draw(self, requests: tuple[Request, ...], launch: _Launch) -> Draw:
        def read() -> list[int]:
            if launch.event is None or launch.event.ended_us is None:
                raise self._pool.hazard(f"tokens of {launch.event} are read, which is not over")
            return launch.tokens

        return Draw(requests, read)

    def _size(
        self,
        pieces: Sequence[Piece],
        rows: Sequence[Request],
        ahead: int,
        layers: int,
        head: bool,
    ) -> Size:
        chunks = tuple(Chunk(piece.count, piece.start) for piece in pieces)
        kv = 0
        for request in rows:
            row = self._rows.get(request)
            kv += len(request.ids) if row is None else row.computed + 1
        return Size(chunks, layers, self.config.num_layers, head, len(rows), kv + ahead * len(rows))

    def _check_batch(self, pieces: Sequence[Piece]) -> None:
        tokens = sum(piece.count for piece in pieces)
        if not 0 < len(pieces) <= self.max_prefill or tokens > self.max_tokens:
            raise self._pool.hazard(
                f"{len(pieces)} prompts of {tokens} new tokens: 1 to {self.max_prefill} of "
                f"{self.max_tokens} in all"
            )
        for piece in pieces:
            end = piece.start + piece.count
            if piece.count < 1 or piece.draws != (end == len(piece.request.ids)):
                raise self._pool.hazard(f"{piece}, of {len(piece.request.ids)} tokens")

    def _check_rows(self, requests: Sequence[Request]) -> None:
        if len(requests) > self.max_running or len(set(requests)) < len(requests):
            raise self._pool.hazard(
                f"{len(requests)} requests, {len(set(requests))} different: {self.max_running} "
                "decode at a time, each once"
            )


__all__ = ["SimExecutor", "HazardError"]
