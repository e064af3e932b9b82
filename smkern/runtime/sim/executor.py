"""An executor with no model and no tensors: tokens by a formula, hazards found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from smkern.errors import ArgumentError
from smkern.latency import Chunk, Size
from smkern.models.config import ModelConfig
from smkern.runtime.device import Work
from smkern.runtime.executor import (
    Draw,
    Executor,
    MemoryReport,
    PrefillChunk,
    PrefillRun,
    size_chunks,
)
from smkern.runtime.place import Lane, Place
from smkern.runtime.request import Request
from smkern.runtime.sim.device import SimDevice
from smkern.runtime.sim.event import SimEvent
from smkern.runtime.sim.pool import HazardError, SimPool
from smkern.runtime.sim.rates import ConstantRates
from smkern.runtime.sim.rows import Row, SimRows
from smkern.runtime.sim.tokens import TokenSource

LAYER_LAUNCHES = 12
"""Kernels of a layer of prompts."""


@dataclass(slots=True, eq=False)
class _Launch:
    """What a launch drew, and its event once it is launched."""

    event: SimEvent | None = None
    tokens: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _State:
    """A batch's own: layers launched so far, and its rows."""

    layers: int = 0
    rows: list[Row] = field(default_factory=list)


class SimExecutor(Executor):
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
        end_probability: Probability that a drawn token is one of the model's end tokens.

    Attributes:
        device, config, pool, max_running, max_prefill, max_tokens, max_context: See `Executor`.

    Raises:
        ArgumentError: limits below 1, or a device without a predictor.

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
        if device.predictor is None:
            raise ArgumentError(
                f"predictor=None of the device of {device.num_sms} SMs: nothing says how long a "
                "launch takes; make SimDevice(..., predictor=) with ConstantRates(), or with "
                "smkern.latency.TablePredictor.load()"
            )
        self.device = device
        self.pool = SimPool(num_pages, page_size, device, reuse=reuse)
        self._source = TokenSource(config, end_probability)
        self._rows = SimRows(self.pool, self._source, self.max_context)
        self._slots: dict[int, PrefillRun] = {}

    @property
    def hazards(self) -> list[str]:
        """What went wrong that a GPU would not have told; empty after a correct run."""
        return self.pool.hazards

    def completion(self, request: Request) -> list[int]:
        """The tokens that a request draws, whatever the schedule."""
        return self._source.completion(request)

    def begin(self, chunks: Sequence[PrefillChunk], slot: int) -> PrefillRun:
        """Prepare a batch of prompts.

        Raises:
            HazardError: the slot's buffers hold another batch, or this one is too large.
        """
        self._check_batch(chunks)
        old = self._slots.get(slot)
        if slot not in (0, 1) or (old is not None and self._is_running(old)):
            raise self.pool.hazard(
                f"slot {slot} for {[chunk.request for chunk in chunks]}: there are 0 and 1, "
                f"{sorted(self._slots)} hold batches"
            )
        run = self._slots[slot] = PrefillRun(tuple(chunks), slot, _State())
        for chunk in chunks:
            run.state.rows.append(self._rows.row(chunk.request, chunk.start))
        return run

    def prefill(self, run: PrefillRun, first: int, count: int) -> Work:
        """Layers of a batch; see `Executor`.

        Raises:
            HazardError: when it is launched: layers out of order, a wrong lane, pages that are
                missing or not written yet.
        """
        is_last = first + count >= self.config.num_layers
        drawing = tuple(chunk.request for chunk in run.chunks if chunk.draws)
        launch = _Launch()
        if is_last:
            run.draw = self._draw(drawing, launch)

        def start(place: Place) -> None:
            event = launch.event = self._event("prefill", place, ("prefill", "whole"))
            if first != run.state.layers or self._slots.get(run.slot) is not run:
                raise self.pool.hazard(
                    f"layers {first}..{first + count} of slot {run.slot}, of which "
                    f"{run.state.layers} are launched"
                )
            if first == 0:
                self._rows.overwrite(run.slot)
            for chunk in run.chunks:
                if self._rows.get(chunk.request) is not None:  # else it has left
                    self._rows.chunk(chunk, event, first == 0)
            run.state.layers += count
            if is_last:
                del self._slots[run.slot]
                last = [chunk for chunk in run.chunks if chunk.draws]
                launch.tokens = [self._rows.end_of_prompt(chunk, run.slot) for chunk in last]

        size = self._size(run.cost, (), 0, count, bool(drawing) and is_last)
        about = {"first": first, "requests": [chunk.request.index for chunk in run.chunks]}
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

    def mixed(
        self, chunks: Sequence[PrefillChunk], requests: Sequence[Request]
    ) -> tuple[Work, Draw]:
        """One forward of chunks and decode rows; see `Executor`.

        Raises:
            HazardError: too much for the buffers; when it is launched: see the class.
        """
        self._check_batch(chunks)
        self._check_rows(requests)
        rows, num_layers = tuple(requests), self.config.num_layers
        drawing = tuple(chunk.request for chunk in chunks if chunk.draws)
        launch = _Launch()

        def start(place: Place) -> None:
            event = launch.event = self._event("decode", place, ("whole",))
            if 0 in self._slots and self._is_running(self._slots[0]):
                raise self.pool.hazard("a mixed step while slot 0, whose rows it uses, is busy")
            drawn = [self._rows.step(request, event) for request in rows]
            self._rows.overwrite(0)
            for chunk in chunks:
                self._rows.row(chunk.request, chunk.start)
                self._rows.chunk(chunk, event, True)
            launch.tokens = [self._rows.end_of_prompt(p, 0) for p in chunks if p.draws] + drawn

        size = self._size(size_chunks(chunks), rows, 0, num_layers, bool(drawing))
        about = {"requests": [chunk.request.index for chunk in chunks], "batch": len(rows)}
        work = Work("mixed", start, size, num_layers * LAYER_LAUNCHES, about)
        return work, self._draw((*drawing, *rows), launch)

    def forget(self, request: Request) -> None:
        """Drop what is kept of a request."""
        self._rows.forget(request)

    def memory_report(self) -> MemoryReport:
        """What the pages would take."""
        pool = self.pool
        return MemoryReport(
            kv_bytes=pool.num_pages * pool.page_size * self.config.kv_bytes_per_token
        )

    def close(self) -> None:
        """Nothing is held."""

    def _decode_step(self, rows: tuple[Request, ...], launch: _Launch) -> Callable[[Place], None]:
        def start(place: Place) -> None:
            event = launch.event = self._event("decode", place, ("decode", "whole"))
            launch.tokens = [self._rows.step(request, event) for request in rows]

        return start

    def _is_running(self, run: PrefillRun) -> bool:
        """Whether a batch's layers are still to come, and any of its requests is there."""
        rows = zip(run.chunks, run.state.rows, strict=True)
        return any(self._rows.get(chunk.request) is row for chunk, row in rows)

    def _event(self, lane: Lane, place: Place, sides: tuple[str, ...]) -> SimEvent:
        """The event of the launch that is being made."""
        event = self.device.launching
        assert event is not None, "work of a simulated executor runs on its device alone"
        if event.lane != lane or place.side not in sides:
            raise self.pool.hazard(
                f"launch {event.number} on the {event.lane} lane at {place}: it belongs to the "
                f"{lane} lane, on one of {sides}"
            )
        return event

    def _draw(self, requests: tuple[Request, ...], launch: _Launch) -> Draw:
        def read() -> list[int]:
            if launch.event is None or launch.event.ended_us is None:
                raise self.pool.hazard(f"tokens of {launch.event} are read, which is not over")
            return launch.tokens

        return Draw(requests, read)

    def _size(
        self,
        chunks: tuple[Chunk, ...],
        rows: Sequence[Request],
        ahead: int,
        layers: int,
        head: bool,
    ) -> Size:
        kv = 0
        for request in rows:
            row = self._rows.get(request)
            kv += len(request.ids) if row is None else row.computed + 1
        return Size(chunks, layers, self.config.num_layers, head, len(rows), kv + ahead * len(rows))

    def _check_batch(self, chunks: Sequence[PrefillChunk]) -> None:
        tokens = sum(chunk.count for chunk in chunks)
        if not 0 < len(chunks) <= self.max_prefill or tokens > self.max_tokens:
            raise self.pool.hazard(
                f"{len(chunks)} prompts of {tokens} new tokens: 1 to {self.max_prefill} of "
                f"{self.max_tokens} in all"
            )
        for chunk in chunks:
            end = chunk.end
            if chunk.count < 1 or chunk.draws != (end == len(chunk.request.ids)):
                raise self.pool.hazard(f"{chunk}, of {len(chunk.request.ids)} tokens")

    def _check_rows(self, requests: Sequence[Request]) -> None:
        if len(requests) > self.max_running or len(set(requests)) < len(requests):
            raise self.pool.hazard(
                f"{len(requests)} requests, {len(set(requests))} different: {self.max_running} "
                "decode at a time, each once"
            )


__all__ = ["SimExecutor", "HazardError"]
