"""All splits of a device into decode and prefill, from one driver split, made once and kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, get_args

from smkern.device import DeviceInfo, device_info
from smkern.errors import BudgetError, DeviceError, PartitionError
from smkern.limits import shown
from smkern.partition import green, grid
from smkern.partition.driver import cuda_driver
from smkern.partition.partition import Origin, Partition, Split
from smkern.partition.plan import plan_ladder

Backend = Literal["green", "grid"]
Placement = Literal["spread", "default"]


class Ladder:
    """Splits of one device into a decode and a prefill partition, ascending by decode SMs.

    Rungs are nested: a larger decode side contains every smaller one, and prefill is exactly the
    rest, so moving by a rung only changes the owner of the difference. Also a context manager,
    which destroys graphs, streams and contexts on exit, in that order.

    Attributes:
        rungs: realised SM counts of the decode sides.
        backend: "green" or "grid".
    """

    def __init__(self, splits: Iterable[Split], backend: str) -> None:
        self._splits = {split.decode.num_sms: split for split in splits}
        self.backend = backend

    @property
    def rungs(self) -> tuple[int, ...]:
        return tuple(sorted(self._splits))

    def split(self, *, decode: int) -> Split:
        """The split whose decode side has `decode` SMs.

        Raises:
            BudgetError: no such rung.
            PartitionError: the ladder is closed.
        """
        try:
            found = self._splits.get(decode)
        except (TypeError, RuntimeError):  # what has no hash
            found = None
        if found is None:
            raise BudgetError(
                f"this ladder has no rung of {shown(decode)} decode SMs; it has "
                f"{list(self.rungs)}. Name the rungs you need: smkern.ladder([...])"
            )
        found.decode.check_open()
        return found

    def __iter__(self) -> Iterator[Split]:
        return iter(self._splits[rung] for rung in self.rungs)

    def __enter__(self) -> Ladder:
        return self

    def __exit__(self, *error: object) -> None:
        sides = self._sides()
        for side in sides:
            side.synchronize()
        for side in sides:
            side.release_graphs()
        for side in sides:
            side.close(tensors=False)

    def close(self) -> None:
        """Close every partition; `Partition.close` says what must be released before."""
        refused: list[PartitionError] = []
        for side in self._sides():
            try:
                side.close()
            except PartitionError as error:
                refused.append(error)
        if refused:
            raise refused[0]

    def _sides(self) -> list[Partition]:
        return [side for split in self for side in split]


def ladder(
    decode_sms: Iterable[int] | None = None,
    *,
    atom: int | None = None,
    device: int | None = None,
    backend: Backend | None = None,
    placement: Placement = "spread",
) -> Ladder:
    """Make all splits of a device that will be used, up front: a pair costs 3 to 4 ms and 11 MiB.

    Args:
        decode_sms: SM counts of the decode sides, multiples of `atom`; by default every multiple
            of 8 that leaves prefill 8 or more (`smkern.plan_ladder` lists them).
        atom: SMs that move together: by default 2, before sm_90 4; use 8 where the small side must
            run kernels with clusters.
        device: GPU index; torch's current GPU by default.
        backend: "green" (the hardware confines work), "grid" (only the budget does), or None: green
            if the driver supports it.
        placement: "spread" over the GPCs (28% more bandwidth on 16 and 32 SMs of an H200), or the
            driver's "default" order of its groups.

    Raises:
        BudgetError: a count below 1, not a multiple of `atom`, or not below the device's SM count;
            an atom that is no multiple of the device's granularity, or above half of the device.
        DeviceError: no GPU, or no green contexts and backend="green".
        PartitionError: an unknown backend or placement.

    Source: rungs of one driver split, MuxWise section 3.1; nested rungs go beyond it.

    Example:
        >>> with smkern.ladder([16, 32]) as ladder:   # doctest: +SKIP
        ...     split = ladder.split(decode=32)
    """
    if not (backend is None or (isinstance(backend, str) and backend in get_args(Backend))):
        raise PartitionError(f"no backend {shown(backend)}: use 'green', 'grid' or None")
    if not (isinstance(placement, str) and placement in get_args(Placement)):
        raise PartitionError(f"no placement {shown(placement)}: use 'spread' or 'default'")
    info = device_info(device)
    index = _index(device)
    plan = plan_ladder(info, decode_sms, atom=atom)
    if backend != "grid":
        origin = Origin("green", index, plan.atom, placement)
        try:
            return _green_ladder(plan.rungs, origin, info, default=decode_sms is None)
        except DeviceError:
            if backend == "green":
                raise
    origin = Origin("grid", index, plan.atom, placement)
    return Ladder([Split(*grid.make_pair(n, origin, info)) for n in plan.rungs], "grid")


def _green_ladder(
    wanted: tuple[int, ...], origin: Origin, info: DeviceInfo, *, default: bool
) -> Ladder:
    driver: Any = cuda_driver(origin.device)
    atoms = green.probe_atoms(driver, info, origin.atom, origin.placement)
    last = len(atoms.ordered) * atoms.size
    if atoms.rest is None:
        last -= atoms.size
    beyond = [n for n in wanted if n > last]
    if beyond and not default:
        raise BudgetError(
            f"decode sides of {beyond} SMs: the driver gives {len(atoms.ordered)} groups of "
            f"{atoms.size} SMs here, so a decode side has at most {last}"
        )
    splits: list[Split] = []
    try:
        for n in sorted(set(wanted) - set(beyond)):
            splits.append(Split(*green.make_pair(driver, atoms, n, origin, info)))
    except BaseException:
        for split in splits:
            for side in split:
                side.close(tensors=False)
        raise
    return Ladder(splits, "green")


def _index(device: int | None) -> int:
    import torch

    return torch.cuda.current_device() if device is None else device


def split(
    *,
    decode: int,
    atom: int | None = None,
    device: int | None = None,
    backend: Backend | None = None,
    placement: Placement = "spread",
) -> Split:
    """One split: `decode` SMs and the rest. Arguments and errors are those of `ladder`.

    Example:
        >>> decode, prefill = smkern.split(decode=32)   # doctest: +SKIP
    """
    made = ladder([decode], atom=atom, device=device, backend=backend, placement=placement)
    return made.split(decode=decode)
