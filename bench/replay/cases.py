"""What is replayed: models and their limits, traces, orders, and each policy's settings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from smkern.bench.replay.oracle import ORACLE
from smkern.bench.replay.stock import ON_STOCK
from smkern.bench.suite import known_names
from smkern.device import gpu_folder
from smkern.errors import ArgumentError
from smkern.policies import ORDERS, POLICIES
from smkern.profile import DEFAULT, load_profile
from smkern.replay import GENERATORS, Sizes, Trace, load_trace, sizes_for

Cell = dict[str, Any]

LIMITS_MS: dict[str, tuple[float, ...]] = {
    "qwen3-8b": (10.0, 15.0, 30.0, 50.0),
    "qwen3-14b": (20.0, 30.0, 50.0),
    "qwen3-32b": (30.0, 40.0, 80.0, 100.0),
    "qwen3-30b-a3b": (10.0, 15.0, 30.0, 50.0),
}
FILES = {
    "azure-code": "azure_code_2023_first_half.csv",
    "azure-conversation": "azure_conv_2023_first_half.csv",
    "mooncake-conversation": "mooncake_conversation_first_half.jsonl",
}
TRACES = (*FILES, "openthoughts-like", "writing-like", "rewriting-like")
"""Of the goodput table: three that were recorded, and generated ones of long outputs."""
FOLDER = Path("build") / "traces"
"""Where recorded traces are looked for: they are never part of the project."""
GENERATED = 6000
"""Requests of a generated trace."""
RUNGS = (16, 24, 28, 32, 40, 44, 48, 64)
"""Of replays on a GPU: graphs are captured for these, and all that prompts launch beside them is
compiled."""

SECONDS = 120.0
LEAST_REQUESTS = 600
"""Fewer, and 1% of them are too few to be counted."""
LONG = 0.99
"""Share of a trace's requests whose outputs a window is long enough for at the limit: in a shorter
one the requests that decode, and the pages that they hold, are still growing."""

IN_TURNS = (0.04, 0.08, 0.12)
"""Shares of the limit left to what takes longer than predicted, where policies share the device in
time: forwards are as long as predicted, within some percent."""
BESIDE = (0.08, 0.12, 0.2, 0.3, 0.4, 0.5)
"""The same where they split it: most predict steps without what runs beside them, which makes them
up to half as long again, and where both sides wait for each other a gap is longer still."""
MARGINS = {
    **dict.fromkeys(("chunked", "temporal"), IN_TURNS),
    **dict.fromkeys(("duetserve", "drift", "muxwise", "bullet"), BESIDE),
}
"""Margins that are tried, by policy."""
FEWER_TOKENS = 2048
"""New tokens of an iteration of DuetServe, beside the paper's 8192."""
BATCHES = ("static_split", "temporal", "drift", "muxwise")
"""Policies whose batches of prompts have so many tokens, as they are set, whatever the model."""
LARGER_BATCHES = {"qwen3-30b-a3b": 4096, "qwen3-8b-fp8": 4096}
"""Tokens of a batch that `Adaptive` takes where those of the others by default are fewer."""
CHUNKS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)
SPLITS = (16, 20, 24, 32, 40, 48, 64)


@dataclass(frozen=True, slots=True)
class Case:
    """A cell of the table: one policy on one trace under one limit.

    Attributes:
        model: A preset's name.
        trace: A name of `TRACES`, a generator's, or a path.
        tbt_slo_ms: Limit of p99 of the time between tokens; None for a bound, which has no gaps.
        order: In which order requests wait.
        policy: A name of `POLICIES` with its settings, or "bound".
        pace: How many times as long as predicted launches take on the chip, see `SimServer`. None:
            as predicted, which is what the table is of.
    """

    model: str
    trace: str
    tbt_slo_ms: float | None
    order: str
    policy: str
    pace: float | None = None

    def cell(self, **about: Any) -> Cell:
        """A cell of a results file."""
        case: Cell = {"model": self.model, "trace": trace_name(self.trace)}
        case |= {"tbt_slo_ms": self.tbt_slo_ms, "order": self.order}
        if self.pace is not None:
            case["pace"] = self.pace
        return {"op": "replay", "case": case | about, "provider": self.policy}


def beyond_table(cell: Cell) -> set[str]:
    """What a cell's case has that those of the goodput table have not: one rate, the requests of a
    short window, the pace of one chip."""
    return {"rate_rps", "requests", "pace"}.intersection(cell["case"])


def trace_name(trace: str) -> str:
    """What a cell calls a trace: the name of a file without its folder."""
    return Path(trace).stem if Path(trace).suffix in (".csv", ".jsonl") else trace


@lru_cache(maxsize=8)
def trace_named(trace: str, folder: Path) -> Trace:
    """A trace by its name in tables, by a generator's, or from a path."""
    return load_trace(trace_file(trace, folder) or trace, requests=GENERATED)


def trace_file(trace: str, folder: Path) -> Path | None:
    """Where a recorded trace lies, by its name in tables or from a path; None of a generated."""
    if trace in FILES:
        return folder / FILES[trace]
    return Path(trace) if trace_name(trace) != trace else None


def sizes_of(model: str, gpu: str = DEFAULT, rungs: tuple[int, ...] = ()) -> Sizes:
    """What serves a model in a replay, on a GPU of that name; (): with its default rungs."""
    from smkern.models.presets import preset

    sizes = sizes_for(preset(model), load_profile(gpu_folder(gpu)).info)
    return replace(sizes, rungs=rungs) if rungs else sizes


def requests_for(
    trace: Trace,
    rate_rps: float,
    tbt_ms: float,
    seconds: float = SECONDS,
    least: int = LEAST_REQUESTS,
) -> int:
    """Requests of a replay: of so many seconds at about a rate, or as long requests take."""
    outputs = sorted(x.output_tokens for x in trace.requests)
    seconds = max(seconds, outputs[int(LONG * len(outputs))] * 1e-3 * tbt_ms)
    return max(least, round(rate_rps * seconds))


def settings_of(
    policy: str, chunk: int | None = None, model: str = "", splits: Sequence[int] = SPLITS
) -> list[str]:
    """What of a policy is tried: itself, then its settings, the likeliest first.

    Args:
        policy: A name, or a name with settings, which is all that is tried.
        chunk: The chunk that the predictor finds under the limit; sizes far from it are left out.
        model: A preset's name: larger batches are tried, too, where its prompts need them.
        splits: SMs of decode's side of fixed splits.
    """
    found = [policy, *(f"{policy}:margin={margin}" for margin in MARGINS.get(policy, ()))]
    if policy == "static_split":
        found = [f"{policy}:{sms}" for sms in splits]
    if policy in BATCHES and model in LARGER_BATCHES:
        found += [f"{spec}:max_prefill_tokens={LARGER_BATCHES[model]}" for spec in found]
    if policy == "chunked":
        near = [x for x in CHUNKS if chunk is None or chunk / 2.1 <= x <= 4.2 * chunk]
        found += [f"{policy}:{size}" for size in near]
    if policy == "duetserve":
        found += [f"{spec}:token_budget={FEWER_TOKENS}" for spec in found]
    return found


def checked_orders(names: Sequence[str]) -> tuple[str, ...]:
    known_names(names, ORDERS, "order")
    return tuple(names)


def checked_policies(
    names: Sequence[str], among: Iterable[str] = (*POLICIES, *ON_STOCK, ORACLE)
) -> tuple[str, ...]:
    known_names([name.split(":")[0] for name in names], among, "policy")
    return tuple(names)


def checked_traces(names: Sequence[str]) -> tuple[str, ...]:
    parts = [part for name in names if not Path(name).suffix for part in name.split("+")]
    known_names(parts, (*FILES, *GENERATORS), "trace without .csv or .jsonl")
    paths: dict[str, str] = {}
    for path in names:
        other = paths.setdefault(trace_name(path), path)
        if other != path:
            raise ArgumentError(
                f"traces {other} and {path} are both called {trace_name(path)!r} in results: "
                "rename one of the files"
            )
    return tuple(names)
