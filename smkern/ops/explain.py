"""Where an explanation holds: a dispatcher, and the budget that a call there would have."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from smkern.device import Budget, Confinement
from smkern.errors import BudgetError
from smkern.limits import shown
from smkern.ops import checks
from smkern.ops.streams import runtime_streams

if TYPE_CHECKING:
    from smkern.profile import Profile


class Chooser(Protocol):
    """A dispatcher, as far as explanations ask it."""

    profile: Profile


D = TypeVar("D", bound=Chooser)


def dispatcher_and_budget(
    device: int | None,
    of_device: Callable[[int], D],
    offline: Callable[[Profile], D],
    *,
    num_sms: Any,
    confined: Confinement | None,
    clusters: bool | None,
    partition: Any,
) -> tuple[D, Budget]:
    """What chooses an explained call's kernel, and the budget that it chooses for.

    Args:
        device: GPU index; None is the current one. Ignored on a machine without a GPU.
        of_device: GPU index to the dispatcher there.
        offline: A profile to a dispatcher that only chooses: the shipped profile's answers where
            there is no GPU.
        num_sms: As in `smkern.explain_gemm`, like all that follow.
        confined: Imagined confinement, or None.
        clusters: Imagined ability to launch clusters, or None.
        partition: A partition or a budget in place of the current stream's, or None.

    Raises:
        BudgetError: `num_sms` below 1, above the device or above the stream's budget.
    """
    if torch.cuda.is_available():
        index = torch.cuda.current_device() if device is None else device
        streams = runtime_streams()
        dispatcher = of_device(index)
        stream = streams.budget(streams.current_stream(index), index)
    else:
        dispatcher = _shipped(offline)
        stream = Budget(dispatcher.profile.info.num_sms, "mask", True)
    if partition is not None:
        try:
            stream = Budget(partition.num_sms, partition.confined, partition.clusters)
        except AttributeError:
            raise BudgetError(
                f"partition={shown(partition)}: pass a partition or a smkern.device.Budget"
            ) from None
    total = dispatcher.profile.info.num_sms
    return dispatcher, _imagined(num_sms, confined, clusters, stream, total)


@cache
def _shipped(offline: Callable[[Profile], Any]) -> Any:
    """The dispatcher of the GPU whose profile is shipped."""
    from smkern.profile import load_profile

    return offline(load_profile())


def _imagined(
    num_sms: Any, confined: Confinement | None, clusters: bool | None, stream: Budget, total: int
) -> Budget:
    """The budget of a call on a stream, or the imagined one where an option says so."""
    if confined is None and clusters is None:
        return checks.resolve_budget(num_sms, stream, total)
    whole = Budget(total, "mask", True)
    found = checks.resolve_budget(num_sms, stream if num_sms is None else whole, total)
    return Budget(
        found.num_sms,
        found.confined if confined is None else confined,
        found.clusters if clusters is None else clusters,
    )
