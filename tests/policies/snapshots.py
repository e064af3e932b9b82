"""Snapshots: one by hand, and random ones."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

from hypothesis import strategies as st

from smkern.policies import PrefillView, Running, Snapshot, Waiting

RUNGS = (16, 24, 32, 48)
LAYERS = 36

IDLE = Snapshot(
    rungs=RUNGS, num_sms=132, num_layers=LAYERS, free_pages=10_000, page_size=16, max_running=64,
    max_prefill=4, max_tokens=8192,
)  # fmt: skip


def moment(**changes: Any) -> Snapshot:
    """A snapshot in which nothing goes on but what is said."""
    return replace(IDLE, **changes)


def waiting(*tokens: int, first: int = 0, pages: int | None = None) -> tuple[Waiting, ...]:
    """Requests with so many tokens, in this order."""
    return tuple(
        Waiting(first + i, float(i), count, pages=-(-count // 16) if pages is None else pages)
        for i, count in enumerate(tokens)
    )


def batch(
    *tokens: int,
    launched: int = 0,
    first: int = 100,
    started_us: float = 0,
    deadline_us: float = inf,
) -> PrefillView:
    """A running batch of prompts with so many tokens."""
    ids = tuple(range(first, first + len(tokens)))
    chunks = tuple((count, 0) for count in tokens)
    return PrefillView(ids, chunks, launched, started_us, deadline_us=deadline_us)


@st.composite
def batches(draw: st.DrawFn, first: int) -> PrefillView:
    tokens = draw(st.lists(st.integers(1, 4096), min_size=1, max_size=4))
    return batch(*tokens, launched=draw(st.integers(0, LAYERS)), first=first)


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Any moment: also without rungs, pages or rows, and with a batch that has preempted."""
    prefill = draw(st.none() | batches(100))
    preempted = draw(st.none() | batches(200)) if prefill is not None else None
    queue = [
        Waiting(
            number,
            float(number),
            draw(st.integers(1, 20_000)),
            cached=draw(st.sampled_from((0, 16, 4096))),
            deadline_us=draw(st.sampled_from((0.0, 1e5, 1e7, inf))),
            pages=draw(st.integers(0, 300)),
        )
        for number in range(draw(st.integers(0, 8)))
    ]
    most = draw(st.integers(1, 64))
    kv = draw(st.lists(st.integers(1, 9000), max_size=most))
    max_tokens = draw(st.sampled_from((1, 40, 512, 8192)))
    out = [draw(st.integers(0, 300)) for _ in kv]
    running = [
        Running(number, 0.0, tokens, count, 1e5 if count else 0.0, 2e5 if count else 0.0)
        for number, (tokens, count) in enumerate(zip(kv, out, strict=True), 300)
    ]
    return replace(
        IDLE,
        now_us=draw(st.sampled_from((0.0, 2.5e5, 5e6))),
        trigger=draw(st.sampled_from(("arrival", "decode", "prefill", "idle"))),
        waiting=tuple(queue),
        prefill=prefill,
        preempted=preempted,
        running_kv=tuple(kv),
        decode_queued=draw(st.integers(0, 4)),
        prefill_queued=draw(st.integers(0, 3)),
        rung=draw(st.sampled_from((None, *RUNGS))),
        free_pages=draw(st.integers(0, 600)),
        max_running=most,
        max_prefill=draw(st.integers(1, 5)),
        max_tokens=max_tokens,
        joining=draw(st.sampled_from((0, 0, 1, 3))),
        running=tuple(running),
    )
