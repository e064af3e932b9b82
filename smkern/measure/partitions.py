"""Where cases run: the partition for each budget, spread or as the driver groups SMs."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from smkern.device import Budget, DeviceInfo, device_info
from smkern.partition import Partition, budget_of_stream, ladder

Side = Literal["decode", "prefill"]
Placement = Literal["spread", "default"]
Mode = Literal["green", "full"]

DRIVERS_ATOM = 8
"""SMs of a group of the driver's own choice."""


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


def atom_of(info: DeviceInfo, placement: Placement) -> int:
    """SMs per driver group: as few as can be let a partition spread over the GPCs."""
    return info.sm_granularity if placement == "spread" else DRIVERS_ATOM


def side_for(num_sms: int, info: DeviceInfo, placement: Placement) -> tuple[int, Side] | None:
    """(SMs of the decode side, side) of the split that has a partition of `num_sms`.

    Decode's side is a multiple of a group, and the other its complement; None for other counts. A
    spread partition is the smaller side where that can be decode's.
    """
    total, atom = info.num_sms, atom_of(info, placement)
    sides: list[tuple[int, Side]] = [(num_sms, "decode"), (total - num_sms, "prefill")]
    if placement == "spread":
        sides.sort()
    # the driver makes one group of its own choice fewer than would fit, and a larger remainder
    most = (total // atom - 1) * atom
    return next((found for found in sides if 0 < found[0] <= most and found[0] % atom == 0), None)


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
        info = device_info(self.device)
        stream = torch.cuda.Stream(self.device)
        whole = budget_of_stream(stream.cuda_stream, self.device)
        self.full = Place(whole, stream)
        try:
            for placement in self.placements:
                self._make_ladder(placement, info)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        torch.cuda.synchronize()
        release_library_workspaces()
        self._places.clear()
        self._stack.close()

    def _make_ladder(self, placement: Placement, info: DeviceInfo) -> None:
        sides = {n: side_for(n, info, placement) for n in self.budgets}
        wanted = {n: side for n, side in sides.items() if side is not None}
        if not wanted:
            return
        decode_sms = sorted({decode for decode, _ in wanted.values()})
        atom = atom_of(info, placement)
        made = ladder(decode_sms, atom=atom, device=self.device, placement=placement)
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
