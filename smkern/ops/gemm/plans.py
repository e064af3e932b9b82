"""What a GEMM's dispatcher prepares, and whom it asks for it: kernels, a library, what follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from smkern.tuning.config import Budget, GemmConfig, GemmProblem


class Plan(Protocol):
    """A prepared launch: raw addresses, strides in elements, a workspace and a stream."""

    @property
    def workspace_bytes(self) -> int: ...

    @property
    def launch(self) -> Callable[..., None]: ...

    def bind(
        self, a_stride: int, w_stride: int, out_stride: int, residual_stride: int,
        static_weights: bool = False,
    ) -> Callable[..., None]: ...  # fmt: skip


class Kernels(Protocol):
    """Compiles, loads and prepares launches on one device."""

    def is_loaded(self, problem: GemmProblem, config: GemmConfig) -> bool: ...

    def prepare(self, problem: GemmProblem, config: GemmConfig, budget: Budget) -> Plan: ...


class Library(Protocol):
    """A vendor library that plans its own launches."""

    def plan(self, problem: GemmProblem, budget: Budget) -> Plan: ...


class Silu(Protocol):
    """What follows the plain GEMM where SwiGLU runs unfused: out = silu(gate) * up, by rows."""

    def is_loaded(self, problem: GemmProblem) -> bool: ...

    def bind(
        self, problem: GemmProblem, budget: Budget, out_stride: int
    ) -> Callable[[int, int, int], None]:
        """launch(gate and up [m, n], out [m, n / 2], stream), by addresses."""
        ...
