"""`smkern bench attention`: our paged attention and its peers over cases and SM budgets."""

from __future__ import annotations

from typing import Any

from smkern.bench.attention.cases import CASES, QUICK_CASES
from smkern.bench.attention.flashinfer import FlashInfer
from smkern.bench.attention.providers import AttentionBench
from smkern.bench.attention.rows import is_losing, summarize
from smkern.bench.cases import Sizes, case_options
from smkern.bench.frame import GroupSuite
from smkern.bench.peers import flashinfer_with, noted
from smkern.bench.suite import Output, conclude, suite_command
from smkern.device import device_info
from smkern.measure.attention import BUDGETS, QUICK_BUDGETS, AttentionOperands

SIZES = Sizes(CASES, QUICK_CASES, BUDGETS, QUICK_BUDGETS)


@suite_command(
    "attention",
    *case_options("64x4096,prefill"),
    quick="Three cases in two budgets: seconds of GPU time.",
)
def command(output: Output, *, cases: str | None, budgets: Any, again: bool) -> None:
    """Time smkern.paged_attention, FlashInfer and SDPA in SM partitions and on the whole chip.

    Each group of cells is one case in one budget: smkern as dispatched and by kernel, under a plan
    made before; FlashInfer's FA2, FA3 and CUDA-core kernels, its plan made before too, and torch's
    SDPA where the case is dense, in the spread and in the default partition; and the plan alone.
    Decode on up to 48 SMs is also timed beside products on the others, against a reader there.
    """
    groups = SIZES.groups(quick=output.quick, cases=cases, budgets=budgets)
    results = output.open()
    flashinfer = FlashInfer.of(noted(flashinfer_with(), results.meta))
    suite = GroupSuite(
        lambda cases: AttentionBench(AttentionOperands(cases[0]), flashinfer), summarize, is_losing
    )
    total = device_info().num_sms
    sides = {n for group in groups for n in (group.num_sms, total - group.num_sms) if n}
    left = suite.run(groups, results, output, again=again, budgets=sides)
    conclude(results, output.path, left)
