"""`smkern demo`: a bursty workload through the `Multiplexer` under two policies.

With a GPU: some layers of Qwen3-8B's widths, random weights. Without one: all of Qwen3-8B on the
simulated executor, its times those of an H200's table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Console
from rich.table import Table

from smkern.errors import ProfileError, TableError
from smkern.latency import Predictor, TablePredictor
from smkern.models import ModelConfig, SamplingParams, preset
from smkern.policies import Aggregated, FixedSplit, Policy
from smkern.runtime import Multiplexer, SimDevice, SimExecutor, Stats, Timeline
from smkern.runtime.executor import Executor
from smkern.runtime.timeline.trace import Trace

MODEL = "qwen3-8b"
LAYERS = 8
"""Of the model on a GPU: weights are drawn, and graphs captured, in seconds."""
RUNGS = (16, 32, 48, 64)
DECODE_SMS = 32
CHUNK = 512
SIM_SMS = 132
PREFILL_LAUNCH_US = 184.0
"""Host time of a layer of prompts on the simulated device, as measured beside an H200."""
DECODE_LAUNCH_US = 60.0
MAX_RUNNING, MAX_PREFILL, MAX_TOKENS, MAX_CONTEXT = 64, 8, 4096, 8192
PAGE_SIZE, PAGES = 16, 12_000
LEAD_US = 100_000.0
"""Between submitting and the first arrival: hashing the prompts takes a while on a real host."""
WARM_SHARE = 0.5
"""Of the workload, served on a GPU before anything is counted."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A request to come: when, the tokens of its prompt, and those that it draws."""

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
        new: Tokens that a short one draws; long ones draw a third as many.
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

    @property
    def first_burst_us(self) -> float:
        return 0.5e6 * self.burst_s * self.scale


@dataclass(frozen=True, slots=True)
class Served:
    """What came of a workload under a policy."""

    name: str
    stats: Stats
    trace: Trace


def workload(shape: Shape, seed: int = 0) -> list[Asked]:
    """The requests of a workload in their order, the first at 0; a seed gives the same ones."""
    draw = Random(seed)
    found, at_s = [], 0.0
    while at_s < shape.seconds:
        found.append(Asked(1e6 * at_s, draw.randint(*shape.short), draw.randint(*shape.new)))
        at_s += draw.expovariate(1 / shape.every_s)
    at_s = shape.burst_s / 2
    while at_s < shape.seconds:
        for _ in range(shape.burst):
            new = max(1, draw.randint(*shape.new) // 3)
            found.append(Asked(1e6 * at_s, draw.randint(*shape.long), new))
        at_s += shape.burst_s
    found.sort(key=lambda asked: asked.at_us)
    return [Asked(x.at_us * shape.scale, x.prompt, x.new) for x in found]


def policies(predictor: Predictor | None) -> dict[str, Policy]:
    """The two that are compared, by their names in the table."""
    return {
        f"Aggregated({CHUNK})": Aggregated(CHUNK),
        f"FixedSplit({DECODE_SMS})": FixedSplit(DECODE_SMS, predictor=predictor),
    }


def serve(
    executor: Executor, policy: Policy, asked: Sequence[Asked], name: str, *,
    predictor: Predictor | None = None, seed: int = 0,
) -> Served:  # fmt: skip
    """Serve a workload to its end.

    Args:
        executor: Idle; it stays open.
        policy: Decides.
        asked: The requests; their times count from when all are submitted.
        name: Of the policy.
        predictor: Of the timeline's predicted times.
        seed: Of the prompts' tokens.

    Raises:
        SmkernError: a request failed.
    """
    device = executor.device
    timeline = Timeline(device.num_sms, clock=device.now_us, predictor=predictor)
    mux = Multiplexer(executor, policy=policy, timeline=timeline)
    draw, vocab = Random(seed), executor.config.vocab_size
    prompts = [[draw.randrange(vocab) for _ in range(x.prompt)] for x in asked]
    began_us = device.now_us() + LEAD_US
    for one, prompt in zip(asked, prompts, strict=True):
        params = SamplingParams(max_new_tokens=one.new, ignore_eos=True)
        mux.submit(prompt, params, arrival_us=began_us + one.at_us)
    for output in mux.run():
        if output.error is not None:
            raise output.error
    return Served(name, mux.stats(), timeline.trace())


def simulated(shape: Shape, config: ModelConfig | None = None) -> Iterator[Served]:
    """Both policies on the simulated H200, each on its own."""
    predictor = TablePredictor.load(MODEL)
    config = preset(MODEL) if config is None else config
    for name, policy in policies(predictor).items():
        device = SimDevice(
            SIM_SMS, RUNGS, predictor, decode_launch_us=DECODE_LAUNCH_US,
            prefill_launch_us=PREFILL_LAUNCH_US,
        )  # fmt: skip
        executor = SimExecutor(
            config, device, num_pages=PAGES, page_size=PAGE_SIZE, max_running=MAX_RUNNING,
            max_prefill=MAX_PREFILL, max_tokens=MAX_TOKENS, max_context=MAX_CONTEXT,
        )  # fmt: skip
        yield serve(executor, policy, workload(shape), name, predictor=predictor)


def measured(shape: Shape, executor: Any, gpu: str) -> Iterator[Served]:
    """Both policies on an executor that runs a model, one after the other.

    Each serves a part of the workload before it is counted, with other prompts: what launches for
    the first time, and prefixes that are found again, would count otherwise.
    """
    predictor = predictor_for(executor.config, gpu)
    asked = workload(shape)
    part = asked[: max(1, int(WARM_SHARE * len(asked)))]
    for seed, (name, policy) in enumerate(policies(predictor).items()):
        serve(executor, policy, part, name, seed=100 + seed)
        idle = getattr(executor, "idle", None)
        if idle is not None:
            idle()
        yield serve(executor, policy, asked, name, predictor=predictor, seed=seed)


def predictor_for(config: ModelConfig, gpu: str) -> Predictor | None:
    """Of the model on this GPU; None: nobody has timed it there."""
    try:
        return TablePredictor.load(MODEL, gpu).for_model(config)
    except (TableError, ProfileError):
        return None


@contextmanager
def model_on_gpu(config: ModelConfig) -> Iterator[Any]:
    """A `ModelExecutor` of random weights, all that it launches compiled and captured."""
    import smkern
    from smkern.bench.runtime.prepare import budgets_of
    from smkern.bench.runtime.serving import Sizes, open_executor
    from smkern.models import ModelCalls, Weights

    sizes = Sizes(
        (DECODE_SMS,), max_running=MAX_RUNNING, max_prefill=MAX_PREFILL, max_tokens=MAX_TOKENS,
        max_context=MAX_CONTEXT, num_pages=PAGES,
    )  # fmt: skip
    calls = ModelCalls(
        config, PAGE_SIZE, max_tokens=MAX_TOKENS + MAX_RUNNING,
        max_batch=MAX_PREFILL + MAX_RUNNING, max_q_len=MAX_TOKENS,
    )  # fmt: skip
    decode, prefill = budgets_of(sizes.rungs, smkern.device_info().num_sms)
    smkern.warmup(calls=[calls], budgets=[*decode, *prefill[1:]])
    with open_executor(Weights.random(config, device="cuda"), sizes) as executor:
        executor.warm()
        executor.capture()
        yield executor


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
        stats = one.stats
        ttft, tbt = stats.ttft_us, stats.tbt_us
        found.add_row(
            one.name,
            *(f"{us / 1e3:.0f}" for us in (ttft.mean, ttft.p50, ttft.p99)),
            *(f"{us / 1e3:.2f}" for us in (tbt.mean, tbt.p50, tbt.p99)),
            f"{stats.tokens_per_s:.0f}",
            f"{stats.bubble_ratio:.1%}",
        )
    return found


def draw(served: Sequence[Served], out: Path, where: str, shape: Shape) -> list[Path]:
    """A picture of the first burst and a page of everything, for each policy.

    Args:
        served: Under each policy.
        out: A folder.
        where: Whether it was simulated or measured, for the titles.
        shape: Of the workload.
    """
    from smkern.runtime.timeline import page as timeline_page
    from smkern.runtime.timeline import perfetto
    from smkern.runtime.timeline import plot as timeline_plot

    paths = []
    for one in served:
        stem = out / f"timeline-{one.name.split('(')[0].lower()}"
        begin_us = 0.95 * shape.first_burst_us
        title = f"{one.name}, the first burst, {where}"
        paths += [
            timeline_plot.draw(
                one.trace, stem.with_suffix(".png"), begin_us=begin_us,
                end_us=begin_us + 0.5e6 * shape.scale, title=title,
            ),
            timeline_page.write(
                one.trace, stem.with_suffix(".html"), title=f"{one.name}, {where}"
            ),
            perfetto.save(one.trace, stem.with_suffix(".json")),
        ]  # fmt: skip
    return paths


def show(console: Console, out: Path, gpu: str | None) -> list[Served]:
    """Serve, print the table, write the pictures.

    Args:
        console: Where to print.
        out: A folder for the pictures.
        gpu: The GPU's name; None: simulate.

    Raises:
        SmkernError: a request failed.
    """
    shape = Shape()
    if gpu is None:
        where = "simulated: an H200 by its table"
        console.print(f"All of {MODEL} on the simulated executor, {len(workload(shape))} requests.")
        served = list(simulated(shape))
    else:
        where = f"{LAYERS} layers on an {gpu}"
        full = preset(MODEL)
        shape = Shape(scale=LAYERS / full.num_layers)
        console.print(f"{LAYERS} layers of {MODEL}, random weights (compiles first) ...")
        with model_on_gpu(full.replace(num_layers=LAYERS)) as executor:
            served = list(measured(shape, executor, gpu))
    console.print(table(served, f"Bursts of long prompts beside decode, ms ({where})"))
    for path in draw(served, out, where, shape):
        if path.suffix != ".json":
            console.print(f"Timeline: {path}")
    console.print(f"For ui.perfetto.dev, or smkern timeline: {out}/timeline-*.json")
    return served
