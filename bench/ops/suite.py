"""`smkern bench ops`: a layer's other operators over cases and SM budgets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smkern.bench.cases import Group, Sizes, case_options
from smkern.bench.frame import Bench, GroupSuite
from smkern.bench.ops.append import AppendBench
from smkern.bench.ops.cases import (
    BUDGETS,
    MORE_CASES,
    QUICK_BUDGETS,
    QUICK_CASES,
    USUAL_CASES,
    OpCase,
)
from smkern.bench.ops.providers import (
    BUILDERS,
    PEERS,
    SLOW_TO_BUILD,
    WITHOUT_FLASHINFER,
    OpBench,
    compile_gemms,
)
from smkern.bench.ops.rows import summarize
from smkern.bench.peers import flashinfer_with, noted
from smkern.bench.rows import loses_to_best
from smkern.bench.suite import Output, conclude, known_names, suite_command
from smkern.measure.append import AppendCase, AppendOperands
from smkern.measure.partitions import Partitions

SIZES: Sizes[OpCase | AppendCase] = Sizes(
    USUAL_CASES, QUICK_CASES, BUDGETS, QUICK_BUDGETS, MORE_CASES
)
FLASHINFER_PARTS = ("activation", "gemm", "norm", "page", "rope", "sampling")
"""Modules of FlashInfer that the operators have peers in."""


def ops_suite(
    flashinfer: Any, peers: Sequence[str], device: str = "cuda"
) -> GroupSuite[OpCase | AppendCase]:
    def build(cases: Sequence[OpCase | AppendCase]) -> Bench[Any]:
        (case,) = cases[:1]
        if isinstance(case, AppendCase):
            return AppendBench(AppendOperands(case, device), flashinfer, peers)
        return OpBench(BUILDERS[case.op](case, flashinfer, device), peers)

    def compile_all(groups: Sequence[Group[Any]], partitions: Partitions, _: Any) -> None:
        counts = {group.num_sms for group in groups}
        budgets = [place.budget for n in counts if (place := partitions.at(n)) is not None]
        compile_gemms([group.case for group in groups], budgets)

    return GroupSuite(build, summarize, loses_to_best, prepare=compile_all)


@suite_command(
    "ops",
    *case_options("sample,rms_norm-64,fp8-8192", peers=PEERS),
    quick="Three cases in two budgets: seconds of GPU time.",
)
def command(output: Output, *, cases: str | None, budgets: Any, peers: str, again: bool) -> None:
    """Time a layer's operators in SM partitions and on the whole chip.

    Each group of cells is one operator at one size in one budget: smkern; the sequence of torch's
    operators that it replaces, as it is and compiled; what torch, cuBLAS and FlashInfer have of
    their own, in the spread and in the default partition. Appends without RoPE and into fp8 caches
    (plain-64, fp8-64) are measured where they are named.
    """
    groups = SIZES.groups(quick=output.quick, cases=cases, budgets=budgets)
    names = known_names(peers, (*PEERS, *SLOW_TO_BUILD), "peer")
    results = output.open()
    suite = ops_suite(noted(flashinfer_with(*FLASHINFER_PARTS), results.meta), names)
    ops = {group.case.op for group in groups}
    results.meta["without_flashinfer"] = {
        op: why for op, why in WITHOUT_FLASHINFER.items() if op in ops
    }
    results.meta["left_out_unless_named"] = SLOW_TO_BUILD
    left = suite.run(groups, results, output, again=again)
    conclude(results, output.path, left)
