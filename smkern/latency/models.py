"""All latency models by name, as commands and benchmarks make them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from smkern.latency.achieved import achieved_rates
from smkern.latency.bullet import Bullet
from smkern.latency.drift import Drift
from smkern.latency.duetserve import DuetServe
from smkern.latency.muxwise import MuxWise
from smkern.latency.predictor import Predictor
from smkern.latency.profile_table import timings_of
from smkern.latency.regression import ContentionIgnored, LinearRegression
from smkern.latency.sample import Sample
from smkern.latency.sizes import ModelSizes
from smkern.latency.table import shipped_gemms
from smkern.latency.table_predictor import TablePredictor
from smkern.profile import Profile

Factory = Callable[[Sequence[Sample], ModelSizes, Profile], Predictor]
"""A model from measured launches, the sizes of the LLM that they are of, and the device."""


def _duetserve(samples: Sequence[Sample], sizes: ModelSizes, profile: Profile) -> Predictor:
    return DuetServe(sizes, profile)


def _corrected(samples: Sequence[Sample], sizes: ModelSizes, profile: Profile) -> Predictor:
    return DuetServe(sizes, profile, corrected=True)


def _achieved(samples: Sequence[Sample], sizes: ModelSizes, profile: Profile) -> Predictor:
    return DuetServe(sizes, profile, rates=achieved_rates(samples, sizes, profile))


def _drift(samples: Sequence[Sample], sizes: ModelSizes, profile: Profile) -> Predictor:
    return Drift(samples)


def _muxwise(samples: Sequence[Sample], sizes: ModelSizes, profile: Profile) -> Predictor:
    return MuxWise(samples)


def _regression(samples: Sequence[Sample], sizes: ModelSizes, profile: Profile) -> Predictor:
    return LinearRegression(samples)


def _ignored(samples: Sequence[Sample], sizes: ModelSizes, profile: Profile) -> Predictor:
    return ContentionIgnored(Bullet(samples, sizes, profile))


def _table(samples: Sequence[Sample], sizes: ModelSizes, profile: Profile) -> Predictor:
    gemms = shipped_gemms(sizes, profile.info.name)
    return TablePredictor(timings_of(samples), sizes, profile, gemms)


MODELS: dict[str, Factory] = {
    "table": _table,
    "duetserve": _duetserve,
    "duetserve_corrected": _corrected,
    "duetserve_achieved": _achieved,
    "bullet": Bullet,
    "drift": _drift,
    "muxwise": _muxwise,
    "linear_regression": _regression,
    "contention_ignored": _ignored,
}
"""Ours, the papers' models and the references; `contention_ignored` is Bullet without neighbours.

A factory raises LatencyError where its samples do not determine it.
"""
