"""Requests that come, move, grow and leave at random, and what their rows must then hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import torch

from smkern.kv import PagePool
from smkern.models import SamplingParams
from smkern.models.graph import DecodeInputs
from smkern.runtime.executor import PrefillChunk
from smkern.runtime.model.input_batch import InputBatch
from smkern.runtime.model.row_state import RowState
from smkern.runtime.request import Request

RUNNING, PREFILL, CONTEXT, PAGE, STOP = 6, 3, 48, 4, 2


def new_pool() -> PagePool:
    return PagePool(16 * CONTEXT // PAGE, PAGE, reuse=False)


def new_state(device: str = "cpu") -> RowState:
    return RowState.make(
        max_running=RUNNING, max_prefill=PREFILL, max_pages=CONTEXT // PAGE, device=device,
        max_stop_tokens=STOP,
    )  # fmt: skip


def new_request(index: int, rng: Random) -> Request:
    params = SamplingParams(temperature=index / 4, top_k=index, top_p=0.5, min_p=0.25)
    ids = [index + 1] * rng.randint(1, 12)
    stop = frozenset(range(100, 100 + rng.randint(0, STOP + 1)))
    return Request(index, params, (index << 33) - index, stop, rng.randint(2, 24), ids, len(ids))


@dataclass(slots=True, eq=False)
class Life:
    """What a request's row must hold."""

    request: Request
    token: int
    length: int
    finished: bool = False
    prefill_row: int | None = None
    seated: bool = False


@dataclass(slots=True, eq=False)
class Play:
    """Turns of a runtime that knows no token before it reads it: rows, and what they must hold."""

    table: InputBatch
    pool: PagePool
    rng: Random
    lives: list[Life] = field(default_factory=list)
    drawn: int = 1000
    count: int = 0

    @property
    def state(self) -> RowState:
        return self.table.state

    def turn(self) -> None:
        """Some leave, some prompts run, some join, and all who sit decode some steps."""
        for life in [x for x in self.lives if self.rng.random() < 0.15] or self.lives[12:]:
            self.leave(life)
        if self.rng.random() < 0.5:
            self.prefill(self.rng.randint(1, PREFILL), slot=self.rng.randint(0, 1))
        prefill_rows = [
            x for x in self.lives if x.prefill_row is not None and self.rng.random() < 0.8
        ]
        stay = [x for x in self.lives if x.seated and self.rng.random() < 0.9]
        back = [x for x in self.lives if not (x.seated or x.finished) and x.prefill_row is None]
        self.decode((stay + prefill_rows + back)[:RUNNING], self.rng.randint(0, 3))

    def leave(self, life: Life) -> None:
        self.table.forget(life.request)
        self.pool.release(life.request)
        self.lives.remove(life)

    def prefill(self, count: int, slot: int) -> None:
        """A batch of prompts in one or two chunks; all of it draws."""
        end = (2 - slot) * PREFILL
        rows = range(end - count, end)
        for life in [x for x in self.lives if x.prefill_row in range(end - PREFILL, end)]:
            self.leave(life)
        new = [new_request(self.count + i, self.rng) for i in range(count)]
        self.count += count
        for request in new:
            self.pool.allocate(request, request.ids)
        if self.rng.random() < 0.5:
            halves = [-(-len(request.ids) // 2) for request in new]
            self.seat(rows, new, halves, draws=False)
            self.launch(rows[0], count)
            self.assert_lengths(rows, halves)
        self.seat(rows, new, [len(x.ids) for x in new], draws=True)
        lives = [
            Life(x, x.ids[-1], len(x.ids), prefill_row=row)
            for x, row in zip(new, rows, strict=True)
        ]
        self.lives += lives
        self.check(rows[0], lives)
        self.launch(rows[0], count)
        self.step(lives)

    def seat(self, rows: range, new: list[Request], lengths: list[int], *, draws: bool) -> None:
        chunks = [PrefillChunk(x, 0, length, draws) for x, length in zip(new, lengths, strict=True)]
        self.table.write_prefill_rows(rows[0], chunks)
        self.table.take().send()

    def assert_lengths(self, rows: range, lengths: list[int]) -> None:
        inputs = self.state.inputs(rows[0], len(rows))
        assert inputs.kv_lens.tolist() == lengths
        assert inputs.finished.all()

    def decode(self, lives: list[Life], steps: int) -> None:
        by_request = {life.request: life for life in lives}
        lengths = [min(x.length + steps, CONTEXT) for x in lives]
        for life, length in zip(lives, lengths, strict=True):
            self.pool.extend(life.request, length)
            if not life.seated and life.prefill_row is None:
                life.request.ids += [life.token] * (life.length - len(life.request.ids))
        prefill_rows = {x.request: x.prefill_row for x in lives if x.prefill_row is not None}
        order = self.table.arrange(list(by_request), lengths, prefill_rows)
        assert set(order) == set(by_request)
        self.table.take().send()
        for life in self.lives:
            life.seated = life.request in by_request
            life.prefill_row = None if life.seated else life.prefill_row
        seated = [by_request[request] for request in order]
        first = self.state.first_slot
        self.check(first, seated)
        rest = self.state.inputs(first + len(seated), RUNNING - len(seated))
        assert rest.finished.all()
        for _ in range(steps):
            self.launch(first, len(seated))
            self.step(seated)
        self.check(first, seated, pages=False)

    def launch(self, first: int, count: int) -> None:
        """What a sampler does to rows; the host sees nothing of it."""
        x = self.state.inputs(first, count)
        draws = ~x.finished
        x.token_ids.copy_(torch.where(draws, x.seeds.to(torch.int32) + x.kv_lens, 0))
        x.kv_lens.add_(draws.to(torch.int32))
        x.finished.logical_or_(x.kv_lens >= x.max_lengths)

    def step(self, lives: list[Life]) -> None:
        """The same, as it must be."""
        for life in lives:
            if life.finished:
                life.token = 0
                continue
            seed = life.request.seed & 0xFFFFFFFF
            life.token = seed - (seed >> 31 << 32) + life.length
            life.length += 1
            most = life.request.prompt_len + life.request.max_new_tokens
            life.finished = life.length >= most

    def check(self, first: int, lives: list[Life], *, pages: bool = True) -> None:
        """Rows from `first` on are these requests'."""
        inputs = self.state.inputs(first, len(lives))
        for row, life in enumerate(lives):
            assert_row(inputs, row, life)
            if pages:
                held = list(self.pool.pages(life.request))[: -(-life.length // PAGE)]
                assert inputs.page_table[row, : len(held)].tolist() == held


def assert_row(inputs: DecodeInputs, row: int, life: Life) -> None:
    request = life.request
    assert int(inputs.token_ids[row]) == life.token
    assert int(inputs.kv_lens[row]) == life.length
    assert bool(inputs.finished[row]) == life.finished
    assert int(inputs.max_lengths[row]) == request.prompt_len + request.max_new_tokens
    assert int(inputs.seeds[row]) == request.seed
    assert float(inputs.temperature[row]) == request.params.temperature
    assert int(inputs.top_k[row]) == request.params.top_k
    assert (float(inputs.top_p[row]), float(inputs.min_p[row])) == (0.5, 0.25)
    stop = [*sorted(request.stop_token_ids), *[-1] * STOP][:STOP]
    assert inputs.stop_tokens[row].tolist() == stop
