"""An executor with no model and no tensors: tokens by a formula, hazards found."""

from __future__ import annotations

from collections.abc import Sequence

from smkern.errors import ArgumentError
from smkern.kv import PagePool
from smkern.latency import Size
from smkern.limits import as_flag, as_float, as_int, shown
from smkern.models.config import ModelConfig
from smkern.runtime.device import Event, Work
from smkern.runtime.executor import (
    Draw,
    Executor,
    MemoryReport,
    PrefillChunk,
    PrefillRun,
    size_chunks,
)
from smkern.runtime.model.sizes import MAX_MIXED_ROWS
from smkern.runtime.request import Request
from smkern.runtime.sim.device import SimDevice
from smkern.runtime.sim.launches import CheckedLaunches, ConstantLaunches
from smkern.runtime.sim.pool import SimPool
from smkern.runtime.sim.rates import ConstantRates
from smkern.runtime.sim.tokens import TokenSource

LAYER_LAUNCHES = 12
"""Kernels of a layer of prompts."""
MARKS = 8
"""Parts of a mixed forward whose ends are told."""


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
        graph_rows: Rows of the largest mixed forward that is one launch; larger ones go by layers.
        checks: Whether hazards are found and tokens are a request's own. False, for replays: every
            token is the same one, no end token, so that requests end by their length; launches take
            the same times.

    Attributes:
        device, config, pool, max_running, max_prefill, max_tokens, max_context: See `Executor`.
        checks: As given.
        hazards: What went wrong that a GPU would not have told; empty after a correct run.

    Raises:
        ArgumentError: limits below 1, `end_probability` without `checks`, or a device without a
            predictor.

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
        graph_rows: int = MAX_MIXED_ROWS,
        checks: bool = True,
    ) -> None:
        if not isinstance(config, ModelConfig):
            raise ArgumentError(f"config={shown(config)}: pass a ModelConfig, such as a preset()")
        if device is not None and not isinstance(device, SimDevice):
            raise ArgumentError(f"device={shown(device)}: pass a SimDevice, or None")
        pages = as_int("num_pages", num_pages, 1), as_int("page_size", page_size, 1)
        held = min(config.max_position, pages[0] * pages[1])
        self.max_context = held if max_context is None else as_int("max_context", max_context, 1)
        self.max_running = as_int("max_running", max_running, 1)
        self.max_prefill = as_int("max_prefill", max_prefill, 1)
        self.max_tokens = as_int("max_tokens", max_tokens, 1)
        self._graph_rows = as_int("graph_rows", graph_rows, 0)
        if not 0 <= as_float("end_probability", end_probability) <= 1:
            raise ArgumentError(f"end_probability={end_probability}: give a number of 0 to 1")
        self.config = config
        self.checks = as_flag("checks", checks)
        if device is None:
            device = SimDevice(132, range(16, 113, 16), ConstantRates())
        if device.predictor is None:
            raise ArgumentError(
                f"predictor=None of the device of {device.num_sms} SMs: nothing says how long a "
                "launch takes; make SimDevice(..., predictor=) with ConstantRates(), or with "
                "smkern.latency.TablePredictor.load()"
            )
        self.device = device
        self._source = TokenSource(config, end_probability)
        self.hazards: list[str] = []
        self._launches: CheckedLaunches | ConstantLaunches
        self.pool: PagePool
        if checks:
            pool = SimPool(num_pages, page_size, device, reuse=reuse)
            self.pool, self.hazards = pool, pool.hazards
            self._launches = CheckedLaunches(device, pool, self._source, self.max_context)
        elif end_probability:
            raise ArgumentError(
                f"end_probability={end_probability} with checks=False: its requests end by length "
                "alone; leave it at 0, or checks at True"
            )
        else:
            self.pool = PagePool(num_pages, page_size, reuse=reuse)
            self._launches = ConstantLaunches(self._source.plain_token)

    def completion(self, request: Request) -> list[int]:
        """The tokens that a request draws, whatever the schedule."""
        return self._source.completion(request)

    def begin(self, chunks: Sequence[PrefillChunk], slot: int) -> PrefillRun:
        """Prepare a batch of prompts.

        Raises:
            HazardError: the slot's buffers hold another batch, or this one is too large.
        """
        self._launches.check_batch(chunks, self.max_prefill, self.max_tokens)
        run = PrefillRun(tuple(chunks), slot)
        self._launches.begin(run)
        return run

    def prefill(self, run: PrefillRun, first: int, count: int) -> Work:
        """Layers of a batch; see `Executor`.

        Raises:
            HazardError: when it is launched: layers out of order, a wrong lane, pages that are
                missing or not written yet.
        """
        is_last = first + count >= self.config.num_layers
        start, read = self._launches.prefill(run, first, count, is_last)
        is_drawing = False
        if is_last:
            drawing = tuple([chunk.request for chunk in run.chunks if chunk.draws])
            run.draw, is_drawing = Draw(drawing, read), bool(drawing)
        size = Size(run.cost, count, self.config.num_layers, is_drawing)
        about = {"first": first, "requests": [chunk.request.index for chunk in run.chunks]}
        return Work("prefill", start, size, count * LAYER_LAUNCHES, about)

    def decode(self, requests: Sequence[Request], steps: int) -> list[tuple[Work, Draw]]:
        """Decode steps; see `Executor`.

        Raises:
            HazardError: too many requests; when it is launched: see the class.
        """
        self._launches.check_rows(requests, self.max_running)
        rows, num_layers = tuple(requests), self.config.num_layers
        batch, kv, works = len(rows), keys_of(rows), []
        for ahead in range(steps):
            start, read = self._launches.decode(rows)
            size = Size((), num_layers, num_layers, False, batch, kv + ahead * batch)
            about = {"ahead": ahead, "batch": batch}
            works.append((Work("decode", start, size, 1, about), Draw(rows, read)))
        return works

    def mixed(
        self, chunks: Sequence[PrefillChunk], requests: Sequence[Request]
    ) -> tuple[Work, Draw]:
        """One forward of chunks and decode rows; see `Executor`.

        Raises:
            HazardError: too much for the buffers; when it is launched: see the class.
        """
        self._launches.check_batch(chunks, self.max_prefill, self.max_tokens)
        self._launches.check_rows(requests, self.max_running)
        rows, num_layers = tuple(requests), self.config.num_layers
        drawing = tuple([chunk.request for chunk in chunks if chunk.draws])
        start, read = self._launches.mixed(chunks, rows)
        size = Size(
            size_chunks(chunks), num_layers, num_layers, bool(drawing), len(rows), keys_of(rows)
        )
        about = {"requests": [chunk.request.index for chunk in chunks], "batch": len(rows)}
        if size.new_tokens + size.batch <= self._graph_rows:
            work = Work("mixed", start, size, 1, about)
        else:
            work = Work("mixed", start, size, num_layers * LAYER_LAUNCHES, about, self._left)
        return work, Draw((*drawing, *rows), read)

    def _left(self, event: Event) -> int:
        """Kernels of a mixed forward that are to be done, as a GPU tells them by marks."""
        passed = int(MARKS * self.device.progress(event))
        return -(-self.config.num_layers * (MARKS - passed) // MARKS) * LAYER_LAUNCHES

    def forget(self, request: Request) -> None:
        self._launches.forget(request)

    def memory_report(self) -> MemoryReport:
        """What the pages would take."""
        pool = self.pool
        return MemoryReport(
            kv_bytes=pool.num_pages * pool.page_size * self.config.kv_bytes_per_token
        )

    def close(self) -> None:
        """Nothing is held."""


def keys_of(requests: Sequence[Request]) -> int:
    """Keys that a decode step of these reads, those of the tokens in flight included."""
    return sum([len(request.ids) + request.num_pending for request in requests])
