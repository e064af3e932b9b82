"""What a replay was like, in figures: waits, gaps, ends, by prompt length, and the papers' own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import isfinite
from typing import Any

import numpy as np

from smkern.replay.records import Record, Served
from smkern.replay.slo import Slo

GROWTH = 2.0
"""A service does not keep up where first tokens wait so many times longer in the last third of the
window than in the first, and longer than `LONG` of their limits."""
LONG = 0.5
QUARTILES = 4


@dataclass(frozen=True, slots=True)
class Spread:
    """Figures of a sample, infinity where they hold what never came; None of an empty sample."""

    count: int = 0
    mean: float | None = None
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Of seconds, in milliseconds. A percentile is one of the values, the least that so many do
        not exceed."""
        sample = np.fromiter(values, dtype=np.float64) * 1e3
        if not len(sample):
            return cls()
        p50, p90, p99 = np.percentile(sample, (50, 90, 99), method="inverted_cdf")
        return cls(len(sample), float(sample.mean()), float(p50), float(p90), float(p99))

    def to_json(self) -> dict[str, float | None]:
        """As a dictionary; None instead of infinity."""
        return {
            name: None if value is None or not isfinite(value) else round(value, 4)
            for name, value in asdict(self).items()
        }


@dataclass(frozen=True, slots=True)
class Report:
    """Figures of a replay, of the requests that came after its warm-up.

    Attributes:
        policy: Its name.
        rate_rps: Requests that came a second.
        requests: Those that are counted.
        unfinished: Of these, refused, failed, or not through when the replay ended.
        overlong: Requests that were dropped or cut, of all.
        duration_s: From the first arrival counted to the last.
        requests_per_s, tokens_per_s: Finished requests and delivered tokens over the time from the
            first counted arrival to the last counted token.
        ttft_ms: From arrival to first token; infinity for one that never came.
        tbt_ms: All gaps between tokens, as delivered.
        worst_gap_ms: The longest of each request.
        tpot_ms: Mean gap of each request.
        end_to_end_ms: From arrival to last token, of those that finished.
        by_prompt: TTFT and worst gap of each quarter by prompt length: tokens at most, spreads.
        tbt_kept, ttft_kept: Shares within the limits; the former None without one.
        is_stable: Whether waits did not grow over the window.
        papers: The papers' own figures by name.
        runtime: Bubbles, FLOP and byte rates, switches; empty where they were not kept.
    """

    policy: str
    rate_rps: float
    requests: int
    unfinished: int
    overlong: int
    duration_s: float
    requests_per_s: float
    tokens_per_s: float
    ttft_ms: Spread
    tbt_ms: Spread
    worst_gap_ms: Spread
    tpot_ms: Spread
    end_to_end_ms: Spread
    by_prompt: tuple[tuple[int, Spread, Spread], ...]
    tbt_kept: float | None
    ttft_kept: float
    is_stable: bool
    papers: dict[str, float | None]
    runtime: dict[str, float]

    @classmethod
    def of(cls, served: Served, slo: Slo | None = None) -> Report:
        """Of a replay, with the share of gaps that keep a limit."""
        counted = served.counted
        gaps = served.gaps_s()
        ends = [x.token_s[-1] for x in counted if len(x.token_s)]
        span_s = max(ends, default=0.0) - served.warm_s
        finished = [record for record in counted if record.is_finished]
        tokens = sum(len(record.token_s) for record in counted)
        ttft = Spread.of(record.ttft_s for record in counted)
        tbt = Spread.of(gaps)
        rate = len(finished) / span_s if span_s > 0 else 0.0
        missed = sum(record.misses for record in counted)
        return cls(
            policy=served.policy,
            rate_rps=served.trace.rate_rps,
            requests=len(counted),
            unfinished=len(counted) - len(finished),
            overlong=served.trace.overlong,
            duration_s=served.end_s - served.warm_s,
            requests_per_s=rate,
            tokens_per_s=tokens / span_s if span_s > 0 else 0.0,
            ttft_ms=ttft,
            tbt_ms=tbt,
            worst_gap_ms=_worst_gaps(counted),
            tpot_ms=Spread.of(x for x in (r.tpot_s for r in counted) if x is not None),
            end_to_end_ms=Spread.of(x.token_s[-1] - x.at_s for x in finished),
            by_prompt=_by_prompt(counted),
            tbt_kept=None if slo is None else slo.attainment(served)[0],
            ttft_kept=1.0 - missed / len(counted) if counted else 1.0,
            is_stable=is_stable(counted),
            papers=_papers(counted, ttft, tbt, rate),
            runtime=_runtime(served.stats),
        )

    @property
    def kept(self) -> float:
        """The lesser of the shares within the limits."""
        return min(self.tbt_kept or 0.0, self.ttft_kept)

    def to_json(self) -> dict[str, Any]:
        """As a dictionary that JSON can hold."""
        found: dict[str, Any] = {}
        for name in self.__slots__:
            value = getattr(self, name)
            if isinstance(value, Spread):
                value = value.to_json()
            elif isinstance(value, float):
                value = round(value, 5)
            found[name] = value
        found["by_prompt"] = [
            {"tokens": most, "ttft_ms": ttft.to_json(), "worst_gap_ms": gap.to_json()}
            for most, ttft, gap in self.by_prompt
        ]
        found["papers"] = {
            name: None if value is None or not isfinite(value) else round(value, 5)
            for name, value in self.papers.items()
        }
        return found


def is_stable(records: Sequence[Record]) -> bool:
    """Whether first tokens came no later, by their limits, at the end than at the beginning."""
    third = len(records) // 3
    if not third:
        return True
    first, last = (
        float(np.mean([min(x.ttft_s / x.limit_s, 1e6) for x in part]))
        for part in (records[:third], records[-third:])
    )
    return last <= max(GROWTH * first, LONG)


def _worst_gaps(records: Sequence[Record]) -> Spread:
    return Spread.of(float(gaps.max()) for gaps in (x.gaps_s() for x in records) if len(gaps))


def _by_prompt(records: Sequence[Record]) -> tuple[tuple[int, Spread, Spread], ...]:
    ranked = sorted(records, key=lambda record: record.prompt_tokens)
    edges = [len(ranked) * part // QUARTILES for part in range(QUARTILES + 1)]
    found = []
    for low, high in pairwise(edges):
        part = ranked[low:high]
        if part:
            ttft = Spread.of(record.ttft_s for record in part)
            found.append((part[-1].prompt_tokens, ttft, _worst_gaps(part)))
    return tuple(found)


def _papers(
    records: Sequence[Record], ttft: Spread, tbt: Spread, rate: float
) -> dict[str, float | None]:
    """What each paper reports of a service.

    MuxWise: p99 TBT. Bullet: P90 of TTFT by prompt token, and of TPOT (Table 4 limits both).
    DuetServe: mean TTFT and TBT, finished requests a second. DRIFT: share of first tokens within
    1 s for each 1,000 new tokens.
    """
    norm = Spread.of(record.ttft_s / record.prompt_tokens for record in records)
    tpot = Spread.of(x for x in (r.tpot_s for r in records) if x is not None)
    kept = [x.error is None and x.ttft_s <= 1e-3 * x.new_tokens for x in records]
    return {
        "muxwise_tbt_p99_ms": tbt.p99,
        "bullet_ttft_p90_ms_per_token": norm.p90,
        "bullet_tpot_p90_ms": tpot.p90,
        "duetserve_ttft_mean_ms": ttft.mean,
        "duetserve_tbt_mean_ms": tbt.mean,
        "duetserve_requests_per_s": rate,
        "drift_ttft_kept": float(np.mean(kept)) if kept else None,
    }


def _runtime(stats: Any) -> dict[str, float]:
    if stats is None:
        return {}
    found = {
        "bubbles": stats.bubble_ratio,
        "bubbles_muxwise": stats.muxwise_bubble_ratio,
        "switches": float(stats.switches.count),
        "preemptions": float(stats.preemptions),
    }
    for lane, rate in stats.rates.items():
        found |= {f"{lane}_tflops": rate.tflops, f"{lane}_tbps": rate.tbps}
    return {name: round(value, 4) for name, value in found.items()}


@dataclass(frozen=True, slots=True)
class MuxWiseCriterion:
    """p99 of TBT within a limit, and waits that do not grow (MuxWise section 4.1)."""

    tbt_ms: float

    def is_met(self, served: Served) -> bool:
        p99 = Spread.of(served.gaps_s()).p99
        return (p99 or 0.0) <= self.tbt_ms and is_stable(served.counted)


@dataclass(frozen=True, slots=True)
class BulletCriterion:
    """P90 of TTFT by prompt token and of TPOT within limits (Bullet Table 4, ShareGPT's).

    Attributes:
        ttft_ms_per_token, tpot_ms: The limits; ShareGPT 3.0 and 150, Azure-Code 1.5 and 200.
    """

    ttft_ms_per_token: float = 3.0
    tpot_ms: float = 150.0

    def is_met(self, served: Served) -> bool:
        found = Report.of(served).papers
        norm, tpot = found["bullet_ttft_p90_ms_per_token"], found["bullet_tpot_p90_ms"]
        return (norm or 0.0) <= self.ttft_ms_per_token and (tpot or 0.0) <= self.tpot_ms


@dataclass(frozen=True, slots=True)
class DriftCriterion:
    """99% of first tokens within 1 s for each 1,000 new tokens, p99 of TBT within a limit (DRIFT
    section 5.1)."""

    tbt_ms: float

    def is_met(self, served: Served) -> bool:
        report = Report.of(served)
        p99, kept = report.papers["muxwise_tbt_p99_ms"], report.papers["drift_ttft_kept"]
        return (p99 or 0.0) <= self.tbt_ms and (1.0 if kept is None else kept) >= 0.99
