"""`smkern bench layouts`: decode attention of heads and lengths that nobody tuned."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from smkern.bench.attention.flashinfer import FlashInfer
from smkern.bench.attention.providers import AttentionBench
from smkern.bench.attention.rows import cell_name, flashinfer_rows, is_losing
from smkern.bench.cases import Group, Sizes, case_options
from smkern.bench.frame import GroupSuite
from smkern.bench.peers import flashinfer_with, noted
from smkern.bench.rows import Cell, not_measured
from smkern.bench.suite import Output, conclude, suite_command
from smkern.measure.attention import QUICK_BUDGETS, AttentionCase, AttentionOperands
from smkern.measure.partitions import Partitions

BUDGETS = (16, 32, 84, 132)
GEOMEAN = 1.3
BATCH, KEYS = 64, 2048
HEADS = (
    (32, 32, 128), (16, 8, 128), (24, 8, 128), (28, 4, 128), (40, 8, 128), (32, 4, 128),
    (48, 4, 128), (16, 1, 128), (32, 1, 128), (48, 1, 128), (64, 1, 128), (71, 1, 64), (14, 2, 64),
    (9, 3, 64), (32, 32, 96), (8, 4, 256), (8, 1, 256), (4, 1, 256),
)  # fmt: skip
"""(query heads, KV heads, head_dim) of models: Llama 2, Qwen3 1.7B, Llama 3.2 3B, Qwen2.5 7B, Qwen3
14B and 30B-A3B, StarCoder2; one KV head as tensor parallel ranks, StarCoder and Falcon have it;
Qwen2.5 0.5B, SmolLM, Phi-3, Gemma 2 and 3."""
LONG = ((32, 8, 128, 131_072), (28, 4, 128, 32_768), (16, 1, 128, 131_072), (8, 1, 256, 32_768))
"""Heads and keys of requests that decode alone."""
SHORT = ((32, 8, 128, 256), (40, 8, 128, 256), (16, 1, 128, 256), (14, 2, 64, 512))
"""Heads and numbers of requests of 16 to 256 keys."""


def _case(name: str, heads: Sequence[int], kv_lens: Sequence[int]) -> AttentionCase:
    q_heads, kv_heads, dim = heads
    return AttentionCase(
        f"{q_heads}x{kv_heads}x{dim}-{name}", "decode", (1,) * len(kv_lens), tuple(kv_lens),
        num_q_heads=q_heads, num_kv_heads=kv_heads, head_dim=dim,
    )  # fmt: skip


def _short(count: int) -> list[int]:
    """Lengths of a crowd, the same ones every time."""
    draw = random.Random(count)
    return [draw.randint(16, 256) for _ in range(count)]


CASES = (
    *(_case(f"{BATCH}x{KEYS}", heads, (KEYS,) * BATCH) for heads in HEADS),
    _case(f"1x{KEYS}", (32, 8, 128), (KEYS,)),
    *(_case(f"1x{keys}", heads, (keys,)) for *heads, keys in LONG),
    *(_case(f"{count}-short", heads, _short(count)) for *heads, count in SHORT),
)
SIZES = Sizes(CASES, CASES[:3], BUDGETS, QUICK_BUDGETS)


class LayoutBench(AttentionBench):
    """The providers alone: neither the plan nor a neighbour is timed."""

    def more(
        self, group: Group[AttentionCase], partitions: Partitions, cells: list[Cell]
    ) -> Iterator[Cell]:
        return iter(())


def summarize(cells: Iterable[Cell]) -> dict[str, Any]:
    """The rows over the cells as dispatched: geomean and worst ratio to FlashInfer's best way."""
    ours = [cell for cell in cells if cell["provider"] == "smkern"]
    beside = [cell for cell in ours if cell.get("vs_flashinfer")]
    return {
        **flashinfer_rows("layouts", beside, GEOMEAN),
        "not_measured": not_measured(ours, cell_name),
    }


@suite_command(
    "layouts",
    *case_options("x1x,256"),
    quick="Three cases in two budgets: seconds of GPU time.",
)
def command(output: Output, *, cases: str | None, budgets: Any, again: bool) -> None:
    """Time decode attention of heads and lengths that nobody tuned, beside FlashInfer.

    As `smkern bench attention`, in which the tuned ones are: groups of 1 to 71 heads, one KV head,
    heads of 64 to 256, one long request, crowds of short ones.
    """
    groups = SIZES.groups(quick=output.quick, cases=cases, budgets=budgets)
    results = output.open()
    flashinfer = FlashInfer.of(noted(flashinfer_with(), results.meta))
    suite = GroupSuite(
        lambda cases: LayoutBench(AttentionOperands(cases[0]), flashinfer), summarize, is_losing
    )
    conclude(results, output.path, suite.run(groups, results, output, again=again))
