"""Traces replayed under policies: loads, metrics, goodput, comparisons; simulated or on a GPU."""

from smkern.replay.comparison import Comparison, compare
from smkern.replay.generate import GENERATORS, Lengths, generated, sources
from smkern.replay.limits import new_tokens, ttft_limits_s
from smkern.replay.load import load_trace
from smkern.replay.metrics import BulletCriterion, DriftCriterion, MuxWiseCriterion, Report, Spread
from smkern.replay.named import policy_named
from smkern.replay.records import Record, Served
from smkern.replay.run import replay
from smkern.replay.search import Goodput, capacity_rps, goodput, highest
from smkern.replay.simulated import SimServer
from smkern.replay.sizes import Sizes, sizes_for
from smkern.replay.slo import Slo
from smkern.replay.trace import Arrival, Trace, mixed

__all__ = [
    "Arrival",
    "BulletCriterion",
    "Comparison",
    "DriftCriterion",
    "GENERATORS",
    "Goodput",
    "Lengths",
    "MuxWiseCriterion",
    "Record",
    "Report",
    "Served",
    "SimServer",
    "Sizes",
    "Slo",
    "Spread",
    "Trace",
    "capacity_rps",
    "compare",
    "generated",
    "goodput",
    "highest",
    "load_trace",
    "mixed",
    "new_tokens",
    "policy_named",
    "replay",
    "sizes_for",
    "sources",
    "ttft_limits_s",
]
