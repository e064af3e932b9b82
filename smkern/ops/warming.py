"""What every family of operators brings to a warmup, and what a warmup does with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from smkern.errors import ArgumentError
from smkern.ops import checks
from smkern.tuning.config import Budget

if TYPE_CHECKING:
    from smkern.ops.gemm.warmup_tune import Cell


@dataclass(frozen=True, slots=True)
class Target:
    """Where to warm up: a device, budgets on it, and which alignments of tensors.

    Args:
        index: The device's index; it is current, as is the stream to launch on.
        num_sms: SMs of the device.
        budgets: Those that calls will have.
        aligned: Whether tensors are 16-byte aligned: True, False or both.
        places: Streams to measure on, by budget; empty where nothing is to be measured.
    """

    index: int
    num_sms: int
    budgets: Sequence[Budget]
    aligned: Sequence[bool]
    places: Mapping[Budget, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Work:
    """What a family has to do.

    Args:
        choices: Combinations of numbers that were visited.
        variants: Kernels that they come down to.
        compile: What compiles a kernel that is not loaded into this user's cache; run in other
            processes, so it can be pickled.
        launches: What loads a kernel, if it is new, and launches it once on the current stream.
        cells: What is worth measuring once all is loaded.
    """

    choices: int
    variants: int
    compile: Sequence[Callable[[], object]]
    launches: Sequence[Callable[[], None]]
    cells: Sequence[Cell] = ()


class Warmable(Protocol):
    """Calls to come, described by the numbers that choose their kernels."""

    def work(self, target: Target) -> Work: ...


@dataclass(frozen=True, slots=True)
class Within:
    """Calls that come in budgets of their own, whatever those of the warmup are.

    Args:
        calls: The calls.
        budgets: Counts of SMs, `Budget`s or partitions.
    """

    calls: Warmable
    budgets: Sequence[Any]

    def work(self, target: Target) -> Work:
        """What the calls need on a device."""
        budgets = as_budgets(self.budgets, target.num_sms)
        return self.calls.work(replace(target, budgets=budgets))


def room(shape: tuple[int, ...], dtype: torch.dtype, aligned: bool, device: torch.device) -> Tensor:
    """A dense tensor whose address is a multiple of 16 bytes, or just not."""
    count = torch.Size(shape).numel()
    whole = torch.zeros(count + 1, dtype=dtype, device=device)
    return whole[0 if aligned else 1 :][:count].view(shape)


def as_budgets(budgets: Iterable[Any] | None, num_sms: int) -> list[Budget]:
    """Budgets from counts, `Budget`s and partitions.

    A count stands for a partition of that size with and without clusters, and for a grid of it.
    None: every multiple of 8, and the device.

    Raises:
        BudgetError: a count below 1 or above the device.
    """
    wanted = [*range(8, num_sms, 8), num_sms] if budgets is None else list(budgets)
    whole = Budget(num_sms, "mask", True)
    found: dict[Budget, None] = {}
    for item in wanted:
        if isinstance(item, Budget):
            found[item] = None
        elif hasattr(item, "confined"):
            found[Budget(item.num_sms, item.confined, item.clusters)] = None
        else:
            count = checks.resolve_budget(item, whole, num_sms).num_sms
            if count == num_sms:
                found[whole] = None
                continue
            for confined in ("mask", "grid"):
                found.update({Budget(count, confined, c): None for c in (True, False)})
    return list(found)


def check_shapes(shapes: Iterable[Any], max_m: int = 1, columns: str = "N") -> None:
    """Raise ArgumentError for weights' sizes, or a largest M, that cannot be."""
    for shape in shapes:
        if len(shape) != 2 or min(shape) < 1:
            raise ArgumentError(f"shapes has {shape}: give ({columns}, K), both at least 1")
    if max_m < 1:
        raise ArgumentError(f"max_m={max_m}: give at least 1")


class Bar:
    """A progress bar over named steps, or nothing."""

    def __init__(self, shown: bool) -> None:
        self._context: AbstractContextManager[Any] = nullcontext()
        if shown:
            from rich.progress import Progress

            self._context = Progress(transient=True)
        self._progress: Any = None

    def __enter__(self) -> Bar:
        self._progress = self._context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._context.__exit__(*error)

    def step(self, name: str, total: int) -> Callable[[int], None]:
        """Start a step; call what it returns with the count done so far."""
        if self._progress is None:
            return lambda done: None
        task = self._progress.add_task(name, total=total)
        return lambda done: self._progress.update(task, completed=done)
