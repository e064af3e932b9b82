"""The dense bf16 product that stands for tensor-bound work, by cuBLAS and by smkern.gemm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from smkern.measure.partitions import Place
from smkern.measure.timing import Call, try_eagerly

M, N, K = 4096, 24576, 4096
"""3,072 tiles of 128x256: the last, partial wave of any partition is under 5% of the time."""


class Dense:
    """out [M, N] = a [M, K] @ w [N, K]^T in bf16; normal values, so that power is a model's."""

    def __init__(self) -> None:
        options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
        self._a = torch.randn(M, K, **options)
        self._w = torch.randn(N, K, **options)
        self._out = torch.empty(M, N, **options)

    @property
    def case(self) -> dict[str, Any]:
        return {"m": M, "n": N, "k": K, "dtype": "bf16"}

    @staticmethod
    def tflops(us: float) -> float:
        """Rate of a product that took `us` microseconds, TFLOP/s."""
        return 2 * M * N * K / us / 1e6

    def calls(self) -> dict[str, Call]:
        """Provider to call, the reference first."""
        import smkern

        transposed = self._w.t()
        return {
            "cublas": lambda i: torch.mm(self._a, transposed, out=self._out),
            "smkern": lambda i: smkern.gemm(self._a, self._w, out=self._out),
        }

    def working(self, place: Place, errors: dict[str, str]) -> Iterator[tuple[str, Call]]:
        """The providers that run at `place`; the others are named in `errors`.

        cuBLAS launches clusters, which a small spread partition cannot hold.
        """
        for provider, call in self.calls().items():
            message = try_eagerly(call, place.stream)
            if message is None:
                yield provider, call
            else:
                errors[provider] = message
