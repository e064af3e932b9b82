"""Who computes a GEMM in a benchmark: smkern as dispatched, its own kernels, cuBLAS."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import torch

from smkern.autotune.gemm import GemmTuner
from smkern.bench.cases import Group
from smkern.bench.frame import Bench, Provider, wrong_result
from smkern.bench.rows import Cell
from smkern.device import Budget
from smkern.measure.compiling import dispatcher_of
from smkern.measure.gemm import GemmOperands
from smkern.measure.partitions import Partitions, Place
from smkern.measure.timing import Call, Timing, ratio
from smkern.ops.gemm.dispatch import Dispatcher
from smkern.tuning.config import GemmConfig, GemmProblem

STATIC = "smkern:static"
"""As dispatched, with weights that are promised to stay as they are, as a model's do."""
OUR_BACKENDS: dict[str, str | None] = {
    "smkern": None,
    STATIC: None,
    "smkern:triton": "own",
    "smkern:model": "model",
}
"""Provider to the `backend` of `smkern.gemm`: as dispatched; never cuBLAS; the model, no tables."""
TOLERANCE = 1e-2
"""|out - torch| / |torch| of a bf16 product; rounding alone gives 2e-3, a wrong tile far more."""


@dataclass(frozen=True, slots=True)
class GemmCase:
    """out [m, n] = a [m, k] @ w [n, k]^T in bf16. `op`: the operator of its cells."""

    m: int
    n: int
    k: int
    op: str = "gemm"

    @property
    def name(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"

    @property
    def shape(self) -> tuple[int, int]:
        return self.n, self.k

    @property
    def about(self) -> dict[str, Any]:
        """The `case` of a results cell."""
        return {"m": self.m, "n": self.n, "k": self.k, "dtype": "bf16"}

    @property
    def problem(self) -> GemmProblem:
        return GemmProblem(self.m, self.n, self.k)

    @property
    def bytes_moved(self) -> int:
        return self.problem.bytes_moved

    @property
    def flops(self) -> int:
        return self.problem.flops


@dataclass(slots=True)
class ShapeBench(Bench[GemmCase]):
    """The cases of one weight shape.

    Args:
        operands: the shape's operands, which serve all rows.
        dispatcher: the device's dispatcher.
    """

    operands: GemmOperands
    dispatcher: Dispatcher
    budget_us: float = 12_000.0

    @classmethod
    def of(cls, cases: Sequence[GemmCase], **options: Any) -> Self:
        """On operands for these cases; `options`: its other fields."""
        operands = GemmOperands(*cases[0].shape, max(case.m for case in cases))
        return cls(operands, dispatcher_of(), **options)

    def reset(self, case: GemmCase) -> None:
        self.operands.reference(case.m)
        self.operands.poison(case.m)

    def complaint(self, case: GemmCase, provider: Provider, result: Any) -> str | None:
        return wrong_result(self.operands.error(case.m), TOLERANCE)

    def dispatched(self, name: str, case: GemmCase, place: Place, **options: Any) -> Provider:
        """The public operator; `options` go to `smkern.gemm`."""
        make = partial(dispatched_call, self.operands, case.m, **options)
        return Provider(name, place, make, self.selection(case, place, **options))

    def selection(
        self,
        case: GemmCase,
        place: Place,
        backend: str | None = None,
        *,
        batch_invariant: bool = False,
        static_weights: bool = False,
    ) -> dict[str, str]:
        """The configuration that dispatch chooses, and from where it takes it."""
        problem = replace(case.problem, batch_invariant=batch_invariant)
        found = self.dispatcher.select(problem, place.budget, backend)
        return {"config": describe(found.config), "source": found.source}


@dataclass(slots=True)
class GemmBench(ShapeBench):
    """Our GEMM and cuBLAS on one weight shape.

    Args:
        backends: our providers, by the `backend` of `smkern.gemm`.
        with_peers: whether cuBLAS takes part.
        with_context: with cuBLAS on the whole chip, and our kernel told a wrong budget.
    """

    backends: Mapping[str, str | None] = field(default_factory=lambda: OUR_BACKENDS)
    with_peers: bool = True
    with_context: bool = True

    def providers(self, group: Group[GemmCase], partitions: Partitions) -> list[Provider]:
        case, full = group.case, partitions.full
        place = partitions.at(group.num_sms)
        found = [] if place is None else list(self.ours(case, place))
        for peer in dict.fromkeys((place, partitions.at(group.num_sms, "default"))):
            if peer is not None and self.with_peers:
                found.append(self._cublas("cublas", case, peer))
        if not self.with_context or place is full:
            return found
        found.append(self._cublas("cublas-full", case, full))
        return found if place is None else [*found, self._wrong_budget(case, place, full.budget)]

    def ours(self, case: GemmCase, place: Place) -> list[Provider]:
        """Our providers, those that make the same launch once."""
        found: dict[Any, Provider] = {}
        for provider, backend in self.backends.items():
            config = self.dispatcher.select(case.problem, place.budget, backend).config
            static = provider == STATIC
            if (config, static) not in found:
                found[config, static] = self.dispatched(
                    provider, case, place, backend=backend, static_weights=static
                )
        return list(found.values())

    def _cublas(self, name: str, case: GemmCase, place: Place) -> Provider:
        return Provider(name, place, partial(cublas_call, self.operands, case.m))

    def _wrong_budget(self, case: GemmCase, place: Place, told: Budget) -> Provider:
        """Our own kernel told another budget than the place's, past all validation."""
        config = self.dispatcher.select(case.problem, told, "own").config
        tuner = GemmTuner(self.dispatcher, self.operands, static_weights=False)
        make = partial(tuner.call, case.problem, replace(place, budget=told), config)
        about = {**case.about, "budget_told": told.num_sms}
        return Provider("wrong-budget", place, make, {"config": describe(config)}, case=about)

    def compare(
        self, provider: Provider, cells: Mapping[str, Cell], timings: Mapping[str, Timing]
    ) -> Cell:
        """cuBLAS's time in the better of its places in this budget over ours."""
        peers = [key for key in timings if cells[key]["provider"] == "cublas"]
        if not peers or not provider.is_ours:
            return {}
        best = min(peers, key=lambda key: timings[key].us_median)
        return {
            "vs_cublas": round(ratio(timings[best], timings[provider.key]), 4),
            "best_cublas": cells[best]["placement"] or "full",
        }

    def more(self, group: Group[GemmCase], partitions: Partitions, cells: list[Cell]) -> list[Cell]:
        """Cells of the providers that picked a configuration which was measured already."""
        place = partitions.at(group.num_sms)
        if place is None:
            return []
        ours = {cell["provider"]: cell for cell in cells if cell["provider"] in self.backends}
        copies = []
        for provider, backend in self.backends.items():
            if provider not in ours:
                chosen = self.selection(group.case, place, backend)
                twin = next(
                    cell for name, cell in ours.items()
                    if name != STATIC and cell["config"] == chosen["config"]
                )  # fmt: skip
                about = {"provider": provider, "source": chosen["source"]}
                copies.append({**twin, **about, "same_as": twin["provider"]})
        return copies


def dispatched_call(ops: GemmOperands, m: int, **options: Any) -> Call:
    """The public operator; `options` go to `smkern.gemm`."""
    import smkern

    gemm, sets = smkern.gemm, ops.sets(m)
    count = len(sets)

    def call(i: int) -> None:
        a, w, out = sets[i % count]
        gemm(a, w, out=out, **options)

    return call


def cublas_call(ops: GemmOperands, m: int) -> Call:
    """torch.mm, which is cuBLAS with torch's workspace of the stream."""
    sets = [(a, w.t(), out) for a, w, out in ops.sets(m)]
    count = len(sets)

    def call(i: int) -> None:
        a, wt, out = sets[i % count]
        torch.mm(a, wt, out=out)

    return call


def describe(config: GemmConfig) -> str:
    """A configuration in one word: `tma:128x256x64:w8:s3:k1` and what is unusual about it."""
    if config.kernel == "cublaslt":
        return config.kernel
    tile = f"{config.block_m}x{config.block_n}x{config.block_k}"
    parts = [config.kernel, tile, f"w{config.num_warps}", f"s{config.num_stages}"]
    parts.append(f"k{config.split or 'stream'}")
    if config.swap:
        parts.append("swap")
    if config.ctas_per_sm > 1:
        parts.append(f"c{config.ctas_per_sm}")
    if config.max_ctas:
        parts.append(f"max{config.max_ctas}")
    if not config.overlap:
        parts.append("apart")
    return ":".join(parts)
