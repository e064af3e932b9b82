"""`smkern bench server`: what HTTP costs beside the same runtime in its own process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

import click
import torch
from rich.progress import Progress

from smkern.bench.http_streams import Seen, behind_front, watch_streams
from smkern.bench.rows import Cell, cost_cell, target_row
from smkern.bench.runtime.figures import percentile
from smkern.bench.server_soak import soak
from smkern.bench.suite import Output, Run, suite_command
from smkern.errors import OutOfPagesError, SmkernError
from smkern.measure.options import Positive
from smkern.models import SamplingParams
from smkern.runtime.multiplexer import Multiplexer
from smkern.server.messages import Ready
from smkern.server.model import EngineOptions, open_runtime

OP = "server"
TARGET = 1.03
"""TBT over HTTP, p50, over that in process, at most."""
ROUNDS = 3
PROMPT, TOKENS = 1024, 512
"""Tokens of each stream's prompt, and new ones."""


class LostError(SmkernError, RuntimeError):
    """Streams that got another number of tokens than they asked for."""


def in_process(mux: Multiplexer, prompts: Sequence[list[int]], tokens: int) -> Seen:
    """Serve all prompts in a loop of our own."""
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
    times: dict[int, list[float]] = {mux.submit(prompt, params).id: [] for prompt in prompts}
    for output in mux.run():
        if output.error is not None:
            raise output.error
        times[output.id].append(perf_counter())
    return _checked(Seen([*times.values()]), tokens)


def over_http(mux: Multiplexer, ready: Ready, prompts: Sequence[list[int]], tokens: int) -> Seen:
    """Serve all prompts to a client process by way of the server's, as `smkern serve` does."""
    return _checked(behind_front(mux, ready, watch_streams, prompts, tokens), tokens)


def _checked(seen: Seen, tokens: int) -> Seen:
    found = {len(times) for times in seen.times_s}
    if found != {tokens}:
        raise LostError(f"streams of {sorted(found)} tokens, where {tokens} were asked for")
    return seen


def prompts_of(streams: int, length: int, vocab: int) -> list[list[int]]:
    draw = Random(1)
    return [[draw.randrange(vocab) for _ in range(length)] for _ in range(streams)]


def measure(
    options: EngineOptions, name: str, *, streams: int, prompt: int, tokens: int, rounds: int
) -> Iterator[Cell]:
    """Rounds of both, interleaved, behind one that is not counted."""
    found: dict[str, list[Seen]] = {"in_process": [], "http": []}
    with open_runtime(options) as (mux, ready):
        prompts = prompts_of(streams, prompt, ready.vocab_size)
        in_process(mux, prompts, tokens)
        for _ in range(rounds):
            found["in_process"].append(in_process(mux, prompts, tokens))
            found["http"].append(over_http(mux, ready, prompts, tokens))
    about: dict[str, Any] = {"model": name, "streams": streams, "context": prompt}
    for way, rounds_seen in found.items():
        gaps = [seen.gaps_ms() for seen in rounds_seen]
        for quantile in (0.5, 0.99):
            value = median(percentile(one, quantile) for one in gaps)
            cell = cost_cell(OP, f"tbt_p{round(100 * quantile)}", value, "ms", way=way, **about)
            yield cell | {"rounds": [round(percentile(one, quantile), 4) for one in gaps]}
    shares = [seen.cpu_s / seen.took_s for seen in found["http"]]
    yield cost_cell(OP, "server_cpu", median(shares), "cores", way="http", **about)
    per_event = [streams * tokens / seen.events for seen in found["http"]]
    yield cost_cell(OP, "tokens_per_event", median(per_event), "", way="http", **about)


def summarize(cells: Sequence[Cell]) -> dict[str, Any]:
    """The rows that count."""
    p50 = {
        cell["case"]["way"]: cell["value"] for cell in cells if cell["case"]["name"] == "tbt_p50"
    }
    ratio = p50["http"] / p50["in_process"] if len(p50) == 2 else None
    wrong = [cell["value"] for cell in cells if cell["case"]["name"] == "soak"]
    return {
        "http_over_in_process": target_row(ratio, TARGET, len(p50), at_most=True),
        "soak_wrong_requests": target_row(
            sum(wrong) if wrong else None, 0, len(wrong), at_most=True
        ),
    }


@contextmanager
def _room_for(streams: int) -> Iterator[None]:
    """Where the pages do not fit, name the options that they follow from."""
    try:
        yield
    except OutOfPagesError as error:
        raise OutOfPagesError(
            f"the pages of --streams {streams} do not fit: lower it, or name a smaller --model "
            f"({error})"
        ) from error


@suite_command(
    "server",
    click.option("--model", default="qwen3-8b", show_default=True),
    click.option("--streams", type=int, default=64, show_default=True),
    click.option("--soak-s", type=Positive(), default=None,
                 help="Instead: for so long have streams of which a tenth hang up."),
)  # fmt: skip
def command(output: Output, *, model: str, streams: int, soak_s: float | None) -> None:
    """Time tokens of streams over HTTP, and of the same runtime without it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = output.open()
    run = Run(results, output, summarize, Progress())
    if soak_s is not None:
        options = EngineOptions(
            model, tbt_ms=20.0, max_running=streams, max_context=2048, num_pages=64 * streams,
            device=device,
        )  # fmt: skip
        with _room_for(streams):
            run.through([soak_s], lambda s: [soak(options, model, streams=streams, seconds=s)])
        click.echo(str(results.cells[-1]))
        return
    options = EngineOptions(
        model, policy="chunked:512", rungs=(), max_running=streams, max_tokens=1024,
        max_context=PROMPT + TOKENS, num_pages=2 * streams * (-(-(PROMPT + TOKENS) // 16)),
        device=device,
    )  # fmt: skip
    size = {"streams": streams, "prompt": PROMPT, "tokens": TOKENS}
    rounds = 1 if output.quick else ROUNDS
    with _room_for(streams):
        run.through([rounds], lambda x: measure(options, model, **size, rounds=x))
    for cell in results.cells:
        click.echo(
            f"{cell['case'].get('way', ''):10} {cell['case']['name']:16} {cell['value']} "
            f"{cell['unit']}"
        )
