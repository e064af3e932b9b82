"""What a warmup of small operators has to do, from one call of each kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from smkern.ops.aliasing import pointer
from smkern.ops.operator import Operator
from smkern.ops.operator_check import check_operator
from smkern.ops.operator_dispatch import Compile, Variant
from smkern.ops.operator_eager import EagerOperator, eager_operator
from smkern.ops.warming import Target, Work


def work_of(
    op: Operator[Any], calls: Sequence[Any], target: Target, eager: EagerOperator[Any] | None = None
) -> Work:
    """What an operator needs on a device for calls like these, each of which loads its kind.

    Args:
        op: The operator.
        calls: One a kind, on tensors of the device with the wanted alignments; they are launched.
        target: Where to warm up.
        eager: The eager path to use instead of the device's own.
    """
    eager = eager or eager_operator(op, target.index)
    kernels = eager.dispatcher.kernels()
    variants: dict[Variant, None] = {}
    new: dict[Variant, None] = {}
    for call in calls:
        check_operator(op, call)
        problem = op.problem(call, aligned(op, call))
        if problem is None:
            continue
        found = dict.fromkeys(kernels.variants(problem))
        variants |= found
        if not kernels.is_loaded(problem):
            new |= found
    return Work(
        choices=len(calls),
        variants=len(variants),
        compile=[Compile(variant) for variant in new],
        launches=[partial(eager, call) for call in calls],
    )


def work_of_calls(
    calls: Callable[[torch.device, bool], Sequence[tuple[Operator[Any], Any]]], target: Target
) -> Work:
    """What operators need on a device.

    Args:
        calls: (device, aligned) to operators, each with a call of a kind.
        target: Where to warm up.
    """
    device = torch.device("cuda", target.index)
    made = [one for aligned in target.aligned for one in calls(device, aligned)]
    return joined([work_of(op, [call], target) for op, call in made])


def joined(works: Sequence[Work]) -> Work:
    """The works of a family's operators as one."""
    return Work(
        choices=sum(work.choices for work in works),
        variants=sum(work.variants for work in works),
        compile=list(dict.fromkeys(task for work in works for task in work.compile)),
        launches=[launch for work in works for launch in work.launches],
        cells=[cell for work in works for cell in work.cells],
    )


def aligned(op: Operator[Any], call: Any) -> bool:
    """Whether the tensors whose alignment chooses kernels begin at whole 16 bytes."""
    return not any(pointer(getattr(call, name)) % 16 for name in op.vectors)
