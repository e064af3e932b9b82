"""When to split, and what to launch next: functions from a snapshot to a decision."""

from smkern.policies.aggregated import Aggregated
from smkern.policies.check import check
from smkern.policies.decision import Decision, Policy
from smkern.policies.fixed_split import FixedSplit
from smkern.policies.order import ORDERS, Order, order_named
from smkern.policies.snapshot import Ended, PrefillView, Running, Snapshot, Trigger, Waiting

__all__ = [
    "Aggregated",
    "FixedSplit",
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
