"""The rungs of a device's ladder, from its facts alone: no driver, no GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from smkern.device import DeviceInfo
from smkern.errors import BudgetError

DEFAULT_STEP = 8


@dataclass(frozen=True, slots=True)
class LadderPlan:
    """The rungs that `smkern.ladder` would make.

    Attributes:
        device: name of the GPU.
        num_sms: SMs of the GPU.
        atom: SMs that move together.
        rungs: SM counts of the decode sides, ascending.
    """

    device: str
    num_sms: int
    atom: int
    rungs: tuple[int, ...]

    def __str__(self) -> str:
        count = "1 rung" if len(self.rungs) == 1 else f"{len(self.rungs)} rungs"
        return (
            f"{count} of the {self.num_sms} SMs of this {self.device} in atoms of "
            f"{self.atom}: decode {', '.join(map(str, self.rungs))}; prefill the rest"
        )


def plan_ladder(
    info: DeviceInfo, decode_sms: Iterable[int] | None = None, *, atom: int | None = None
) -> LadderPlan:
    """The rungs of a ladder on a device that need not be present.

    The driver may make fewer groups of `atom` SMs than would fit (15 of 8 on an H200); the default
    ladder then ends there.

    Args:
        info: facts of the GPU.
        decode_sms: SM counts of the decode sides, multiples of `atom`; by default every multiple
            of 8 that leaves prefill 8 or more, or of `atom` on fewer than 16 SMs.
        atom: SMs that move together; by default the device's granularity.

    Raises:
        BudgetError: a count below 1, not a multiple of `atom`, or not below the device's SM count;
            an atom below 1 or above half of the device.

    Example:
        >>> plan_ladder(smkern.load_profile("h200").info, [16, 32]).rungs
        (16, 32)
    """
    atom = info.sm_granularity if atom is None else atom
    if not 1 <= atom <= info.num_sms // 2:
        raise BudgetError(
            f"atom={atom}: SMs of this {info.name} with {info.num_sms} move together in "
            f"{info.sm_granularity} to {info.num_sms // 2}; leave it out, or take 8 for clusters"
        )
    wanted = _default_rungs(info, atom) if decode_sms is None else sorted(set(decode_sms))
    if not wanted:
        raise BudgetError("a ladder needs a rung: smkern.ladder([32]), or no argument for all")
    for n in wanted:
        if not atom <= n < info.num_sms or n % atom:
            last = (info.num_sms - 1) // atom * atom
            raise BudgetError(
                f"a decode side of {n} SMs cannot be made of atoms of {atom} on this {info.name} "
                f"with {info.num_sms} SMs: take a multiple of {atom} from {atom} to {last}"
            )
    return LadderPlan(info.name, info.num_sms, atom, tuple(wanted))


def _default_rungs(info: DeviceInfo, atom: int) -> list[int]:
    """Steps of 8; a MIG slice may have too few SMs for two sides of 8."""
    step = max(DEFAULT_STEP if info.num_sms >= 2 * DEFAULT_STEP else atom, atom)
    return list(range(step, info.num_sms - step + 1, step))
