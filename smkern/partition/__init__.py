"""Disjoint sets of SMs, each with a stream, the SMs really granted, and proof of them."""

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
