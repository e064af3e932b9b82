"""Green contexts as others make them, and of any choice of SMs, straight from the driver.

smkern's own are made by `smkern.partition`; these are what they are held against.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from smkern.errors import DeviceError

PAIRS = 1
"""CU_DEV_SM_RESOURCE_SPLIT_IGNORE_SM_COSCHEDULING: groups of 2 SMs instead of 8 on sm_90."""
RANDOM_DRAWS = 5


def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Green:
    """Some SMs and a stream that reaches no others.

    Args:
        num_sms: what was granted.
        stream: a torch stream; work goes on it inside `entered()`.
        entered: a context manager in which the stream is what it says. Only torch's older green
            contexts need one: they are made current.
        release: what `close` does.
        keep: what must live as long as this.
    """

    num_sms: int
    stream: Any
    entered: Callable[[], AbstractContextManager[Any]] = nullcontext
    release: Callable[[], None] = _nothing
    keep: Any = None

    def close(self) -> None:
        """Destroy the stream and the context; all work on them has finished."""
        self.release()


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def _value(result: tuple[Any, ...], call: str) -> Any:
    """What a call of cuda.bindings returned beside its status."""
    code, *values = result
    if int(code):
        raise DeviceError(f"{call} failed with {code!s}")
    return values[0] if len(values) == 1 else values


@dataclass(slots=True)
class Driver:
    """The driver's green-context calls on one device, whose primary context is torch's."""

    device: int = 0
    _handle: Any = field(default=None)
    _sms: Any = field(default=None)

    def __post_init__(self) -> None:
        torch.cuda.init()
        torch.zeros(1, device=torch.device("cuda", self.device))
        driver = _driver()
        self._handle = _value(driver.cuDeviceGet(self.device), "cuDeviceGet")
        self._sms = _value(
            driver.cuDeviceGetDevResource(self._handle, self._sm_type), "cuDeviceGetDevResource"
        )

    @property
    def _sm_type(self) -> Any:
        return _driver().CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM

    @property
    def num_sms(self) -> int:
        return int(self._sms.sm.smCount)

    def groups(self, num_sms: int, *, at_most: int, flags: int = 0) -> tuple[list[Any], Any]:
        """(groups of `num_sms` or the next count that `flags` allow, the remainder)."""
        call = "cuDevSmResourceSplitByCount"
        split = _driver().cuDevSmResourceSplitByCount(at_most, self._sms, flags, num_sms)
        groups, count, rest = _value(split, call)
        return list(groups[: int(count)]), rest

    def create(self, groups: Sequence[Any]) -> Green:
        """A green context of these groups of one split, and a stream of it."""
        driver = _driver()
        described = _value(
            driver.cuDevResourceGenerateDesc(list(groups), len(groups)), "cuDevResourceGenerateDesc"
        )
        context = _value(driver.cuGreenCtxCreate(described, self._handle, 1), "cuGreenCtxCreate")
        raw = _value(driver.cuGreenCtxStreamCreate(context, 1, 0), "cuGreenCtxStreamCreate")
        granted = _value(
            driver.cuGreenCtxGetDevResource(context, self._sm_type), "cuGreenCtxGetDevResource"
        )

        def release() -> None:
            _value(driver.cuStreamDestroy(raw), "cuStreamDestroy")
            _value(driver.cuGreenCtxDestroy(context), "cuGreenCtxDestroy")

        stream = torch.cuda.ExternalStream(int(raw), device=self.device)
        return Green(int(granted.sm.smCount), stream, release=release)

    def one_group(self, num_sms: int) -> Green:
        """FlashInfer's way: one group of the driver's choice, the rest in the remainder."""
        groups, _ = self.groups(num_sms, at_most=1)
        return self.create(groups[:1])

    def granted_to_current(self) -> int:
        """SMs of the context that is current."""
        driver = _driver()
        context = _value(driver.cuCtxGetCurrent(), "cuCtxGetCurrent")
        granted = _value(driver.cuCtxGetDevResource(context, self._sm_type), "cuCtxGetDevResource")
        return int(granted.sm.smCount)

    def granted_to_stream(self, raw_stream: int) -> int:
        """SMs of the green context that a stream belongs to; the device's where it has none."""
        driver = _driver()
        context = _value(driver.cuStreamGetGreenCtx(raw_stream), "cuStreamGetGreenCtx")
        if not int(context):
            return self.num_sms
        granted = _value(
            driver.cuGreenCtxGetDevResource(context, self._sm_type), "cuGreenCtxGetDevResource"
        )
        return int(granted.sm.smCount)

    def torch_green(self, num_sms: int) -> Green:
        """torch's green context: by its stream where this torch gives one, else made current.

        Raises:
            DeviceError: this torch has none.
        """
        from torch.cuda import green_contexts

        if not getattr(green_contexts, "SUPPORTED", False):
            raise DeviceError(f"torch {torch.__version__} was built without green contexts")
        context: Any = green_contexts.GreenContext.create(num_sms=num_sms, device_id=self.device)
        stream = _stream_of(context)
        if stream is not None:
            granted = self.granted_to_stream(stream.cuda_stream)
            return Green(granted, stream, keep=context)

        @contextmanager
        def entered() -> Iterator[None]:
            driver = _driver()
            primary = _value(driver.cuCtxGetCurrent(), "cuCtxGetCurrent")
            context.set_context()
            try:
                yield
            finally:
                try:
                    context.pop_context()
                finally:
                    _value(driver.cuCtxSetCurrent(primary), "cuCtxSetCurrent")

        with entered():
            granted = self.granted_to_current()
            stream = torch.cuda.current_stream(self.device)
        return Green(granted, stream, entered)


def _stream_of(context: Any) -> Any:
    """The stream of a torch green context, or None where it has no such method."""
    try:
        return context.Stream()
    except AttributeError:
        return None


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
        "gpc-blocked": sorted(by_id, key=lambda i: block_of.get(min(pairs[i]), len(eights))),
    }
    for seed in range(RANDOM_DRAWS):
        drawn = by_id.copy()
        random.Random(seed).shuffle(drawn)
        orders[f"random-{seed}"] = drawn
    return orders
