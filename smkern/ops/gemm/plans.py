"""What a GEMM's dispatcher prepares, by whatever kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol


class Plan(Protocol):
    """A prepared launch: raw addresses, strides in elements, a workspace and a stream."""

    @property
    def workspace_bytes(self) -> int: ...

    def bind(
        self, a_stride: int, w_stride: int, out_stride: int, residual_stride: int,
        static_weights: bool = False,
    ) -> Callable[..., None]: ...  # fmt: skip
