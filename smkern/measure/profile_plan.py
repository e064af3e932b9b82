"""Which launches a profile times, in an order of which every beginning is a useful profile."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from random import Random

from smkern.latency import Chunk

RUNGS = (8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112)
"""SMs of the decode side on which predictors are fitted."""
HELD_OUT_RUNGS = (10, 22, 36, 44, 60, 72)
"""Rungs between those, on which they are judged only."""
COARSE = (16, 24, 32, 48, 80)
"""Rungs with all sizes; the others have some."""

BATCHES = (64, 1, 16, 128, 32, 256, 8)
PADDED = (96, 144, 48, 192, 80, 112)
"""Rows of graphs between powers of two, whose GEMMs nobody tuned."""
CONTEXTS = (2048, 512, 8192, 16384)
TOKENS = (64, 192, 512, 129, 2048, 24, 384, 128, 8192, 640, 257, 1536, 768, 3072)
"""Of prompts on coarse rungs, the stair that chunks under a limit climb first; 256, 512, 1,024 and
4,096 are timed on all rungs."""
CACHED = (8192, 2048, 30_000)
MIXED_TOKENS = (64, 192, 448, 960, 1984, 16, 128, 320, 704, 1472, 256, 512)

PAIRED_DECODES = (
    (64, 2048), (16, 1024), (128, 2048), (32, 8192), (4, 2048), (192, 512), (1, 4096)
)  # fmt: skip
"""(rows, keys of each)"""
PAIRED_PROMPTS = (
    (4096, 0),
    (512, 0),
    (1024, 8192),
    (2048, 2048),
    (256, 0),
    (8192, 0),
    (192, 30_000),
)
"""(new tokens, those before them)"""
PAIRS_A_RUNG = 14
KEYS_AN_SM = 12_000
"""Decode steps of more keys than this an SM, on up to 48 of them, are too slow to be wanted."""


@dataclass(frozen=True, slots=True)
class Room:
    """What fits.

    Attributes:
        num_sms: SMs of the device.
        max_running: Decode rows.
        max_prefill: Chunks.
        max_tokens: New tokens of a launch.
        max_context: Tokens of a request.
        pool_tokens: Tokens of all requests together.
        sm_granularity: SMs that move together from one side of a split to the other.
    """

    num_sms: int
    max_running: int = 256
    max_prefill: int = 8
    max_tokens: int = 8192
    max_context: int = 40_960
    pool_tokens: int = 600_000
    sm_granularity: int = 2

    def holds(self, tokens: int) -> bool:
        """Whether so many tokens fit, with some to spare."""
        return 1.1 * tokens <= self.pool_tokens

    def splits_at(self, rung: int) -> bool:
        """Whether a decode side can have so many SMs."""
        return 0 < rung < self.num_sms and rung % self.sm_granularity == 0


@dataclass(frozen=True, slots=True)
class Cell:
    """What is timed together.

    Attributes:
        rung: SMs of the decode side; None: the whole device.
        lengths: Keys of each decode row; none: no decode.
        chunks: Prompts; none: no prefill.
        mixed: Both in one forward, else each on its side.
        held_out: Whether predictors are judged by it.
    """

    rung: int | None
    lengths: tuple[int, ...] = ()
    chunks: tuple[Chunk, ...] = ()
    mixed: bool = False
    held_out: bool = False

    @property
    def name(self) -> str:
        """What tells it from all others, short where its rows are alike."""
        alike = len(set(self.lengths)) == 1
        rows = [len(self.lengths), self.lengths[0]] if alike else list(self.lengths)
        return json.dumps(
            [self.rung, rows, [list(x) for x in self.chunks], self.mixed, self.held_out],
            separators=(",", ":"),
        )

    def fits(self, room: Room) -> bool:
        """Whether it can be run, in reasonable time."""
        ends = [chunk.new + chunk.cached for chunk in self.chunks]
        new = sum(chunk.new for chunk in self.chunks)
        keys = sum(self.lengths)
        num_sms = min(self.rung or room.num_sms, 48)
        return (
            len(self.lengths) <= room.max_running
            and len(self.chunks) <= room.max_prefill
            and new <= room.max_tokens
            and max([*ends, *self.lengths]) <= room.max_context
            and room.holds(keys + sum(ends))
            and keys <= KEYS_AN_SM * num_sms
            and (self.rung is None or room.splits_at(self.rung))
        )


def plan(room: Room, *, seed: int = 0) -> list[Cell]:
    """The cells of a profile, in the order in which they are timed.

    Decode steps, prompts, mixed forwards, pairs and held-out steps take turns, each from coarse to
    fine, in proportion to how many there are.

    Args:
        room: What fits.
        seed: Seed of what is drawn.

    Example:
        >>> cells = plan(Room(132))
        >>> sum(cell.held_out for cell in cells) > 100, cells == plan(Room(132))
        (True, True)
    """
    draw = Random(seed)
    kinds: list[Iterable[Cell]] = [
        _decodes(),
        _prompts(),
        _mixed(),
        _pairs(room, draw),
        _held_out(room, draw),
    ]
    lists = [[cell for cell in dict.fromkeys(cells) if cell.fits(room)] for cells in kinds]
    placed = [
        ((index + 0.5) / len(cells), kind, cell)
        for kind, cells in enumerate(lists)
        for index, cell in enumerate(cells)
    ]
    return [cell for _, _, cell in sorted(placed, key=lambda item: item[:2])]


def all_rungs(cells: Iterable[Cell]) -> list[int]:
    """The rungs that cells run on."""
    return sorted({cell.rung for cell in cells if cell.rung is not None})


def _spread() -> list[int]:
    """`RUNGS` in an order whose every beginning is spread over all: halves, quarters, and so on."""
    bits = (len(RUNGS) - 1).bit_length()
    order = sorted(range(len(RUNGS)), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2))
    return [RUNGS[i] for i in order]


def _decodes() -> Iterator[Cell]:
    places, coarse = _places()
    for batch in BATCHES[:4]:
        yield from (Cell(place, (CONTEXTS[0],) * batch) for place in places)
    # two lengths of as many rows tell attention from the rest
    for batch in (128, 64):
        yield from (Cell(place, (512,) * batch) for place in coarse)
    yield from (Cell(place, (1000,) * batch) for batch in PADDED for place in places)
    for context, batch in product(CONTEXTS, BATCHES):
        yield from (Cell(place, (context,) * batch) for place in coarse)
    for context, batch in product(CONTEXTS, (1, 32, 128)):
        yield from (Cell(place, (context,) * batch) for place in places)


def _prompts() -> Iterator[Cell]:
    places, coarse = _places()
    cached = [Chunk(tokens, before) for tokens, before in product((512, 128, 2048), CACHED)]
    for tokens in (1024, 256):
        yield from (Cell(place, (), (Chunk(tokens),)) for place in places)
    # mixed forwards run on the whole device
    yield from (Cell(None, (), (chunk,)) for chunk in cached)
    # a regression per partition needs something cached on each of them
    for chunk in (Chunk(4096), cached[0]):
        yield from (Cell(place, (), (chunk,)) for place in places)
    for tokens in TOKENS:
        yield from (Cell(place, (), (Chunk(tokens),)) for place in coarse)
    yield from (Cell(place, (), (chunk,)) for chunk in cached for place in coarse[::2])
    yield from (Cell(place, (), (Chunk(512),)) for place in places)


def _places() -> tuple[list[int | None], list[int | None]]:
    """All places, and the coarse ones; the whole device is the first of both."""
    places: list[int | None] = [None, *_spread()]
    return places, [place for place in places if place is None or place in COARSE]


def _mixed() -> Iterator[Cell]:
    def cell(tokens: int, batch: int, context: int, cached: int = 0) -> Cell:
        return Cell(None, (context,) * batch, (Chunk(tokens, cached),), mixed=True)

    yield from (cell(tokens, 64, 2048) for tokens in MIXED_TOKENS[:4])
    # what is left of a forward is told by its decode rows
    yield from (cell(tokens, batch, 2048) for batch, tokens in product((8, 32), (128, 512)))
    yield from (cell(256, batch, 1024) for batch in (16, 128, 256))
    yield from (cell(tokens, 64, 2048) for tokens in MIXED_TOKENS[4:])
    yield from (cell(64, batch, 1024) for batch in (16, 128, 256))
    for cached, tokens in product((2048, 8192), (128, 448, 1024)):
        yield cell(tokens, 64, 2048, cached)
    yield from (cell(tokens, batch, 1024) for tokens, batch in product((1024, 512), (16, 128, 256)))
    yield from (cell(tokens, batch, 8192) for batch, tokens in product((8, 32), (128, 512)))


def _pairs(room: Room, draw: Random) -> Iterator[Cell]:
    """Per rung some of all pairs of a decode step and a prompt, every step and prompt as often.

    Steps that do not fit have fewer rows: without the ones of long requests, nothing would tell
    what their rows do to a slowdown from what their keys do.
    """
    steps = [(_rows_that_fit(room, *step), step[1]) for step in PAIRED_DECODES]
    both = list(product(range(len(PAIRED_DECODES)), range(len(PAIRED_PROMPTS))))
    chosen: dict[int, list[tuple[int, int]]] = {}
    for rung in RUNGS:
        rest = [pair for pair in both if pair != (0, 0)]
        draw.shuffle(rest)
        # a Latin order: the diagonal that a pair lies on, from a diagonal of the rung's own
        start = draw.randrange(len(PAIRED_PROMPTS))
        rest.sort(key=lambda pair: (pair[1] - pair[0] - start) % len(PAIRED_PROMPTS))
        chosen[rung] = [(0, 0), *rest[: PAIRS_A_RUNG - 1]]
    for index in range(PAIRS_A_RUNG):
        for rung in _spread():
            decode, prompt = chosen[rung][index]
            batch, context = steps[decode]
            yield Cell(rung, (context,) * batch, (Chunk(*PAIRED_PROMPTS[prompt]),))


def _rows_that_fit(room: Room, batch: int, context: int) -> int:
    """The rows, halved until their keys fit beside any prompt but the longest."""
    prompt = sorted(sum(prompt) for prompt in PAIRED_PROMPTS)[-2]
    while batch > 1 and not room.holds(batch * context + prompt):
        batch //= 2
    return batch


def _held_out(room: Room, draw: Random) -> Iterator[Cell]:
    """Random steps, of requests that are not alike."""
    rungs = (*RUNGS, *HELD_OUT_RUNGS)
    for _ in range(26):
        for kind in ("pair", "decode", "pair", "prompt", "mixed"):
            rung = draw.choice(rungs) if kind == "pair" else draw.choice([None, *rungs])
            if kind == "mixed":
                lengths, chunks = _lengths(room, None, draw), _chunks(draw, 1024)
                yield Cell(None, lengths, chunks, mixed=True, held_out=True)
                continue
            lengths = () if kind == "prompt" else _lengths(room, rung, draw)
            chunks = () if kind == "decode" else _chunks(draw, room.max_tokens)
            yield Cell(rung, lengths, chunks, held_out=True)


def _log(draw: Random, low: float, high: float) -> int:
    return round(math.exp(draw.uniform(math.log(low), math.log(high))))


def _lengths(room: Room, rung: int | None, draw: Random) -> tuple[int, ...]:
    """Rows about as long as each other or very unlike; no more keys than the place is good for."""
    most = min(KEYS_AN_SM * min(rung or room.num_sms, 48), 0.7 * room.pool_tokens)
    center, spread = _log(draw, 300, 12_000), draw.choice((1.2, 2.0, 4.0))
    lengths: list[int] = []
    for _ in range(_log(draw, 1, room.max_running)):
        length = min(_log(draw, center / spread, center * spread), room.max_context)
        if sum(lengths) + length > most:
            break
        lengths.append(length)
    return tuple(lengths) or (512,)


def _chunks(draw: Random, most: int) -> tuple[Chunk, ...]:
    """One to four prompts, half of them with something cached."""
    left = _log(draw, 48, most)
    chunks = []
    for index in range(count := draw.randint(1, min(4, left // 16))):
        new = left if index == count - 1 else max(1, round(left * draw.uniform(0.15, 0.7)))
        left -= new
        chunks.append(Chunk(new, draw.choice((0, _log(draw, 64, 24_000)))))
        if left < 1:
            break
    return tuple(chunks)
