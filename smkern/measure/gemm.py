"""Measured GEMMs: shapes, rows, budgets, and more sets of operands than fit into L2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from smkern.measure.timing import sets_for

Shape = tuple[int, int]
"""(n, k) of a weight [n, k]."""

SHAPES: tuple[Shape, ...] = (
    (6144, 4096),
    (4096, 4096),
    (28672, 4096),
    (4096, 14336),
    (24576, 4096),
    (4096, 12288),
)
MS = (1, 8, 16, 32, 64, 77, 128, 256, 512, 1000, 1024, 2048, 3001, 4096, 8192)
BUDGETS = (16, 32, 48, 60, 72, 84, 100, 116, 132)


@dataclass(slots=True)
class GemmOperands:
    """Weights, activations and outputs of one (n, k), shared by all rows m and all providers.

    Set i holds a weight [n, k], an activation buffer and an output buffer; a(m, i) and out(m, i)
    are views [m, k] and [m, n] of the buffers' heads. Values are standard normal, in bf16.
    """

    n: int
    k: int
    max_m: int
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    num_sets: int = 0
    _weights: list[Tensor] = field(default_factory=list)
    _activations: Tensor | None = None
    _outputs: Tensor | None = None
    _references: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num_sets = self.num_sets or sets_for(2 * self.n * self.k)
        generator = torch.Generator(self.device).manual_seed(self.n * 31 + self.k)

        def random(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=self.device, dtype=self.dtype)

        self._weights = [random(self.n, self.k) for _ in range(self.num_sets)]
        self._activations = random(self.num_sets, self.max_m * self.k)
        self._outputs = torch.empty(
            self.num_sets, self.max_m * self.n, device=self.device, dtype=self.dtype
        )

    def w(self, i: int) -> Tensor:
        return self._weights[i % self.num_sets]

    def a(self, m: int, i: int) -> Tensor:
        assert self._activations is not None
        return self._activations[i % self.num_sets, : m * self.k].view(m, self.k)

    def out(self, m: int, i: int) -> Tensor:
        assert self._outputs is not None
        return self._outputs[i % self.num_sets, : m * self.n].view(m, self.n)

    def sets(self, m: int) -> Sequence[tuple[Tensor, Tensor, Tensor]]:
        """(a, w, out) of every set."""
        return [(self.a(m, i), self.w(i), self.out(m, i)) for i in range(self.num_sets)]

    def reference(self, m: int) -> Tensor:
        """a @ w.T of set 0 by torch, for spot checks; one m is kept at a time."""
        if m not in self._references:
            self._references = {m: self.a(m, 0) @ self.w(0).t()}
        return self._references[m]

    def poison(self, m: int) -> None:
        """Fill set 0's output with NaN, so that elements left unwritten show."""
        self.out(m, 0).fill_(float("nan"))

    def error(self, m: int) -> float:
        """|out - reference| / |reference| of set 0; NaN where an element was not written."""
        reference = self.reference(m)
        difference = self.out(m, 0) - reference
        norm = torch.linalg.vector_norm
        top, bottom = (norm(x, dtype=torch.float32) for x in (difference, reference))
        return float(top / bottom)
