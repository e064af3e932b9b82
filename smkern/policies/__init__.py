"""When to split, and what to launch next: functions from a snapshot to a decision."""

from smkern.policies.decision import Decision, Policy
from smkern.policies.snapshot import PrefillView, Snapshot, Waiting

__all__ = ["Decision", "Policy", "PrefillView", "Snapshot", "Waiting"]
