"""`smkern autotune --op sample`: measure the sampler inside partitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from smkern.autotune.family import MeasuredFamily, ranked
from smkern.autotune.operator_tuner import operator_tasks, operator_tuner
from smkern.measure.timing import sets_for
from smkern.ops.operator import Operator
from smkern.ops.sample.call import Sample
from smkern.ops.sample.operators import SAMPLE, sample_dispatcher
from smkern.tuning import sample as tuning
from smkern.tuning.sample import SampleProblem

ROWS = (1, 8, 32, 64, 128, 512)
"""A bucket of its own for each of the usual decode batches."""
QUICK_ROWS = (32, 128)
VOCABS = (128_256, 151_936)
"""Llama-3.1's and Qwen3's."""
TOP_K, TOP_P, TEMPERATURE = 50, 0.95, 0.8
TOLERANCE = 0.5
"""Difference from the reference's tokens: rounding may turn one row in thousands. Candidates
must draw the same all the same."""


@dataclass(frozen=True, slots=True)
class SampleCase:
    """`rows` rows of a vocabulary in bf16, by top-k, top-p and temperature."""

    rows: int
    vocab: int

    @property
    def name(self) -> str:
        return f"sample-{self.rows}x{self.vocab}"

    @property
    def problem(self) -> SampleProblem:
        return SampleProblem(self.rows, self.vocab)


def tuned_cases(*, rows: Sequence[int] = ROWS) -> list[SampleCase]:
    """Every vocabulary for every batch."""
    return [SampleCase(n, vocab) for vocab in VOCABS for n in rows]


def calls_of(case: SampleCase, device: str) -> tuple[Operator[SampleProblem], list[Any]]:
    """The operator, and calls, each on logits of its own; every eighth row is greedy."""
    generator = torch.Generator(device).manual_seed(case.rows)
    rows = torch.arange(case.rows, device=device)
    temperature = torch.full((case.rows,), TEMPERATURE, device=device)
    temperature[7::8] = 0.0
    top_k = torch.full((case.rows,), TOP_K, dtype=torch.int32, device=device)
    top_p = torch.full((case.rows,), TOP_P, device=device)

    def call() -> Any:
        shape = case.rows, case.vocab
        logits = torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16) * 4
        finished = torch.zeros(case.rows, dtype=torch.uint8, device=device)
        lengths, out = torch.zeros(2, case.rows, dtype=torch.int32, device=device)
        return Sample(
            logits, temperature, top_k, top_p, seeds=rows, finished=finished, lengths=lengths,
            out=out,
        )  # fmt: skip

    return SAMPLE, [call() for _ in range(sets_for(case.problem.bytes_moved))]


FAMILY = MeasuredFamily(
    tuned=tuning.SAMPLE_FAMILY,
    listed=ranked(tuning.SAMPLE_FAMILY),
    dispatcher=sample_dispatcher,
    tuner=operator_tuner(calls_of, tolerance=TOLERANCE),
    tasks=operator_tasks,
    most=16,
)
