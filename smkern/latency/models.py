"""All latency models by name, as commands and benchmarks make them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from smkern.latency.achieved import achieved_rates
from smkern.latency.bullet import Bullet
from smkern.latency.drift import Drift
from smkern.latency.duetserve import DuetServe
from smkern.latency.gemm_times import GemmTimes
from smkern.latency.muxwise import MuxWise
from smkern.latency.predictor import Predictor
from smkern.latency.profile_table import timings_of
from smkern.latency.regression import ContentionIgnored, LinearRegression
from smkern.latency.sample import Sample
from smkern.latency.sizes import ModelSizes
from smkern.latency.table_predictor import TablePredictor
from smkern.profile import Profile

Factory = Callable[[Sequence[Sample], ModelSizes, Profile], Predictor]
"""A model from measured launches, the sizes of the LLM that they are of, and the device."""


MODELS: dict[str, Factory] = {
    "table": lambda samples, sizes, profile: TablePredictor(timings_of(samples), sizes, profile),
    "duetserve": lambda samples, sizes, profile: DuetServe(sizes, profile),
    "duetserve_corrected": lambda samples, sizes, profile: DuetServe(
        sizes, profile, corrected=True
    ),
    "duetserve_achieved": lambda samples, sizes, profile: DuetServe(
        sizes, profile, rates=achieved_rates(samples, sizes, profile)
    ),
    "bullet": Bullet,
    "drift": lambda samples, sizes, profile: Drift(samples),
    "muxwise": lambda samples, sizes, profile: MuxWise(samples),
    "linear_regression": lambda samples, sizes, profile: LinearRegression(samples),
    "contention_ignored": lambda *given: ContentionIgnored(Bullet(*given)),
}
"""Ours, the papers' models and the references; `contention_ignored` is Bullet without neighbours.

A factory raises LatencyError where its samples do not determine it.
"""


def models_with(gemms: GemmTimes | None) -> dict[str, Factory]:
    """`MODELS`, ours with times of the LLM's GEMMs; None: rooflines, as `MODELS` has them."""

    def table(samples: Sequence[Sample], sizes: ModelSizes, profile: Profile) -> Predictor:
        return TablePredictor(timings_of(samples), sizes, profile, gemms)

    return MODELS | {"table": table}
