"""Disjoint sets of SMs with a stream each, what was really granted, and proof of it."""

from smkern.partition.ladder import Ladder, ladder, split
from smkern.partition.partition import Partition, PartitionGraph, Split
from smkern.partition.plan import LadderPlan, plan_ladder
from smkern.partition.streams import budget_of_stream, current_budget, current_num_sms

__all__ = [
    "Ladder",
    "LadderPlan",
    "Partition",
    "PartitionGraph",
    "Split",
    "budget_of_stream",
    "current_budget",
    "current_num_sms",
    "ladder",
    "plan_ladder",
    "split",
]
