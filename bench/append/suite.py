"""`smkern bench append`: QK norm, RoPE and the write into pages over cases and SM budgets."""

from __future__ import annotations

from typing import Any

from smkern.bench.append.cases import BUDGETS, CASES, QUICK_BUDGETS, QUICK_CASES, summarize
from smkern.bench.append.providers import PEERS, AppendBench
from smkern.bench.cases import Sizes, case_options
from smkern.bench.frame import GroupSuite
from smkern.bench.peers import flashinfer_with, noted
from smkern.bench.rows import loses_to_best
from smkern.bench.suite import Output, conclude, known_names, suite_command
from smkern.measure.append import AppendOperands

SIZES = Sizes(CASES, QUICK_CASES, BUDGETS, QUICK_BUDGETS)


@suite_command(
    "append",
    *case_options("fp8,norm-rope-64", peers=PEERS),
    quick="Two sizes in two budgets: seconds of GPU time.",
)
def command(output: Output, *, cases: str | None, budgets: Any, peers: str, again: bool) -> None:
    """Time smkern.qk_norm_rope_append and append_kv in SM partitions and on the whole chip.

    Each group of cells is one case in one budget: smkern as dispatched; FlashInfer's norm, RoPE and
    append kernels one after another; plain torch and what torch.compile makes of it, in the spread
    and in the default partition. Peers are given positions, pages and slots ready made.
    """
    groups = SIZES.groups(quick=output.quick, cases=cases, budgets=budgets)
    names = known_names(peers, PEERS, "peer")
    results = output.open()
    flashinfer = noted(flashinfer_with("norm", "page", "rope"), results.meta)
    suite = GroupSuite(
        lambda cases: AppendBench(AppendOperands(cases[0]), flashinfer, names),
        summarize,
        loses_to_best,
    )
    conclude(results, output.path, suite.run(groups, results, output, again=again))
