"""Whether serving is right: tokens against each request alone, and a soak in segments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from smkern.bench.runtime.cases import (
    MISMATCHES,
    OURS,
    SOAK_LEAKS,
    SOAK_MINUTES,
    Cell,
    RuntimePlan,
)
from smkern.bench.runtime.equality import each_alone, through, workload
from smkern.bench.runtime.prepare import compile_steps
from smkern.bench.runtime.random_policy import RandomPolicy
from smkern.bench.runtime.serving import Sizes, open_executor
from smkern.bench.runtime.soak import Soak, soak
from smkern.models import Decoder, Weights
from smkern.runtime.books import Preemption
from smkern.runtime.multiplexer import Multiplexer

SIZES = Sizes(
    (16, 48, 96), max_running=48, max_prefill=8, max_tokens=2048, max_context=1024,
    num_pages=320, batch_invariant=True,
)  # fmt: skip
SOAK_SIZES = Sizes(
    (16, 48, 96), max_running=64, max_prefill=8, max_tokens=2048, max_context=1024, num_pages=400
)
PROMPTS = (16, 64, 128, 256, 512, 1024, 2048)
SEEDS = (1, 2)


@dataclass(frozen=True, slots=True)
class Equality:
    """A workload, and the model that it is for.

    Attributes:
        requests: How many.
        layers: Of the model; None: all of the preset's.
        sizes: Of the executor.
        longest: Tokens of a prompt, at most.
    """

    requests: int
    layers: int | None = None
    sizes: Sizes = SIZES
    longest: int = 600


EQUALITIES = (Equality(100), Equality(2000, layers=4))


def token_cells(
    plan: RuntimePlan, weights: Callable[[int | None], Weights], wanted: Equality
) -> Iterator[Cell]:
    """Tokens that differ from those of each request alone, in the batch-invariant mode.

    Args:
        plan: Whose model.
        weights: weights(layers).
        wanted: What is served; each part by a policy of another seed and way to preempt.
    """
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
    more = {} if wanted.layers is None else {"layers": wanted.layers}
    value = sum(verdict.mismatches + len(verdict.failed) for verdict in verdicts)
    yield plan.cell(MISMATCHES, OURS, value, "tokens", **more) | {
        "requests": len(asked),
        "tokens": sum(verdict.tokens for verdict in verdicts),
        "cancelled": sum(verdict.cancelled for verdict in verdicts),
        "preemptions": preemptions,
        "switches": switches,
        "failed": [reason for verdict in verdicts for reason in verdict.failed][:4],
        "wrong": [list(pair) for verdict in verdicts for pair in verdict.wrong][:8],
        "seconds": round(sum(verdict.seconds for verdict in verdicts), 1),
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
    """One more segment of a soak; what the file has of it is carried on, and written back."""
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
        soak(mux, state, seconds, say=say, longest=longest, answer=answer)
        mux.close()
    state.save(path)
    segments = state.segments
    about = {
        "segments": len(segments),
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
    yield plan.cell(SOAK_LEAKS, OURS, len(leaks), "leaks") | about | {"leaks": leaks[:8]}


def _preemption(seed: int) -> Preemption:
    return "recompute" if seed % 2 else "keep"
