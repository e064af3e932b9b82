"""Cells of replays: the goodput of a case, and what service was like at a rate."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from pathlib import Path
from typing import Any

from smkern.bench.replay.cases import (
    FOLDER,
    LEAST_REQUESTS,
    MARGINS,
    SECONDS,
    SPLITS,
    Case,
    Cell,
    requests_for,
    settings_of,
    sizes_of,
    trace_named,
)
from smkern.bench.replay.oracle import ORACLE, Oracle, OracleServer
from smkern.bench.replay.stock import ON_STOCK, STOCK, stock_predictor
from smkern.errors import ArgumentError
from smkern.latency.predictor import Predictor
from smkern.policies import Policy
from smkern.profile import DEFAULT
from smkern.replay import (
    Goodput,
    Report,
    Served,
    SimServer,
    Slo,
    Trace,
    capacity_rps,
    goodput,
    policy_named,
    replay,
)
from smkern.replay.run import Server
from smkern.replay.trace import Arrivals, Overlong

BOUND = "bound"
BOUND_MS = 1e5
"""A limit of gaps where there are none."""
MAX_REQUESTS = 1_000_000
"""Of a replay: a simulated one of as many takes minutes."""
BEATS = 1.01
"""Another setting must be better by so much at once, or it is left."""


CHUNK_AT_MS = 15.0
"""Chunks are tried near what fits about: 256 tokens at this limit of an 8B model, and in
proportion."""
PREHEAT_SEED = 1000
FLOOR = 0.05
"""Share of a device's capacity below which no rate is tried: 0 is the result."""


@dataclass(frozen=True, slots=True)
class How:
    """How cases are replayed.

    Attributes:
        seeds: One search each.
        arrivals: "poisson" or "recorded".
        seconds: Length of a replay, about.
        least: Requests of one, at least.
        rungs: SMs of the decode side of each split; (): the default ones.
        overlong: What becomes of requests longer than the context.
        folder: Where recorded traces lie.
        precision: Of a goodput.
        gpu: What is simulated, as its tables are named.
    """

    seeds: tuple[int, ...] = (0,)
    arrivals: Arrivals = "poisson"
    seconds: float = SECONDS
    least: int = LEAST_REQUESTS
    rungs: tuple[int, ...] = ()
    overlong: Overlong = "drop"
    folder: Path = FOLDER
    precision: float = 0.02
    gpu: str = DEFAULT


def simulated(
    model: str,
    rungs: tuple[int, ...] = (),
    *,
    gpu: str = DEFAULT,
    policy: str = "",
    predictor: Predictor | None = None,
    pace: float = 1.0,
) -> SimServer:
    """The simulated server of a model on a GPU, of certain rungs, with a predictor's times (None:
    the default one's) or, as the policy wants, those of stock kernels; policies that want the same
    share one."""
    kind = OracleServer if policy == ORACLE else SimServer
    if predictor is not None:
        return _made(kind, model, rungs, gpu, predictor, pace)
    return _shared(kind, model, rungs, gpu, policy in ON_STOCK, pace)


@lru_cache(maxsize=4)
def _shared(
    kind: type[SimServer], model: str, rungs: tuple[int, ...], gpu: str, is_stock: bool, pace: float
) -> SimServer:
    predictor = stock_predictor(model, gpu) if is_stock else None
    return _made(kind, model, rungs, gpu, predictor, pace)


def _made(
    kind: type[SimServer],
    model: str,
    rungs: tuple[int, ...],
    gpu: str,
    predictor: Predictor | None,
    pace: float,
) -> SimServer:
    sizes = sizes_of(model, gpu, rungs)
    return kind(model, gpu=gpu, predictor=predictor, sizes=sizes, pace=pace)


def server_of(case: Case, how: How) -> SimServer:
    """The simulated server that a case is replayed on."""
    pace = 1.0 if case.pace is None else case.pace
    return simulated(case.model, how.rungs, gpu=how.gpu, policy=case.policy, pace=pace)


def prepared(case: Case, how: How, server: Server) -> tuple[Trace, float, int]:
    """A case's trace as it fits the model, about how much of it a device serves a second, and the
    requests of a replay."""
    trace = trace_named(case.trace, how.folder).fitting(server.max_context, how.overlong)
    rate = capacity_rps(trace, server.predictor, server.num_sms, server.num_layers)
    requests = requests_for(trace, rate, case.tbt_slo_ms or 0.0, how.seconds, how.least)
    if requests > MAX_REQUESTS:
        raise ArgumentError(
            f"{how.seconds:g} s and gaps of {case.tbt_slo_ms:g} ms take {requests} requests to "
            f"fail: give less of both, at most {MAX_REQUESTS:,} are replayed"
        )
    return trace, rate, requests


def maker(case: Case, spec: str, server: Server) -> Callable[[], Policy]:
    """Makes the policy of a case with some settings, a new one for each replay."""
    limit, predictor = case.tbt_slo_ms or BOUND_MS, server.predictor

    def make(spec: str = spec) -> Policy:
        return policy_named(spec, predictor, tbt_slo_ms=limit, order=case.order)

    if not isinstance(server, OracleServer):
        return make
    ways = [f"chunked:margin={margin}" for margin in MARGINS["chunked"]]
    ways += [f"static_split:{rung}" for rung in server.sizes.rungs]
    return lambda: Oracle([make(way) for way in ways], tbt_slo_ms=limit)


def specs(case: Case, rungs: Sequence[int] = ()) -> list[str]:
    """What is tried of a case's policy, on rungs (none: the default ones).

    For a bound ways to order, cut and preempt prompts where nothing decodes, so that all have the
    whole device.
    """
    splits = rungs or SPLITS
    if case.policy == BOUND or case.tbt_slo_ms is None:
        split = f"static_split:{splits[0]}"
        return ["chunked:8192", split, f"{split}:preempt_shorter_than=2048", "adaptive"]
    policy = case.policy.removeprefix(STOCK)
    size = {"qwen3-14b": 0.55, "qwen3-32b": 0.25}.get(case.model, 1.0)
    chunk = round(256 * size * case.tbt_slo_ms / CHUNK_AT_MS)
    return settings_of(policy, chunk, case.model, splits)


def goodput_cell(
    case: Case, how: How, *, spec: str = "", near_rps: float | None = None,
    least_rps: float = 0.0, server: Server | None = None,
    make: Callable[[], Policy] | None = None,
) -> Cell | None:  # fmt: skip
    """The goodput of a case under one of its policy's settings.

    Args:
        case: What is replayed.
        how: How.
        spec: The policy's name with settings; "": the case's policy.
        near_rps: Where the search begins: a related case's goodput.
        least_rps: Of another setting; where this one does not keep a higher rate, None is returned
            after one replay.
        server: What serves; None: simulated.
        make: Makes what decides in it; None: what `spec` names.
    """
    began = time.monotonic()
    server = server or server_of(case, how)
    spec = spec or specs(case, how.rungs)[0]
    trace, rate, requests = prepared(case, how, server)
    is_bound = case.policy == BOUND
    slo = Slo(BOUND_MS if case.tbt_slo_ms is None else case.tbt_slo_ms)
    if is_bound:
        trace, rate = trace.without_outputs(), 1.5 * rate
    make = make or maker(case, spec, server)
    if least_rps:
        drawn = trace.thinned(requests, how.seeds[0])
        timed = drawn.at_rate(BEATS * least_rps, how.arrivals, how.seeds[0])
        if not slo.is_met(replay(timed, server, make(), slo=slo, drain=False)):
            return None
    found = goodput(
        make, trace, server, slo, start_rps=near_rps or rate, seeds=how.seeds,
        arrivals=how.arrivals, requests=requests, precision=how.precision, floor_rps=FLOOR * rate,
    )  # fmt: skip
    figures = [figures_of(served, slo) for served in found.served if served is not None]
    cell = case.cell() | {"goodput_rps": round(found.rate_rps, 4)}
    cell |= {"by_seed": [round(x, 4) for x in found.by_seed], "seeds": list(how.seeds)}
    cell |= {"settings": spec, "arrivals": how.arrivals, "n": requests}
    cell |= {"simulated": isinstance(server, SimServer), "confirmed": None}
    cell |= {"overlong": trace.overlong, "replays": found.replays}
    cell |= figures[0] if figures else _unmet(found, slo)
    return cell | {"host_s": round(time.monotonic() - began, 1)}


def _unmet(found: Goodput, slo: Slo) -> dict[str, Any]:
    """What the lowest rate that was tried was like, where none keeps the limits."""
    lowest = found.failed[0]
    if lowest is None:
        return {"slo_attainment": None}
    report = Report.of(lowest, slo)
    return {
        "slo_attainment": None,
        "lowest_rps": round(lowest.trace.rate_rps, 4),
        "lowest_tbt_p99_ms": report.to_json()["tbt_ms"]["p99"],
        "lowest_stopped": lowest.stopped,
    }


def figures_of(served: Served, slo: Slo) -> dict[str, Any]:
    """What service was like, as a cell has it."""
    report = Report.of(served, slo)
    found = report.to_json()
    kept = min(report.tbt_kept or 0.0, report.ttft_kept)
    taken: tuple[str, ...] = (
        "unfinished",
        "duration_s",
        "requests_per_s",
        "tokens_per_s",
        "ttft_ms",
        "tbt_ms",
        "worst_gap_ms",
    )
    taken += ("tpot_ms", "end_to_end_ms", "tbt_kept", "ttft_kept", "is_stable", "papers")
    figures = {name: found[name] for name in taken} | {"slo_attainment": round(kept, 5)}
    return figures | ({"runtime": found["runtime"]} if found["runtime"] else {})


def rate_cell(
    case: Case, how: How, rate_rps: float, *, seed: int = 0, server: Server | None = None,
    requests: int | None = None, keep: bool = False, drain: bool = True, preheat_s: float = 0.0,
) -> tuple[Cell, Served]:  # fmt: skip
    """What service is like at a rate; the replay, for pictures.

    Args:
        case: What is replayed.
        how: How; of the seeds `seed` counts.
        rate_rps: Requests a second.
        seed: Of requests and arrivals.
        server: What serves; None: simulated.
        requests: Of the replay. None: as many as come in `how.seconds`.
        keep: Whether the runtime's figures and the split are kept; slower in the simulator.
        drain: Whether requests are served to their last token, behind the last arrival too.
        preheat_s: Other requests come for so long before, at the same rate: a chip is faster cold.
    """
    server = server or server_of(case, how)
    trace = trace_named(case.trace, how.folder).fitting(server.max_context, how.overlong)
    drawn = trace.thinned(requests or max(20, round(rate_rps * how.seconds)), seed)
    timed = drawn.at_rate(rate_rps, how.arrivals, seed)
    make = maker(case, case.policy, server)
    slo = Slo(case.tbt_slo_ms or BOUND_MS)
    if preheat_s:
        first = trace.thinned(max(2, round(preheat_s * rate_rps)), seed + PREHEAT_SEED)
        replay(first.at_rate(rate_rps, how.arrivals, seed), server, make(), drain=False)
    served = replay(timed, server, make(), name=case.policy, keep=keep, drain=drain)
    where = "simulated" if isinstance(server, SimServer) else "gpu"
    cell = case.cell(rate_rps=round(rate_rps, 4), seed=seed, where=where)
    cell |= {"arrivals": how.arrivals, "n": len(timed), "simulated": where == "simulated"}
    cell |= {"overlong": trace.overlong, "is_met": slo.is_met(served)}
    return cell | figures_of(served, slo) | dict(served.about), served


def with_bounds(cells: Sequence[Cell]) -> list[Cell]:
    """Goodput cells with the bound of their model, trace and order."""
    bounds = {
        _place(cell): cell["goodput_rps"]
        for cell in cells
        if cell["provider"] == BOUND and "goodput_rps" in cell
    }
    found = []
    for cell in cells:
        bound = bounds.get(_place(cell), inf)
        if "goodput_rps" in cell and cell["provider"] != BOUND and bound < inf:
            cell = cell | {"bound": bound}
        found.append(cell)
    return found


def _place(cell: Cell) -> tuple[str, str, str, float | None]:
    case = cell["case"]
    return case["model"], case["trace"], case["order"], case.get("pace")
