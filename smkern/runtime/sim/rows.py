"""What a simulated device knows of requests: tokens computed and drawn, rows, ends."""

from __future__ import annotations

from dataclasses import dataclass

from smkern.runtime.executor import PrefillChunk
from smkern.runtime.request import Request
from smkern.runtime.sim.event import SimEvent
from smkern.runtime.sim.pool import SimPool
from smkern.runtime.sim.tokens import TokenSource

AFTER_END = -1
"""What a row draws behind its end: no token, so that one which is delivered shows."""


@dataclass(slots=True, eq=False)
class Row:
    """What the device knows of a request.

    Attributes:
        key: Key of its tokens, see `TokenSource`.
        computed: Tokens whose keys and values are written, or are by what is launched.
        drawn: Tokens that it has, the prompt's included.
        is_finished: Whether it ended on the device.
        prefill_row: The prefill slot whose rows hold the token that its prefill drew, until it
            decodes.
        is_overwritten: Whether others took these rows before.
    """

    key: int
    computed: int
    drawn: int = 0
    is_finished: bool = False
    prefill_row: int | None = None
    is_overwritten: bool = False


class SimRows:
    """The rows of a simulated executor, changed by launches alone."""

    def __init__(self, pool: SimPool, source: TokenSource, max_context: int) -> None:
        self._pool = pool
        self._source = source
        self._max_context = max_context
        # A page is asked for with its first token, and complete with its last.
        self._edges = (0, pool.page_size - 1)
        self._rows: dict[Request, Row] = {}

    def get(self, request: Request) -> Row | None:
        """What is known of a request, if anything is."""
        return self._rows.get(request)

    def forget(self, request: Request) -> None:
        """Nothing is known of a request any more."""
        self._rows.pop(request, None)

    def step(self, request: Request, event: SimEvent) -> int:
        """A launch computes and draws a token of a decoding request.

        Raises:
            HazardError: its prompt is not through, its token was overwritten, or its pages are not
                to be written.
        """
        row = self._rows.get(request)
        if row is None:  # it comes again, with the tokens that the host has
            row = self.row(request, len(request.ids) - 1)
            row.drawn = len(request.ids)
        if row.drawn != row.computed + 1:
            raise self._pool.hazard(
                f"a decode step of {request!r}, of which {row.computed} tokens are computed and "
                f"{row.drawn} drawn: its prompt is not through"
            )
        if row.prefill_row is not None:
            if row.is_overwritten and len(request.ids) < row.drawn:
                raise self._pool.hazard(
                    f"{request!r} takes its slot after prefill slot {row.prefill_row}, where its "
                    "token lay, was used again, and before the host read it"
                )
            row.prefill_row = None
        self._pool.use(request, event)
        if row.is_finished:
            return AFTER_END
        if row.computed % self._pool.page_size in self._edges:
            self._write(request, row.computed, row.drawn, event)
        row.computed = row.drawn
        return self._advance(request, row)

    def chunk(self, chunk: PrefillChunk, event: SimEvent, is_first: bool) -> None:
        """A launch computes a prompt's chunk, or some layers of it, the first of them or others.

        Raises:
            HazardError: what is in front of it is not computed, or its pages are not to be written.
        """
        row, stop = self._rows[chunk.request], chunk.end
        if is_first:
            if row.computed != chunk.start:
                raise self._pool.hazard(
                    f"a chunk of {chunk.request!r} from {chunk.start} on, of which "
                    f"{row.computed} tokens are computed"
                )
            self._pool.read(chunk.request, chunk.start, event)
        self._pool.use(chunk.request, event)
        self._write(chunk.request, chunk.start, stop, event)
        row.computed = stop

    def end_of_prompt(self, chunk: PrefillChunk, slot: int) -> int:
        """The token behind a prompt's last chunk."""
        row = self._rows.get(chunk.request)
        if row is None:  # it has left
            return AFTER_END
        row.prefill_row, row.is_overwritten = slot, False
        row.drawn = chunk.end
        return self._advance(chunk.request, row)

    def row(self, request: Request, computed: int) -> Row:
        """What is known of a request, with so many tokens computed where nothing was."""
        row = self._rows.get(request)
        if row is None:
            key = self._source.key(request.seed, request.ids[: request.prompt_len])
            row = self._rows[request] = Row(key, computed)
        return row

    def overwrite(self, slot: int) -> None:
        """A slot's rows are used by others from now on."""
        for row in self._rows.values():
            if row.prefill_row == slot:
                row.is_overwritten = True

    def _advance(self, request: Request, row: Row) -> int:
        token = self._source.token(row.key, row.drawn)
        row.drawn += 1
        row.is_finished = (
            token in request.stop_token_ids
            or row.drawn - request.prompt_len >= request.max_new_tokens
        )
        return token

    def _write(self, request: Request, start: int, stop: int, event: SimEvent) -> None:
        if stop > self._max_context:
            raise self._pool.hazard(
                f"launch {event.number} writes {request!r} up to token {stop}, its table has "
                f"{self._max_context}"
            )
        self._pool.write(request, start, stop, event)
