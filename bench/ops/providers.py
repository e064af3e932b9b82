"""Every operator's rivals by name, who of them is there, and providers in a place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from smkern.bench.frame import Bench, Peer, Provider
from smkern.bench.ops import experts, products, row_wise, sampling
from smkern.bench.ops.cases import OpCase
from smkern.bench.ops.rivals import Rivals
from smkern.bench.peers import once
from smkern.device import Budget
from smkern.measure.compiling import precompile, settled_problem
from smkern.measure.partitions import Place
from smkern.measure.timing import Call
from smkern.tuning.config import Epilogue, GemmProblem

Build = Callable[[OpCase, Any, str], Rivals]

BUILDERS: Mapping[str, Build] = {
    "rms_norm": row_wise.rms_norm,
    "add_rms_norm": row_wise.add_rms_norm,
    "silu_and_mul": row_wise.silu_and_mul,
    "embedding": row_wise.embedding,
    "gemm_swiglu": products.gemm_swiglu,
    "gemm_residual": products.gemm_residual,
    "sample": sampling.sample,
    "topk_softmax": experts.topk_softmax,
    "moe_permute": experts.moe_permute,
    "grouped_gemm": experts.grouped_gemm,
    "moe_unpermute": experts.moe_unpermute,
}
"""Operator to what makes its operands: build(case, flashinfer or None, device)."""
WITHOUT_FLASHINFER = {
    "embedding": "FlashInfer has no embedding",
    "gemm_residual": "FlashInfer's bf16 GEMMs take no residual",
    "topk_softmax": "FlashInfer routes within its whole MoE operators only",
    "moe_permute": "FlashInfer permutes within its whole MoE operators only",
    "moe_unpermute": "FlashInfer un-permutes within its whole MoE operators only",
}
"""Why an operator has no peer of FlashInfer's."""
SLOW_TO_BUILD = {
    "flashinfer:segments": "FlashInfer builds its GEMM of segments when it is first used: name it"
}
"""Peers that take part only where `--peers` names them, and why."""
PEERS = ("torch", "torch:compile", "other")
"""Who takes part: torch's sequence, what its compiler makes of it, anything else that is quick."""
BUDGET_US = 25_000.0
"""Device time that the rounds of a group may take."""


def compile_gemms(cases: Iterable[Any], budgets: Sequence[Budget]) -> int:
    """Compile side by side what the cases' products will launch; how many variants."""
    epilogues = {"gemm_swiglu": Epilogue(swiglu=True), "gemm_residual": Epilogue(residual=True)}
    found: dict[tuple[GemmProblem, Budget, str | None], None] = {}
    for case in cases:
        if (epilogue := epilogues.get(case.op)) is None:
            continue
        columns = case["n"] * (2 if epilogue.swiglu else 1)
        problem = GemmProblem(case["m"], columns, case["k"], epilogue=epilogue)
        for budget in budgets:
            found[settled_problem(problem, budget), budget, None] = None
    return precompile(found) if found else 0


def _warmed(make: Callable[[], Call]) -> Call:
    """A call that ran once on an ordinary stream, on a set that is not checked.

    What a library builds and keeps at its first call must not belong to a partition's stream.
    """
    call = make()
    call(1)
    return call


@dataclass(slots=True)
class OpBench(Bench[OpCase]):
    """A case's rivals, each one's call made once and used in all its places.

    Args:
        names: the peers that take part.
    """

    rivals: Rivals
    names: Collection[str] = PEERS
    budget_us: float = BUDGET_US
    others: list[Peer] = field(init=False)

    def __post_init__(self) -> None:
        rivals = self.rivals
        found: dict[str, Callable[[], Call]] = {}
        if "torch" in self.names:
            found["torch"] = partial(rivals.call, rivals.torch)
        if "torch:compile" in self.names:
            found["torch:compile"] = rivals.compiled
        for name, step in rivals.others.items():
            if name in self.names or ("other" in self.names and name not in SLOW_TO_BUILD):
                found[name] = partial(rivals.call, step)
        self.others = [(name, {}, once(partial(_warmed, make))) for name, make in found.items()]

    def ours(self, case: OpCase, place: Place) -> list[Provider]:
        return [Provider("smkern", place, partial(self.rivals.call, self.rivals.ours))]

    def reset(self, case: OpCase) -> None:
        self.rivals.reset()

    def complaint(self, case: OpCase, provider: Provider, result: Any) -> str | None:
        return self.rivals.complaint(result)
