"""What sums over ranks take: by one kernel over the memory of all GPUs, and by NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from smkern.bench.ranks.group import Lanes, RankGroup
from smkern.bench.ranks.rows import GATHERED, SUMMED, cell
from smkern.measure.partitions import Place
from smkern.models.peer_sums import MAX_ROWS, PAIR_ROWS, PeerSums

VOCAB = 151_936
STEP_SMS, PROMPT_SMS = (16, 24, 32, 132), (84, 100, 132)
STEPS = ((8, 5120), (64, 4096), (64, 5120), (256, 5120))
PROMPTS = ((1024, 5120), (4096, 4096), (4096, 5120))
BUDGETS = tuple(sorted({*STEP_SMS, *PROMPT_SMS}))
SETS = 4
"""Operands of a case, which calls take by turns."""


def sum_cells(group: RankGroup) -> Iterator[dict[str, Any]]:
    """Every shape in its budgets."""
    for shapes, budgets in ((STEPS, STEP_SMS), (PROMPTS, PROMPT_SMS)):
        for rows, hidden in shapes:
            ours = _opened(group, rows, hidden)
            for num_sms in budgets:
                yield from _summed(group, ours, group.place(num_sms), rows, hidden)
            group.wait()
            ours.close()
    ours = _opened(group, 64, 4096)
    for rows in (1, 64):
        for num_sms in STEP_SMS:
            yield from _gathered(group, ours, group.place(num_sms), rows)
    group.wait()
    ours.close()


def _opened(group: RankGroup, rows: int, hidden: int) -> PeerSums:
    device = torch.device("cuda", torch.cuda.current_device())
    most = MAX_ROWS if rows <= MAX_ROWS else PAIR_ROWS
    return PeerSums(
        group.tp, group.nccl[0], hidden, VOCAB, torch.bfloat16, device, max_rows=most, longer=True
    )


def _generator(group: RankGroup) -> torch.Generator:
    """Each rank draws numbers of its own."""
    return torch.Generator("cuda").manual_seed(group.tp.rank)


def _drawn(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, device="cuda", generator=generator).bfloat16()


def _summed(
    group: RankGroup, ours: PeerSums, place: Place, rows: int, hidden: int
) -> Iterator[dict[str, Any]]:
    """Sum, residual and norm, of as many rows."""
    generator = _generator(group)
    sets = SETS if rows > MAX_ROWS else 5 * SETS
    xs, residuals = (_drawn((sets, rows, hidden), generator) for _ in range(2))
    weight = torch.ones(hidden, device="cuda", dtype=torch.bfloat16)

    def call(lanes: Lanes) -> Any:
        lane = lanes[0]

        def run(i: int) -> None:
            x = xs[i % sets]
            lane.add_rms_norm(x, residuals[i % sets], weight, eps=1e-6)

        return run

    count = 4 if rows > MAX_ROWS else 20
    calls = {"smkern": call((ours, ours)), "nccl": call(group.nccl)}
    case = {"rows": rows, "hidden": hidden, "dtype": "bf16"}
    timings = group.time_graphs(calls, place, count=count, rounds=15)
    for name, timing in timings.items():
        yield cell(group.tp.size, SUMMED, case, place, name, timing)


def _gathered(
    group: RankGroup, ours: PeerSums, place: Place, rows: int
) -> Iterator[dict[str, Any]]:
    """Logits of so many requests, of which each rank has its columns."""
    x = _drawn((rows, VOCAB), _generator(group))
    columns = group.tp.shard.rows(VOCAB)
    calls = {
        "smkern": lambda i: ours.gather(x, columns),
        "nccl": lambda i: group.nccl[0].gather(x, columns),
    }
    timings = group.time_graphs(calls, place, count=4, rounds=11)
    for name, timing in timings.items():
        yield cell(
            group.tp.size, GATHERED, {"rows": rows, "columns": VOCAB, "dtype": "bf16"}, place,
            name, timing,
        )  # fmt: skip
