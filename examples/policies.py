"""A bursty workload through the `Multiplexer` under two policies: a table, a picture, a verdict.

Short prompts come all the time, and every so often long ones together. With a GPU some layers of
Qwen3-8B serve them, with random weights; without one all of Qwen3-8B on the simulated executor,
whose times are those of an H200's table. `python examples/policies.py [folder]`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from numpy import percentile
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import smkern
from smkern.errors import DeviceError, ProfileError, TableError
from smkern.kv import KvPool, KvSizes
from smkern.latency import Predictor, TablePredictor
from smkern.models import Decoder, ModelCalls, ModelConfig, SamplingParams, Weights, preset
from smkern.policies import Chunked, Policy, StaticSplit
from smkern.runtime import Stats, Timeline

MODEL = "qwen3-8b"
LAYERS = 8
"""Layers of the model on a GPU: weights are drawn, and graphs captured, in seconds."""
RUNGS = (16, 32, 48, 64)
DECODE_SMS = 32
CHUNK = 512
SIM_SMS = 132
PREFILL_LAUNCH_US = 184.0
"""Host time of a layer of prompts on the simulated device, as measured beside an H200."""
DECODE_LAUNCH_US = 60.0
SIZES: Any = {"max_running": 64, "max_prefill": 8, "max_tokens": 4096, "max_context": 8192}
PAGE_SIZE, PAGES = 16, 12_000
LEAD_US = 100_000.0
"""Between submitting and the first arrival: hashing the prompts takes a while on a real host."""
WARM_SHARE = 0.5
"""Share of the workload that a GPU serves before anything is counted."""
SAME = 0.01
"""Figures no further apart are the same."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to come: when, the tokens of its prompt, and those that it generates."""

    at_us: float
    prompt: int
    new: int


@dataclass(frozen=True, slots=True)
class Shape:
    """A workload: short prompts come all the time, and every so often long ones together.

    Attributes:
        seconds: How long requests come.
        every_s: Mean time between two short ones.
        burst_s: Time between two bursts; the first comes after half of it.
        burst: Requests of a burst.
        short, long: Tokens of a prompt that comes alone, and in a burst: the least and the most.
        new: Tokens that a short one generates; long ones generate a third as many.
        scale: All times are multiplied by it, for models with fewer layers.
    """

    seconds: float = 6.0
    every_s: float = 0.035
    burst_s: float = 1.5
    burst: int = 6
    short: tuple[int, int] = (64, 1024)
    long: tuple[int, int] = (2048, 4096)
    new: tuple[int, int] = (64, 256)
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class Served:
    """What came of a workload under a policy.

    Attributes:
        name: The policy.
        stats: The runtime's own figures.
        timeline: What ran where.
        tokens_us: When each request arrived and when its caller got each of its tokens, from the
            first arrival on.
    """

    name: str
    stats: Stats
    timeline: Timeline
    tokens_us: list[list[float]]

    @property
    def ttft_ms(self) -> list[float]:
        """From each request's arrival to its first token."""
        return [(times[1] - times[0]) / 1e3 for times in self.tokens_us]

    @property
    def tbt_ms(self) -> list[float]:
        """Every gap between two tokens of a request."""
        return [(b - a) / 1e3 for times in self.tokens_us for a, b in pairwise(times[1:])]

    @property
    def tbt_p99_ms(self) -> float:
        return float(percentile(self.tbt_ms, 99))

    def step(self) -> tuple[float, str]:
        """p99 of a step on the decode lane, ms; and that with the SMs that steps had, in words."""
        spans = self.timeline.trace().lane("decode")
        times_ms = [span.duration_us / 1e3 for span in spans]
        p50, p99 = map(float, percentile(times_ms, (50, 99)))
        sms = sorted({span.place.num_sms for span in spans})
        where = f"{sms[0]} to {sms[-1]}" if len(sms) > 1 else f"{sms[0]}"
        return p99, f"{p50:.1f} ms at p50 and {p99:.1f} at p99 on {where} SMs"


def workload(shape: Shape, seed: int = 0) -> list[Arrival]:
    """The requests of a workload in their order, the first at 0; a seed gives the same ones."""
    draw = Random(seed)
    found, at_s = [], 0.0
    while at_s < shape.seconds:
        found.append(Arrival(1e6 * at_s, draw.randint(*shape.short), draw.randint(*shape.new)))
        at_s += draw.expovariate(1 / shape.every_s)
    at_s = shape.burst_s / 2
    while at_s < shape.seconds:
        for _ in range(shape.burst):
            new = max(1, draw.randint(*shape.new) // 3)
            found.append(Arrival(1e6 * at_s, draw.randint(*shape.long), new))
        at_s += shape.burst_s
    found.sort(key=lambda one: one.at_us)
    return [Arrival(x.at_us * shape.scale, x.prompt, x.new) for x in found]


def policies(predictor: Predictor | None) -> dict[str, Policy]:
    """The two that are compared, by their names in the table."""
    return {
        f"Chunked({CHUNK})": Chunked(CHUNK),
        f"StaticSplit({DECODE_SMS})": StaticSplit(DECODE_SMS, predictor=predictor),
    }


def serve(
    executor: Any, policy: Policy, arrivals: Sequence[Arrival], name: str, *,
    predictor: Predictor | None = None, seed: int = 0, console: Console | None = None,
) -> Served:  # fmt: skip
    """Serve a workload to its end.

    Args:
        executor: Idle; it stays open.
        policy: Decides.
        arrivals: The requests; their times count from when all are submitted.
        name: The policy's name.
        predictor: Predicts the timeline's launches.
        seed: Seed of the prompts' tokens.
        console: Where progress is drawn.

    Raises:
        SmkernError: a request failed.
    """
    device = executor.device
    timeline = Timeline(device.num_sms, clock=device.now_us, predictor=predictor)
    mux = smkern.Multiplexer(executor, policy=policy, timeline=timeline)
    draw, vocab = Random(seed), executor.config.vocab_size
    prompts = [[draw.randrange(vocab) for _ in range(x.prompt)] for x in arrivals]
    began_us = device.now_us() + LEAD_US
    tokens_us: dict[int, list[float]] = {}
    for one, prompt in zip(arrivals, prompts, strict=True):
        params = SamplingParams(max_new_tokens=one.new, ignore_eos=True)
        handle = mux.submit(prompt, params, arrival_us=began_us + one.at_us)
        tokens_us[handle.id] = [one.at_us]
    silent = console is None or not console.is_terminal
    with Progress(console=console, transient=True, disable=silent) as progress:
        task = progress.add_task(name, total=len(arrivals))
        for output in mux.run():
            if output.error is not None:
                raise output.error
            tokens_us[output.id].append(device.now_us() - began_us)
            if output.completion is not None:
                progress.advance(task)
    mux.step()  # finds nothing to do: graphs that were missed are captured
    return Served(name, mux.stats(), timeline, list(tokens_us.values()))


def simulated(shape: Shape, console: Console | None = None) -> Iterator[Served]:
    """Both policies on the simulated H200, each on its own."""
    predictor = TablePredictor.load(MODEL)
    for name, policy in policies(predictor).items():
        device = smkern.SimDevice(
            SIM_SMS, RUNGS, predictor, decode_launch_us=DECODE_LAUNCH_US,
            prefill_launch_us=PREFILL_LAUNCH_US,
        )  # fmt: skip
        executor = smkern.SimExecutor(
            preset(MODEL), device, num_pages=PAGES, page_size=PAGE_SIZE, **SIZES
        )
        yield serve(executor, policy, workload(shape), name, predictor=predictor, console=console)


def measured(
    shape: Shape, executor: Any, gpu: str, console: Console | None = None
) -> Iterator[Served]:
    """Both policies on an executor that runs a model, one after the other.

    Each serves a part of the workload before it is counted, with other prompts: what launches for
    the first time, and prefixes that are found again, would count otherwise.
    """
    predictor = predictor_for(executor.config, gpu)
    arrivals = workload(shape)
    part = arrivals[: max(1, int(WARM_SHARE * len(arrivals)))]
    for seed, (name, policy) in enumerate(policies(predictor).items()):
        serve(executor, policy, part, f"{name}, warming up", seed=100 + seed, console=console)
        yield serve(
            executor, policy, arrivals, name, predictor=predictor, seed=seed, console=console
        )


def predictor_for(config: ModelConfig, gpu: str) -> Predictor | None:
    """Predicts the model's launches on this GPU; None: nobody has timed it there."""
    try:
        return TablePredictor.load(MODEL, gpu).for_model(config)
    except (TableError, ProfileError):
        return None


def on_gpu(shape: Shape, config: ModelConfig, gpu: str, console: Console) -> list[Served]:
    """Both policies on a model of random weights, all that it launches compiled and captured."""
    calls = ModelCalls(
        config, PAGE_SIZE, max_tokens=SIZES["max_tokens"] + SIZES["max_running"],
        max_batch=SIZES["max_prefill"] + SIZES["max_running"], max_q_len=SIZES["max_tokens"],
    )  # fmt: skip
    kv = KvSizes(config.num_layers, config.num_kv_heads, config.head_dim, PAGE_SIZE, config.dtype)
    with smkern.ladder([DECODE_SMS]) as ladder:
        split = ladder.split(decode=DECODE_SMS)
        smkern.warmup(
            calls=[calls], budgets=[smkern.device_info().num_sms, split.decode, split.prefill]
        )
        decoder = Decoder(
            config, Weights.random(config, device="cuda"), max_position=SIZES["max_context"]
        )
        # what is timed must be computed: no prefix is found again
        pool = KvPool(kv, num_pages=PAGES, device="cuda", reuse=False)
        executor = smkern.ModelExecutor(decoder, pool, ladder=ladder, **SIZES)
        try:
            executor.warm()
            executor.capture()
            return list(measured(shape, executor, gpu, console))
        finally:
            executor.synchronize()
            executor.close()


def table(served: Sequence[Served], title: str) -> Table:
    """A row a policy: waits, gaps between tokens, throughput, bubbles."""
    found = Table(title=title, box=None)
    found.add_column("policy", no_wrap=True)
    waits = ("mean", "p50", "p99")
    for column in (*(f"TTFT {x}" for x in waits), *(f"TBT {x}" for x in waits)):
        found.add_column(column, justify="right")
    for column in ("tokens/s", "bubbles"):
        found.add_column(column, justify="right")
    for one in served:
        figures = [
            f"{value:.{digits}f}"
            for values, digits in ((one.ttft_ms, 0), (one.tbt_ms, 2))
            for value in (fmean(values), *percentile(values, (50, 99)))
        ]
        rate, bubbles = one.stats.tokens_per_s, one.stats.bubble_ratio
        found.add_row(one.name, *figures, f"{rate:.0f}", f"{bubbles:.1%}")
    return found


def verdict(first: Served, second: Served) -> str:
    """Who is better at what, by the figures alone, and where the longer p99 of TBT comes from."""
    pair = (first, second)
    better: list[list[str]] = [[], []]
    even = []
    ttft, tbt = ([fmean(one.ttft_ms) for one in pair], [one.tbt_p99_ms for one in pair])
    rates = [one.stats.tokens_per_s for one in pair]
    for label, unit, values, sign in (
        ("mean TTFT", "ms", ttft, 1),
        ("p99 of TBT", "ms", tbt, 1),
        ("throughput", "tokens/s", rates, -1),
    ):
        if abs(values[0] - values[1]) <= SAME * max(values):
            even.append(label)
            continue
        at = 0 if sign * values[0] < sign * values[1] else 1
        figures = [f"{values[x]:.{0 if values[x] >= 100 else 1}f}" for x in (at, 1 - at)]
        better[at].append(f"{label} ({' against '.join(figures)} {unit})")
    best = 0 if len(better[0]) > len(better[1]) else 1
    said = [f"{pair[best].name} beats {pair[1 - best].name} in {_listed(better[best])}"]
    if not better[best]:
        said = [f"{first.name} and {second.name} do not differ"]
    if better[1 - best]:
        said.append(f"but loses in {_listed(better[1 - best])}")
    if even and len(even) < 3:
        said.append(f"with the same {_listed(even)}")
    return f"{', '.join(said)}. {_tail(*pair)}"


def _tail(first: Served, second: Served) -> str:
    """Whether the longer p99 of TBT is that of the steps themselves, or of waits between them."""
    fast, slow = sorted((first, second), key=lambda one: one.tbt_p99_ms)
    (slow_ms, slow_step), (fast_ms, fast_step) = slow.step(), fast.step()
    steps = f"a step of {slow.name} takes {slow_step}, one of {fast.name} {fast_step}"
    if slow_ms > (1 + SAME) * fast_ms:
        return f"{slow.name}'s tail is that of its steps: {steps}."
    return f"{slow.name}'s tail is not that of its steps, so tokens waited between them: {steps}."


def _listed(items: Sequence[str]) -> str:
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def draw(served: Sequence[Served], path: Path, heading: str) -> Path:
    """All requests above, all gaps between tokens below, a column a policy on the same axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(heading, fontsize=12)
    axes = figure.subplots(2, len(served), sharex=True, sharey="row", squeeze=False)
    for column, one in enumerate(served):
        requests, gaps = axes[0][column], axes[1][column]
        requests.set_title(one.name, fontsize=11)
        rows = range(len(one.tokens_us))
        arrived, first, last = ([x[at] / 1e3 for x in one.tokens_us] for at in (0, 1, -1))
        requests.hlines(rows, arrived, first, color="#e0a030", label="waits for its first token")
        requests.hlines(rows, first, last, color="#1b6ca8", label="generates")
        times = [at / 1e3 for x in one.tokens_us for at in x[2:]]
        gaps.plot(
            times, one.tbt_ms, ".", markersize=1.5, alpha=0.4, color="#1b6ca8", rasterized=True
        )
        label = f"p99: {one.tbt_p99_ms:.1f} ms"
        gaps.axhline(one.tbt_p99_ms, color="#c8553d", linewidth=1, label=label)
        gaps.set_xlabel("ms since the first request", fontsize=9)
        for axis in (requests, gaps):
            axis.legend(loc="upper left", fontsize=8)
            axis.tick_params(labelsize=8)
    axes[0][0].set_ylabel("request, by arrival", fontsize=9)
    axes[1][0].set_ylabel("time between tokens, ms", fontsize=9)
    axes[1][0].set_ylim(bottom=0)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return path


def show(console: Console, out: Path, gpu: str | None) -> list[Served]:
    """Serve under both policies; print the table and the verdict, write the picture.

    Args:
        console: Where to print.
        out: A folder for the picture and the timelines.
        gpu: The GPU's name; None: simulate.

    Raises:
        SmkernError: a request failed.
    """
    config, shape = preset(MODEL), Shape()
    if gpu is None:
        where = "simulated: an H200 by its table"
        console.print(f"All of {MODEL} on the simulated executor, {len(workload(shape))} requests.")
        served = list(simulated(shape, console))
    else:
        where = f"{LAYERS} layers on an {gpu}"
        shape = Shape(scale=LAYERS / config.num_layers)
        console.print(f"{LAYERS} layers of {MODEL}, random weights (compiles first) ...")
        served = on_gpu(shape, config.replace(num_layers=LAYERS), gpu, console)
    heading = f"Bursts of long prompts beside decode ({where})"
    console.print(table(served, f"{heading}, ms"))
    console.print(f"[bold]Verdict:[/] {verdict(*served)}", highlight=False)
    for one in served:
        one.timeline.save(out / f"timeline-{one.name.split('(')[0].lower()}.json")
    console.print(f"Picture: {draw(served, out / 'policies.png', heading)}")
    console.print(f"For ui.perfetto.dev, or smkern timeline: {out}/timeline-*.json")
    return served


def main(out: Path) -> None:
    """Serve on the GPU, or simulate where there is none."""
    out.mkdir(parents=True, exist_ok=True)
    try:
        gpu = smkern.device_info().name
    except DeviceError:
        gpu = None
    show(Console(), out, gpu)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "demo"))
