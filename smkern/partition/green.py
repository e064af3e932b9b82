"""The green backend: partitions enforced by the hardware, all from one driver split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from smkern.device import Budget, DeviceInfo
from smkern.errors import PartitionError
from smkern.partition.driver import IGNORE_COSCHEDULING, CudaDriver, GreenContext
from smkern.partition.partition import Origin, Partition
from smkern.partition.streams import stream_budgets

_CTAS_PER_SM = 64
_TRIES = 5
"""An SM that wakes up late can miss one probe: seen in 1 of 40 ladders."""


@dataclass(frozen=True, slots=True)
class Atom:
    """One group of a driver split, and the ids of its SMs."""

    group: Any
    smids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Atoms:
    """All SMs of a device as groups of one split, in the order in which decode takes them.

    `rest` is the remainder of the split (12 SMs of an H200 in groups of 8), always prefill's.
    """

    ordered: tuple[Atom, ...]
    rest: Atom | None
    size: int

    @property
    def num_sms(self) -> int:
        return sum(len(atom.smids) for atom in (*self.ordered, *([self.rest] if self.rest else [])))


def probe_atoms(driver: CudaDriver, info: DeviceInfo, atom: int, placement: str) -> Atoms:
    """Split the device into atoms, find each one's SMs, and order them.

    SM ids go round the GPCs, so taking atoms by their lowest id takes one from each GPC in turn:
    16 such SMs of an H200 read 3.2 TB/s, the driver's own choice of 16 reads 2.5.
    """
    flags = IGNORE_COSCHEDULING if atom < 8 and info.capability >= (9, 0) else 0
    groups, remainder = driver.split(atom, flags)
    everything = [*groups, *([remainder] if remainder is not None else [])]
    found = [
        Atom(group, smids)
        for group, smids in zip(everything, _smids(driver, everything), strict=True)
    ]
    atoms, rest = found[: len(groups)], found[len(groups) :]
    odd = sorted({len(a.smids) for a in atoms if len(a.smids) != atom})
    if odd:
        raise PartitionError(
            f"the driver's groups of {atom} SMs were seen on {odd} SMs of this {info.name}: other "
            "work held SMs while they were probed (make the ladder while the device is idle), or "
            "its SMs go in other steps (try atom=8, or backend='grid')"
        )
    if placement == "spread":
        atoms.sort(key=lambda one: one.smids)
    return Atoms(tuple(atoms), rest[0] if rest else None, atom)


def _smids(driver: CudaDriver, groups: Sequence[Any]) -> list[tuple[int, ...]]:
    """The SMs of every group, found by running the probe in a few contexts.

    Group i is in context b where bit b of i + 1 is set, so the contexts that reach an SM spell its
    group: 7 contexts for 66 groups. Few, because each context leaks some memory when destroyed.
    """
    spelled: dict[int, int] = {}
    for bit in range(len(groups).bit_length()):
        members = [group for i, group in enumerate(groups) if (i + 1) >> bit & 1]
        for sm in _seen(driver, members):
            spelled[sm] = spelled.get(sm, 0) | 1 << bit
    found: list[list[int]] = [[] for _ in groups]
    for sm, code in sorted(spelled.items()):
        if code > len(groups):
            raise PartitionError(
                f"SM {sm} showed up in contexts that spell group {code} of {len(groups)}: another "
                "kernel held SMs while they were probed; make the ladder while the device is idle"
            )
        found[code - 1].append(sm)
    return [tuple(smids) for smids in found]


def _seen(driver: CudaDriver, groups: Sequence[Any]) -> set[int]:
    """The SMs that the probe reaches in a context made of `groups`."""
    context = driver.create(groups)
    try:
        num_ctas = _CTAS_PER_SM * context.num_sms
        for _ in range(_TRIES):
            seen = set(driver.smids(context.stream, num_ctas))
            if len(seen) == context.num_sms:
                break
        return seen
    finally:
        _destroy(driver, context)


def _destroy(driver: CudaDriver, context: GreenContext) -> None:
    """Destroy a context, and its stream, that was never handed out."""
    driver.destroy_stream(context)
    driver.detach(context)


def make_pair(
    driver: CudaDriver, atoms: Atoms, decode_sms: int, origin: Origin, info: DeviceInfo
) -> tuple[Partition, Partition]:
    """A partition of the first `decode_sms` SMs in order, and one of exactly the others."""
    count = decode_sms // atoms.size
    decode = atoms.ordered[:count]
    prefill = atoms.ordered[count:] + ((atoms.rest,) if atoms.rest else ())
    first = _make(driver, decode, decode_sms, origin, info)
    try:
        second = _make(driver, prefill, atoms.num_sms - decode_sms, origin, info)
    except BaseException:
        first.close(tensors=False)
        raise
    return first, second


def _make(
    driver: CudaDriver, atoms: Sequence[Atom], requested: int, origin: Origin, info: DeviceInfo
) -> Partition:
    context = driver.create([atom.group for atom in atoms])
    try:
        return _wrap(driver, context, atoms, requested, origin, info)
    except BaseException:
        _destroy(driver, context)
        raise


def _wrap(
    driver: CudaDriver,
    context: GreenContext,
    atoms: Sequence[Atom],
    requested: int,
    origin: Origin,
    info: DeviceInfo,
) -> Partition:
    """A context's partition; raises unless the driver granted exactly the atoms' SMs."""
    import torch

    smids = tuple(sorted(sm for atom in atoms for sm in atom.smids))
    if context.num_sms != len(smids):
        raise PartitionError(
            f"the driver granted {context.num_sms} SMs for groups that have {len(smids)}"
        )
    budget = Budget(context.num_sms, "mask", _clusters(driver, context, origin.atom, info))
    stream = torch.cuda.ExternalStream(context.stream, device=torch.device("cuda", origin.device))
    stream_budgets(origin.device).add(context.stream, budget)
    return Partition(
        origin,
        requested,
        budget,
        smids,
        stream,
        driver.smids,
        release=partial(driver.detach, context),
    )


def _clusters(driver: CudaDriver, context: GreenContext, atom: int, info: DeviceInfo) -> bool:
    """Whether clusters launch: as the driver says, but never on a small side of 2-SM atoms.

    cuBLAS's clustered kernels failed on spread partitions of 16 to 48 SMs of an H200, and ran on
    their complements.
    """
    if info.capability < (9, 0):
        return False
    if atom < 8 and context.num_sms <= info.num_sms // 2:
        return False
    said = driver.clusters(context.stream)
    return True if said is None else said
