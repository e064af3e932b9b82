"""When to split, and what to launch next: functions from a snapshot to a decision."""

from collections.abc import Mapping
from types import MappingProxyType

from smkern.policies.adaptive import Adaptive
from smkern.policies.base import BasePolicy
from smkern.policies.bullet import Bullet
from smkern.policies.check import check
from smkern.policies.chunked import Chunked
from smkern.policies.decision import Decision, Policy
from smkern.policies.drift import Drift
from smkern.policies.duetserve import DuetServe
from smkern.policies.muxwise import MuxWise
from smkern.policies.order import ORDERS, Order, order_named
from smkern.policies.prefill_first import PrefillFirst
from smkern.policies.snapshot import Ended, PrefillView, Running, Snapshot, Trigger, Waiting
from smkern.policies.static_split import StaticSplit
from smkern.policies.temporal import Temporal
from smkern.policies.two_streams import TwoStreams

POLICIES: Mapping[str, type[BasePolicy]] = MappingProxyType(
    {
        "chunked": Chunked,
        "prefill_first": PrefillFirst,
        "static_split": StaticSplit,
        "two_streams": TwoStreams,
        "temporal": Temporal,
        "duetserve": DuetServe,
        "drift": Drift,
        "muxwise": MuxWise,
        "bullet": Bullet,
        "adaptive": Adaptive,
    }
)
"""All policies, by the names that commands and results have for them."""

__all__ = [
    "Adaptive",
    "Bullet",
    "Chunked",
    "Drift",
    "DuetServe",
    "MuxWise",
    "ORDERS",
    "Order",
    "POLICIES",
    "PrefillFirst",
    "StaticSplit",
    "Temporal",
    "TwoStreams",
    "order_named",
    "check",
    "Decision",
    "Ended",
    "Policy",
    "PrefillView",
    "Running",
    "Snapshot",
    "Trigger",
    "Waiting",
]
