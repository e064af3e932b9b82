"""Green contexts as others make them, and of any choice of SMs, straight from the driver.

smkern's own are made by `smkern.partition`; these are what they are held against.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from smkern.device import device_info
from smkern.errors import DeviceError
from smkern.partition.driver import IGNORE_COSCHEDULING, cuda_driver

PAIR = 2
EIGHT = 8
RANDOM_DRAWS = 5
WITNESSES = 512
"""CTAs that say on which SM they are."""


@dataclass(frozen=True, slots=True)
class Green:
    """Some SMs and a stream that reaches no others.

    Args:
        num_sms: what was granted.
        stream: a torch stream.
        release: what `close` does.
        keep: what must live as long as this.
    """

    num_sms: int
    stream: Any
    release: Callable[[], None] = lambda: None
    keep: Any = None

    def close(self) -> None:
        """Destroy the stream and the context, once all work has finished."""
        torch.cuda.synchronize()
        self.release()


class Driver:
    """Green contexts of the first device, whose primary context is torch's."""

    def __init__(self) -> None:
        self._cuda = cuda_driver(0)

    def sms_of(self, green: Green) -> tuple[int, ...]:
        """The ids of the SMs that its work reaches, in order."""
        return tuple(sorted(set(self._cuda.smids(green.stream.cuda_stream, WITNESSES))))

    def pairs(self) -> list[Any]:
        """The device's groups of 2 SMs, as the driver lists them."""
        return self._cuda.split(PAIR, IGNORE_COSCHEDULING)[0]

    def eights(self) -> tuple[list[Any], Any]:
        """(the driver's own groups of 8 SMs, the remainder or None)"""
        return self._cuda.split(EIGHT, 0)

    def create(self, groups: Sequence[Any]) -> Green:
        """A green context of these groups of one split, and a stream of it."""
        made = self._cuda.create(groups)
        stream = torch.cuda.ExternalStream(made.stream, device=torch.device("cuda", 0))

        def release() -> None:
            self._cuda.destroy_stream(made)
            self._cuda.detach(made)

        return Green(made.num_sms, stream, release=release)

    def one_group(self, num_sms: int) -> Green:
        """FlashInfer's way: a split into one group of that size and the remainder."""
        cuda = self._cuda
        whole = cuda.call("cuDeviceGetDevResource", cuda.handle, cuda.sm)
        groups, _, _ = cuda.call("cuDevSmResourceSplitByCount", 1, whole, 0, num_sms)
        return self.create(groups[:1])

    def torch_green(self, num_sms: int) -> Green:
        """torch's green context and its stream.

        Raises:
            DeviceError: this torch has none.
        """
        from torch.cuda import green_contexts

        if not getattr(green_contexts, "SUPPORTED", False):
            raise DeviceError(f"torch {torch.__version__} was built without green contexts")
        context: Any = green_contexts.GreenContext.create(num_sms=num_sms, device_id=0)
        stream = context.Stream()
        granted = self._cuda.stream_num_sms(stream.cuda_stream)
        return Green(granted or device_info(0).num_sms, stream, keep=context)


def candidate_orders(
    pairs: Sequence[tuple[int, ...]], eights: Sequence[tuple[int, ...]]
) -> dict[str, list[int]]:
    """Orders in which a partition could take the device's pairs of SMs.

    Args:
        pairs: the SM ids of each 2-SM group, as the driver lists the groups.
        eights: the SM ids of each of the driver's own groups, the remainder's last.

    Returns:
        name to a permutation of range(len(pairs)): `split-order` as the driver lists the pairs;
        `id-order` and its reverse; `gpc-blocked`, filling each of the driver's groups of four
        TPCs before the next; `random-0` to `random-4`, drawn from fixed seeds.
    """
    by_id = sorted(range(len(pairs)), key=lambda i: min(pairs[i]))
    block_of = {sm: block for block, sms in enumerate(eights) for sm in sms}
    orders = {
        "split-order": list(range(len(pairs))),
        "id-order": by_id,
        "id-order-reversed": by_id[::-1],
        "low-then-high": by_id[: len(by_id) // 2] + by_id[: len(by_id) // 2 - 1 : -1],
        "gpc-blocked": sorted(by_id, key=lambda i: block_of.get(min(pairs[i]), len(eights))),
    }
    for seed in range(RANDOM_DRAWS):
        drawn = by_id.copy()
        random.Random(seed).shuffle(drawn)
        orders[f"random-{seed}"] = drawn
    return orders
