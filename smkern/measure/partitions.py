"""Where cases run: the partition for each budget, spread or as the driver groups SMs."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from smkern.device import Budget, device_info
from smkern.partition import Partition, budget_of_stream, ladder

Side = Literal["decode", "prefill"]
Placement = Literal["spread", "default"]
Mode = Literal["green", "full"]

ATOM_OF: dict[Placement, int] = {"spread": 2, "default": 8}
"""SMs per driver group: 2 lets a partition spread over the GPCs, 8 is the driver's own choice."""


@dataclass(frozen=True, slots=True)
class Place:
    """A stream and the budget of its partition.

    `placement` and `partition` are None on the whole device.
    """

    budget: Budget
    stream: Any
    placement: Placement | None = None
    partition: Partition | None = None

    @property
    def num_sms(self) -> int:
        return self.budget.num_sms

    @property
    def mode(self) -> Mode:
        return "full" if self.placement is None else "green"


def side_for(num_sms: int, total: int, placement: Placement) -> tuple[int, Side] | None:
    """(SMs of the decode side, side) of the split that has a partition of `num_sms`.

    A spread partition is the small side up to half the device and the complement above it. The
    driver's own groups are of 8 SMs, so a default partition is a multiple of 8 or the complement
    of one; None for other counts.
    """
    if not 0 < num_sms < total:
        return None
    atom = ATOM_OF[placement]
    if placement == "spread":
        decode, side = _smaller(num_sms, total)
        return (decode, side) if decode % atom == 0 else None
    # the driver makes one group fewer than would fit, and leaves a larger remainder
    most = (total // atom - 1) * atom
    for decode, side in ((num_sms, "decode"), (total - num_sms, "prefill")):
        if decode % atom == 0 and decode <= most:
            return decode, side
    return None


def _smaller(num_sms: int, total: int) -> tuple[int, Side]:
    return (num_sms, "decode") if num_sms <= total // 2 else (total - num_sms, "prefill")


@dataclass(slots=True)
class Partitions:
    """The partitions for several budgets; a context manager that makes and closes their ladders.

    Args:
        budgets: SM counts to measure; the device's own count means the whole device.
        placements: ladders to make.
    """

    budgets: Iterable[int]
    placements: tuple[Placement, ...] = ("spread", "default")
    device: int = 0
    full: Place = field(init=False)
    _places: dict[tuple[int, Placement], Place] = field(init=False, default_factory=dict)
    _stack: ExitStack = field(init=False, default_factory=ExitStack)

    def __enter__(self) -> Partitions:
        total = device_info(self.device).num_sms
        stream = torch.cuda.Stream(self.device)
        whole = budget_of_stream(stream.cuda_stream, self.device)
        self.full = Place(whole, stream)
        try:
            for placement in self.placements:
                self._make_ladder(placement, total)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        torch.cuda.synchronize()
        release_library_workspaces()
        self._places.clear()
        self._stack.close()

    def _make_ladder(self, placement: Placement, total: int) -> None:
        sides = {n: side_for(n, total, placement) for n in self.budgets}
        wanted = {n: side for n, side in sides.items() if side is not None}
        if not wanted:
            return
        decode_sms = sorted({decode for decode, _ in wanted.values()})
        made = ladder(decode_sms, atom=ATOM_OF[placement], device=self.device, placement=placement)
        self._stack.enter_context(made)
        for num_sms, (decode, side) in wanted.items():
            partition = getattr(made.split(decode=decode), side)
            if partition.num_sms != num_sms:
                continue
            self._places[num_sms, placement] = Place(
                partition.budget, partition.stream, placement, partition
            )

    def at(self, num_sms: int, placement: Placement = "spread") -> Place | None:
        """The place for a budget, or None where there is no such partition."""
        if num_sms == self.full.num_sms:
            return self.full
        return self._places.get((num_sms, placement))


def release_library_workspaces() -> None:
    """Release torch's cuBLAS workspaces: they belong to streams that are about to be closed."""
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()


def trim_memory(keep_bytes: int = 8 << 30) -> None:
    """Free the memory pools of destroyed graphs once they hold more than `keep_bytes`."""
    if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > keep_bytes:
        torch.cuda.empty_cache()
