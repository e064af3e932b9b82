"""`smkern autotune --op sample`: measure the sampler inside partitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from smkern.autotune.family import MeasuredFamily, ranked
from smkern.autotune.small import small_tasks, small_tuner
from smkern.measure.timing import MIN_TOTAL_BYTES
from smkern.ops.sample.call import Sample
from smkern.ops.sample.operators import SAMPLE, sample_dispatcher
from smkern.tuning import sample as tuning
from smkern.tuning.sample import SampleProblem

ROWS = (1, 8, 32, 64, 128, 512)
"""A bucket of its own for each of the usual decode batches."""
QUICK_ROWS = (32, 128)
VOCABS = (128_256, 151_936)
"""Of Llama-3.1, and of Qwen3."""
TOP_K, TOP_P, TEMPERATURE = 50, 0.95, 0.8
TOLERANCE = 0.5
"""Of tokens against the reference's: one row in thousands may draw another by rounding. Candidates
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

    @property
    def num_sets(self) -> int:
        """Calls to rotate over, so that a launch finds little of its own in L2; at most 64."""
        return min(64, max(2, -(-MIN_TOTAL_BYTES // self.problem.bytes_moved)))


def tuned_cases(*, rows: Sequence[int] = ROWS) -> list[SampleCase]:
    """Every vocabulary for every batch."""
    return [SampleCase(n, vocab) for vocab in VOCABS for n in rows]


def calls_of(case: SampleCase, device: str = "cuda") -> list[Sample]:
    """Calls with results, each on logits of its own; every eighth row of several is greedy."""
    generator = torch.Generator(device).manual_seed(case.rows)
    rows = torch.arange(case.rows, device=device)
    temperature = torch.full((case.rows,), TEMPERATURE, device=device)
    temperature[7::8] = 0.0
    top_k = torch.full((case.rows,), TOP_K, dtype=torch.int32, device=device)
    top_p = torch.full((case.rows,), TOP_P, device=device)

    def call() -> Sample:
        shape = case.rows, case.vocab
        logits = torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16) * 4
        finished = torch.zeros(case.rows, dtype=torch.uint8, device=device)
        lengths, out = torch.zeros(2, case.rows, dtype=torch.int32, device=device)
        return Sample(
            logits, temperature, top_k, top_p, seeds=rows, finished=finished, lengths=lengths,
            out=out,
        )  # fmt: skip

    return [call() for _ in range(case.num_sets)]


FAMILY = MeasuredFamily(
    family=tuning.SAMPLING,
    listed=ranked(tuning.SAMPLING),
    dispatcher=sample_dispatcher,
    tuner=small_tuner(lambda case, device: (SAMPLE, calls_of(case, device)), tolerance=TOLERANCE),
    tasks=small_tasks,
    most=16,
)
