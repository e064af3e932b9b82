"""A segment of a soak on a GPU: random splits, cancellations, pages that run out.

Twenty minutes are segments of this, one process each:

    python -m tests.gpu.runtime.test_soak <state.json> <seconds>
"""

from __future__ import annotations

import sys
from pathlib import Path

import smkern
from smkern.bench.runtime.equality import pool_for
from smkern.bench.runtime.random_policy import RandomPolicy
from smkern.bench.runtime.soak import Soak, soak
from smkern.models import Decoder, Weights, preset
from smkern.runtime.model_executor import ModelExecutor
from smkern.runtime.multiplexer import Multiplexer

RUNGS = (16, 48, 96)
LAYERS, CONTEXT, RUNNING, PAGES = 4, 1024, 64, 400
MODEL = f"qwen3-8b of {LAYERS} layers"


def run_segment(path: Path, seconds: float) -> Soak:
    """One segment; what a file has of the soak is carried on, and written back."""
    state = Soak.load(path, MODEL)
    config = preset("qwen3-8b").replace(num_layers=LAYERS, max_position=CONTEXT)
    decoder = Decoder(config, Weights.random(config, 5, "cuda"))
    pool = pool_for(config, decoder.device, 16 * PAGES)
    seed = len(state.segments)
    with smkern.ladder(RUNGS) as ladder:
        executor = ModelExecutor(
            decoder, pool, ladder=ladder, max_running=RUNNING, max_prefill=8, max_tokens=2048,
            max_context=CONTEXT,
        )  # fmt: skip
        executor.warm()
        executor.capture(contexts=[CONTEXT])
        mux = Multiplexer(
            executor,
            policy=RandomPolicy(seed, idle=0.05),
            preemption="keep" if seed % 2 else "recompute",
            stall_timeout_s=20.0,
        )
        soak(mux, state, seconds)
        mux.close()
        executor.synchronize()
        del mux, executor
    state.save(path)
    return state


def test_a_minute(tmp_path: Path) -> None:
    state = run_segment(tmp_path / "soak.json", 60.0)
    (segment,) = state.segments
    assert not state.leaks, state.leaks
    assert segment.preemptions
    assert segment.switches
    assert segment.cancelled
    assert segment.tokens > 10_000


if __name__ == "__main__":
    found = run_segment(Path(sys.argv[1]), float(sys.argv[2]))
    last = found.segments[-1]
    print(
        f"{found.minutes:.1f} minutes in {len(found.segments)} segments; the last: "
        f"{last.requests} requests, {last.tokens} tokens, {last.cancelled} cancelled, "
        f"{last.preemptions} preemptions, {last.switches} switches, longest without a token "
        f"{last.longest_quiet_s:.2f} s; leaks: {found.leaks}"
    )
