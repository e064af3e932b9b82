"""What rows of requests cost the host in a step: `--benchmark-enable bench/micro`.

On a GPU with the copy and the launch; without one only the bookkeeping.
"""

from __future__ import annotations

import pytest
import torch

from smkern.kv import PagePool
from smkern.models import SamplingParams
from smkern.runtime.model.input_batch import InputBatch, RowState
from smkern.runtime.model.row_updates import Records
from smkern.runtime.request import Request

RUNNING, CONTEXT, PAGE, ROUNDS = 128, 4096, 16, 1000


class Unsent:
    """Takes changes and makes none."""

    nbytes = 0

    def send(self, records: Records) -> None:
        pass


class Batch:
    """128 requests whose lengths differ, so that 8 of them get a page in each step."""

    def __init__(self) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        pages = CONTEXT // PAGE
        state = RowState.make(max_running=RUNNING, max_prefill=16, max_pages=pages, device=device)
        self.pool = PagePool(RUNNING * pages, PAGE, reuse=False)
        self.table = InputBatch(state, self.pool, sender=Unsent() if device == "cpu" else None)
        self.lengths = [1 + index % PAGE for index in range(RUNNING)]
        self.requests = [
            Request(i, SamplingParams(), i, frozenset([2]), CONTEXT, [7] * length, length)
            for i, length in enumerate(self.lengths)
        ]
        for request in self.requests:
            self.pool.allocate(request, request.ids)
        self.arrange()

    def grow(self) -> None:
        """Every request gets a token."""
        self.lengths = [length + 1 for length in self.lengths]
        for request, length in zip(self.requests, self.lengths, strict=True):
            self.pool.extend(request, length)

    def arrange(self) -> None:
        self.table.arrange(self.requests, self.lengths)
        self.table.take().send()


@pytest.mark.parametrize("grown", [True, False])
def test_rows_of_a_step(benchmark, grown):
    batch = Batch()
    setup = batch.grow if grown else None
    benchmark.pedantic(batch.arrange, setup=setup, rounds=ROUNDS, warmup_rounds=10)
    assert len(batch.table.requests) == RUNNING
