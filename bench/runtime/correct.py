"""Whether serving is right: tokens against each request alone, and a soak in segments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from smkern.bench.runtime.cases import (
    MISMATCHES,
    OURS,
    SOAK_LEAKS,
    SOAK_MINUTES,
    Cell,
    RuntimePlan,
)
from smkern.bench.runtime.equality import clear_mismatches, each_alone, through, workload
from smkern.bench.runtime.prepare import compile_steps
from smkern.bench.runtime.random_policy import RandomPolicy
from smkern.bench.runtime.serving import Sizes, open_executor
from smkern.bench.runtime.soak import Soak, soak
from smkern.models import Decoder, Weights
from smkern.runtime.books import Preemption
from smkern.runtime.multiplexer import Multiplexer

SIZES = Sizes(
    (16, 48, 96), max_running=48, max_prefill=8, max_tokens=2048, max_context=1024,
    num_pages=160, batch_invariant=True,
)  # fmt: skip
SOAK_SIZES = Sizes(
    (16, 48, 96),
    max_running=64,
    max_prefill=8,
    max_tokens=2048,
    max_context=1024,
    num_pages=160,
    reuse=True,
)
PROMPTS = (
    *range(16, 257, 16), *range(320, 513, 64), *range(640, 1025, 128), *range(1280, 2049, 256)
)  # fmt: skip
SEEDS = (1, 2)


@dataclass(frozen=True, slots=True)
class Equality:
    """A workload, and the model that it is for.

    Attributes:
        requests: How many.
        layers: Of the model; None: all of the preset's.
        sizes: Of the executor.
        longest: Tokens of a prompt, at most.
        is_fast: Whether the decoder is not batch-invariant: then only tokens count that rounding
            does not decide.
    """

    requests: int
    layers: int | None = None
    sizes: Sizes = SIZES
    longest: int = 600
    is_fast: bool = False


EQUALITIES = (
    Equality(2000, layers=4),
    Equality(200, layers=4, is_fast=True),
    Equality(100),
)


def token_cells(
    plan: RuntimePlan, weights: Callable[[int | None], Weights], wanted: Equality
) -> Iterator[Cell]:
    """Tokens that differ from those of each request alone, in the batch-invariant mode.

    Args:
        plan: Whose model.
        weights: weights(layers).
        wanted: What is served; each part by a policy of another seed and way to preempt.
    """
    if wanted.is_fast:
        yield from _fast_cells(plan, weights(wanted.layers), wanted)
        return
    made, sizes = weights(wanted.layers), wanted.sizes
    compile_steps(made.config, sizes, PROMPTS)
    decoder = Decoder(
        made.config, made, max_position=sizes.max_context, batch_invariant=sizes.batch_invariant
    )
    asked = workload(1, wanted.requests, made.config.vocab_size, longest=wanted.longest)
    truth = each_alone(decoder, asked, max_context=sizes.max_context)
    verdicts, preemptions, switches = [], 0, 0
    part = -(-len(asked) // len(SEEDS))
    for index, seed in enumerate(SEEDS):
        mine = slice(index * part, (index + 1) * part)
        with open_executor(made, sizes) as executor:
            executor.warm()
            executor.capture(contexts=[sizes.max_context])
            mux = Multiplexer(
                executor, policy=RandomPolicy(seed), batch_invariant=True,
                preemption=_preemption(seed),
            )  # fmt: skip
            verdict, _ = through(mux, asked[mine], truth[mine], seed)
            stats = mux.stats()
            preemptions += stats.preemptions
            switches += stats.switches.count
            executor.pool.check()
            mux.close()
        verdicts.append(verdict)
    value = sum(verdict.mismatches + len(verdict.failed) for verdict in verdicts)
    yield plan.cell(MISMATCHES, OURS, value, "tokens", **about_of(wanted)) | {
        "tokens": sum(verdict.tokens for verdict in verdicts),
        "cancelled": sum(verdict.cancelled for verdict in verdicts),
        "preemptions": preemptions,
        "switches": switches,
        "failed": [reason for verdict in verdicts for reason in verdict.failed][:4],
        "wrong": [list(pair) for verdict in verdicts for pair in verdict.wrong][:8],
        "seconds": round(sum(verdict.seconds for verdict in verdicts), 1),
    }


def about_of(wanted: Equality) -> dict[str, Any]:
    """What the case of a workload's cell says."""
    about: dict[str, Any] = {"requests": wanted.requests}
    if wanted.layers is not None:
        about["layers"] = wanted.layers
    return {**about, "mode": "fast"} if wanted.is_fast else about


def _fast_cells(plan: RuntimePlan, made: Weights, wanted: Equality) -> Iterator[Cell]:
    sizes = replace(wanted.sizes, batch_invariant=False)
    compile_steps(made.config, sizes, PROMPTS)
    fast, exact = (
        Decoder(made.config, made, max_position=sizes.max_context, batch_invariant=same)
        for same in (False, True)
    )
    vocab = made.config.vocab_size
    asked = workload(3, wanted.requests, vocab, longest=wanted.longest, greedy=True)
    with open_executor(made, sizes) as executor:
        executor.warm()
        executor.capture(contexts=[sizes.max_context])
        mux = Multiplexer(executor, policy=RandomPolicy(SEEDS[0]))
        verdict, tokens = through(mux, asked, [[] for _ in asked], SEEDS[0])
        mux.close()
    differ, clear = clear_mismatches(fast, exact, asked, tokens, max_context=sizes.max_context)
    value = differ + len(verdict.failed)
    yield plan.cell(MISMATCHES, OURS, value, "tokens", **about_of(wanted)) | {
        "tokens": verdict.tokens,
        "clear": clear,
        "failed": verdict.failed[:4],
        "seconds": round(verdict.seconds, 1),
    }


def soak_cells(
    plan: RuntimePlan,
    weights: Callable[[int | None], Weights],
    path: Path,
    seconds: float,
    *,
    sizes: Sizes = SOAK_SIZES,
    layers: int = 4,
    say: Callable[[str], object] = print,
    longest: int = 600,
    answer: int = 24,
) -> Iterator[Cell]:
    """One more segment of a soak; what the file has of it is carried on, and written back.

    A segment that raised is a failure of the soak for good: its cells come before the error.
    """
    model = f"{plan.model} of {layers} layers"
    state = Soak.load(path, model)
    made, seed = weights(layers), len(state.segments)
    compile_steps(made.config, sizes, PROMPTS)
    with open_executor(made, sizes) as executor:
        executor.warm()
        executor.capture(contexts=[sizes.max_context])
        mux = Multiplexer(
            executor,
            policy=RandomPolicy(seed, idle=0.05),
            preemption=_preemption(seed),
            stall_timeout_s=20.0,
        )
        raised: Exception | None = None
        try:
            soak(mux, state, seconds, say=say, longest=longest, answer=answer)
            mux.close()
        except Exception as error:  # noqa: BLE001  written down, and raised below
            raised = error
            state.segments[-1].leaks.append(f"{type(error).__name__}: {error}")
        state.save(path)
    yield from _soak_cells(plan, state, layers)
    if raised is not None:
        raise raised


def _soak_cells(plan: RuntimePlan, state: Soak, layers: int) -> Iterator[Cell]:
    segments = state.segments
    about = {
        "segments": len(segments),
        "unjudged_minutes": round(state.unjudged_minutes, 2),
        "requests": sum(segment.requests for segment in segments),
        "tokens": sum(segment.tokens for segment in segments),
        "cancelled": sum(segment.cancelled for segment in segments),
        "preemptions": sum(segment.preemptions for segment in segments),
        "switches": sum(segment.switches for segment in segments),
        "longest_quiet_s": round(max(segment.longest_quiet_s for segment in segments), 3),
        "layers": layers,
    }
    yield plan.cell(SOAK_MINUTES, OURS, round(state.minutes, 2), "minutes") | about
    leaks = state.leaks
    is_known = leaks or any(segment.is_judged for segment in segments)
    value = len(leaks) if is_known else None
    yield plan.cell(SOAK_LEAKS, OURS, value, "leaks") | about | {"leaks": leaks[:8]}


def _preemption(seed: int) -> Preemption:
    return "recompute" if seed % 2 else "keep"
