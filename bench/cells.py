"""From a timing to a cell of the results: rates, and the fraction of what the SMs could reach."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from smkern.bench.rows import Cell
from smkern.measure.partitions import Place
from smkern.measure.timing import Timing, first_line

if TYPE_CHECKING:
    from smkern.device import Budget
    from smkern.profile import Placement, Profile


class Work(Protocol):
    """What a launch must move and compute: a GEMM's problem, an attention case."""

    @property
    def bytes_moved(self) -> int: ...

    @property
    def flops(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Ceiling:
    """What a partition can do: read bandwidth in TB/s, dense rate in TFLOP/s."""

    tbps: float
    tflops: float

    def floor_us(self, problem: Work) -> float:
        """The larger of the time to move the bytes and the time to do the arithmetic, us."""
        return max(problem.bytes_moved / self.tbps, problem.flops / self.tflops) / 1e6


def ceiling_of(profile: Profile, budget: Budget, placement: Placement | None) -> Ceiling:
    """The measured ceilings of a budget, alone on the device."""
    bandwidth = profile.bandwidth(
        budget.num_sms, confined=budget.confined, placement=placement or "spread"
    )
    return Ceiling(bandwidth, profile.flops(budget.num_sms))


def cell_head(op: str, about: Mapping[str, Any], place: Place, provider: str) -> Cell:
    """What was measured, where, and by whom."""
    return {
        "op": op,
        "case": dict(about),
        "num_sms": place.num_sms,
        "mode": place.mode,
        "placement": place.placement,
        "provider": provider,
    }


def our_head(op: str, about: Mapping[str, Any], place: Place) -> Cell:
    """The head of a cell of smkern's, in a partition of the group's size."""
    return cell_head(op, about, place, "smkern") | {"group_sms": place.num_sms}


def measured_cell(problem: Work, timing: Timing, ceiling: Ceiling) -> Cell:
    """us, tflops, tbps, fraction_of_ceiling, fraction_of_bandwidth, noise."""
    us = timing.us_median
    tbps = problem.bytes_moved / us / 1e6
    return {
        "us": round(us, 3),
        "tflops": round(problem.flops / us / 1e6, 2),
        "tbps": round(tbps, 4),
        "fraction_of_ceiling": round(ceiling.floor_us(problem) / us, 4),
        "fraction_of_bandwidth": round(tbps / ceiling.tbps, 4),
        "noise": round(timing.noise, 4),
    }


def failed_cell(why: str | Exception) -> Cell:
    """A cell that could not be measured: no figures, and why."""
    error = why if isinstance(why, str) else first_line(why)
    return {"us": None, "tflops": None, "tbps": None, "fraction_of_ceiling": None, "error": error}
