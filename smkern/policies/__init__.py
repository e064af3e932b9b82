"""When to split, and what to launch next: functions from a snapshot to a decision."""

from smkern.policies.check import check
from smkern.policies.chunked import Chunked
from smkern.policies.decision import Decision, Policy
from smkern.policies.order import ORDERS, Order, order_named
from smkern.policies.snapshot import Ended, PrefillView, Running, Snapshot, Trigger, Waiting
from smkern.policies.static_split import StaticSplit

__all__ = [
    "Chunked",
    "StaticSplit",
    "ORDERS",
    "Order",
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
