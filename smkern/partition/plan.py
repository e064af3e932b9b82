"""The rungs of a device's ladder, from its facts alone: no driver, no GPU."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

from smkern.device import DeviceInfo
from smkern.errors import ArgumentError, BudgetError
from smkern.limits import shown

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


def _whole(name: str, value: object) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except (TypeError, RuntimeError):  # RuntimeError: of a tensor without memory
        raise BudgetError(f"{name}={shown(value)} is no whole number: pass an int") from None


def _counts(decode_sms: Iterable[int]) -> list[int]:
    """The SM counts that a caller named, in order, each once."""
    try:
        counts = list(decode_sms)
    except (TypeError, RuntimeError):  # RuntimeError: of a nested tensor
        raise BudgetError(f"decode_sms={shown(decode_sms)}: pass a list of SM counts") from None
    return sorted({_whole("decode_sms", count) for count in counts})


def plan_ladder(
    info: DeviceInfo, decode_sms: Iterable[int] | None = None, *, atom: int | None = None
) -> LadderPlan:
    """The rungs of a ladder on a device that need not be present.

    The driver may make fewer groups of `atom` SMs than would fit (15 of 8 on an H200); the default
    ladder then ends there.

    Args:
        info: facts of the GPU.
        decode_sms: SM counts of the decode sides, multiples of `atom`; by default every multiple
            of 8 that leaves prefill 8 or more; in steps of the next multiple of `atom` where that
            does not divide 8, and of `atom` on too few SMs for two sides of so many.
        atom: SMs that move together; by default the device's granularity.

    Raises:
        BudgetError: a count below 1, not a multiple of `atom`, or not below the device's SM count;
            an atom that is no multiple of the device's granularity, or above half of the device.
        ArgumentError: info that is none.

    Example:
        >>> import smkern
        >>> smkern.plan_ladder(smkern.load_profile("h200").info, [16, 32]).rungs
        (16, 32)
    """
    if not isinstance(info, DeviceInfo):
        raise ArgumentError(
            f"info={shown(info)}: pass a DeviceInfo, such as smkern.load_profile('h200').info"
        )
    atom = info.sm_granularity if atom is None else _whole("atom", atom)
    step, most = info.sm_granularity, info.num_sms // 2
    if not 1 <= atom <= most or atom % step:
        larger = ", or take 8 for clusters" if info.capability >= (9, 0) and most >= 8 else ""
        raise BudgetError(
            f"atom={shown(atom)}: SMs of this {info.name} with {info.num_sms} move together in "
            f"multiples of {step} up to {most // step * step}; leave it out{larger}"
        )
    wanted = _default_rungs(info, atom) if decode_sms is None else _counts(decode_sms)
    if not wanted:
        raise BudgetError("a ladder needs a rung: smkern.ladder([32]), or no argument for all")
    for n in wanted:
        if not atom <= n < info.num_sms or n % atom:
            last = (info.num_sms - 1) // atom * atom
            raise BudgetError(
                f"a decode side of {shown(n)} SMs cannot be made of atoms of {atom} on this "
                f"{info.name} with {info.num_sms} SMs: take a multiple of {atom} from {atom} "
                f"to {last}"
            )
    return LadderPlan(info.name, info.num_sms, atom, tuple(wanted))


def _default_rungs(info: DeviceInfo, atom: int) -> list[int]:
    """Steps of 8, or of the next whole atoms; a slice may have too few SMs for two such sides."""
    step = -(-DEFAULT_STEP // atom) * atom
    if 2 * step > info.num_sms:
        step = atom
    return list(range(step, info.num_sms - step + 1, step))
