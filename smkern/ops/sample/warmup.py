"""The sampler's part of a warmup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from smkern.ops.annotated import check_fields
from smkern.ops.operator_check import check_operator
from smkern.ops.operator_warmup import work_of_calls
from smkern.ops.sample.call import Sample
from smkern.ops.sample.operators import SAMPLE
from smkern.ops.warming import Target, Work, room


@dataclass(frozen=True, slots=True)
class SampleCalls:
    """Calls of `smkern.sample` to come, for `smkern.warmup`; batch and parameters are free.

    Args:
        vocab: Tokens of the vocabulary.
        dtypes: Dtypes of the logits.

    Raises:
        ArgumentError: a vocabulary or dtypes that cannot be.

    Example:
        >>> import smkern
        >>> qwen = smkern.SampleCalls(151936)
        >>> smkern.warmup(calls=[qwen])  # doctest: +SKIP
    """

    vocab: int
    dtypes: Sequence[torch.dtype] = (torch.bfloat16,)

    def __post_init__(self) -> None:
        check_fields(self)
        for call in self.calls(torch.device("meta"), True):
            check_operator(SAMPLE, call)

    def calls(self, device: torch.device, aligned: bool) -> list[Any]:
        """A call of one row for each dtype, on tensors of its own."""
        return [Sample(room((1, self.vocab), dtype, aligned, device)) for dtype in self.dtypes]

    def work(self, target: Target) -> Work:
        """What these calls need on a device."""
        return work_of_calls(lambda *where: [(SAMPLE, call) for call in self.calls(*where)], target)
