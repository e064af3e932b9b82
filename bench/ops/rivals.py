"""One operator's operands in sets, and who computes it: ours, torch's sequence, FlashInfer's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from smkern.measure.timing import Call

Step = Callable[..., Sequence[Tensor]]
"""step(*set) computes on one set's operands and returns the results, written or made."""
TOLERANCE = 1e-2
"""|x - reference| / |reference|; bf16 rounds to 2e-3."""


@dataclass(slots=True)
class Rivals:
    """What a case is computed on and by whom. All steps return the same results.

    Args:
        sets: operands and outputs, as the steps take them; set 0 is what results are checked on.
        ours: by the public operator.
        torch: the sequence of torch's operators that it replaces.
        others: more peers by name: `flashinfer`, torch's own fused operators.
        to_compile: what torch's compiler is given; the sequence by default.
        undo: undoes on set 0 what a step changes in place, and poisons its outputs; by default
            the last tensor, which a step writes.
        judge: what is wrong with the results on set 0, or None; the reference by default.
        reference: results on set 0 in fp32, made once, before anything ran; by default the
            sequence's, which then changes nothing in place.
    """

    sets: Sequence[tuple[Any, ...]]
    ours: Step
    torch: Step
    others: Mapping[str, Step] = field(default_factory=dict)
    to_compile: Step | None = None
    undo: Callable[[], Any] | None = None
    judge: Callable[[Sequence[Tensor]], str | None] | None = None
    reference: Sequence[Tensor] = ()

    def __post_init__(self) -> None:
        if self.judge is None and not self.reference:
            wide = (x.float() if x.is_floating_point() else x for x in self.sets[0])
            self.reference = self.torch(*wide)

    def reset(self) -> None:
        """Set 0 as before the first step, what a step must write poisoned."""
        if self.undo is not None:
            self.undo()
        else:
            poison(self.sets[0][-1])

    def call(self, step: Step) -> Call:
        """The step on set after set."""
        sets, count = self.sets, len(self.sets)

        def call(i: int) -> Sequence[Tensor]:
            return step(*sets[i % count])

        return call

    def compiled(self) -> Call:
        """What torch's compiler makes of its sequence."""
        torch._dynamo.reset()  # a function is compiled for a few sizes only, then no more
        return self.call(torch.compile(self.to_compile or self.torch, dynamic=False))

    def complaint(self, results: Sequence[Tensor]) -> str | None:
        """What is wrong with the results on set 0; None where they are right."""
        if self.judge is not None:
            return self.judge(results)
        worst = max(map(relative_error, results, self.reference))
        if worst < TOLERANCE:
            return None
        return f"wrong result: |x - torch| / |torch| is {worst:.3g}, at most {TOLERANCE}"


def relative_error(result: Tensor, wanted: Tensor) -> float:
    """|x - y| / |y|; infinite where an element is NaN, or an integer another."""
    if not wanted.is_floating_point():
        return 0.0 if torch.equal(result.long(), wanted.long()) else float("inf")
    norm = torch.linalg.vector_norm
    top = norm(result.float() - wanted.float())
    bottom = norm(wanted.float()).clamp(min=1e-20)
    error = float(top / bottom)
    return error if error == error else float("inf")


def if_there(module: Any, step: Step, name: str = "flashinfer") -> dict[str, Step]:
    """The step by its name where its module is installed."""
    return {} if module is None else {name: step}


def poison(*tensors: Tensor) -> None:
    """Fill with NaN, integers with -1, so that an element nobody wrote is found."""
    for tensor in tensors:
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)


def random_of(device: str, seed: int) -> Callable[..., Tensor]:
    """random(*size, scale=1): standard normal bf16 values of a seed, one after another."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(*size: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)
        return values.mul_(scale) if scale != 1.0 else values

    return random
