"""Decode steps and prompts of a part on each GPU, beside the whole model on one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import product
from typing import Any

import torch

from smkern.bench.model.cases import CONTEXT, ModelPlan
from smkern.bench.model.model import Model
from smkern.bench.ranks.group import Lanes, RankGroup
from smkern.bench.ranks.rows import DECODE, PREFILL, cell
from smkern.device import Budget, device_info
from smkern.latency.model_gemms import budgets_of
from smkern.measure.compiling import Forwards, compile_forwards
from smkern.measure.partitions import Place
from smkern.measure.timing import Timing
from smkern.models.copied_sums import cut_of
from smkern.models.fused_sums import fuse_sums

BATCH, TOKENS = 64, 4096
WEIGHTED = 4
"""Layers that have weights, which the model's others take by turns: none of them stays in L2."""
DECODE_SMS, PREFILL_SMS = (24, 32, 132), (100, 116, 132)
BUDGETS = tuple(sorted({*DECODE_SMS, *PREFILL_SMS}))
MODELS = ("qwen3-32b", "qwen3-8b")


def forward_cells(group: RankGroup, name: str) -> Iterator[dict[str, Any]]:
    """A model's steps and prompts, through all of its layers."""
    plan = ModelPlan(name, (BATCH,), TOKENS)
    config, tp = plan.config, group.tp
    if tp.rank == 0:
        total = device_info().num_sms
        decode, prefill = (
            budgets_of(total, [total, *(n for n in sms if n < total)])
            for sms in (DECODE_SMS, PREFILL_SMS)
        )
        wanted = [([(BATCH, BATCH)], decode), ([(TOKENS, 1)], prefill)]
        compile_forwards(config, wanted)
        compile_forwards(
            tp.shard.config(config),
            [*wanted, *pieces_of([TOKENS], config.hidden_size, prefill)],
            ranks=tp.size,
        )
    group.wait()
    whole, part_model = Model(plan, weighted=WEIGHTED), Model(plan, tp=tp, weighted=WEIGHTED)
    nccl = group.nccl
    assert fuse_sums(part_model.decoder)
    ours = tp.decode, tp.prefill
    tp.decode, tp.prefill = nccl
    who: list[tuple[str, int, Model, Lanes]] = [
        ("smkern", 1, whole, nccl), ("smkern", tp.size, part_model, ours),
        ("nccl", tp.size, part_model, nccl),
    ]  # fmt: skip
    through = {"model": name, "layers": config.num_layers}
    with torch.inference_mode():
        for num_sms in DECODE_SMS:
            place = group.place(num_sms)
            case = {**through, "batch": BATCH, "context": CONTEXT}
            for (provider, ranks, *_), timing in zip(who, _steps(group, who, place), strict=True):
                yield cell(ranks, DECODE, case, place, provider, timing)
        for num_sms in PREFILL_SMS:
            place = group.place(num_sms)
            case = {**through, "batch": 1, "tokens": TOKENS}
            timings = _prompts(group, who, place)
            for (provider, ranks, *_), timing in zip(who, timings, strict=True):
                yield cell(ranks, PREFILL, case, place, provider, timing)
    group.wait()
    for lane in ours:
        lane.close()  # type: ignore[attr-defined]


def pieces_of(prompts: Iterable[int], width: int, budgets: Sequence[Budget]) -> Iterator[Forwards]:
    """The forwards that two GPUs compute of these prompts, in two pieces."""
    for tokens, budget in product(prompts, budgets):
        cut = cut_of(tokens, width, budget.num_sms)
        yield [(cut, 1), (tokens - cut, 1)], [budget]


def _steps(
    group: RankGroup, who: list[tuple[str, int, Model, Lanes]], place: Place
) -> list[Timing]:
    """Captured steps, two at a time."""
    runs: dict[str, Callable[[], None]] = {}
    with ExitStack() as stack:
        for provider, ranks, model, lanes in who:
            group.wait()
            with group.using(lanes):
                loop = model.decode(BATCH, place)
            stack.callback(loop.close)

            def twice(call: Callable[[int], None] = loop.call) -> None:
                call(0)
                call(1)

            runs[f"{provider} {ranks}"] = twice
        found = group.time(runs, place, rounds=11)
        group.wait()
    return [Timing(tuple(us / 2 for us in timing.us_all)) for timing in found.values()]


def _prompts(
    group: RankGroup, who: list[tuple[str, int, Model, Lanes]], place: Place
) -> list[Timing]:
    """Prompts, launched kernel by kernel as they are served."""
    runs: dict[str, Callable[[], None]] = {}
    for provider, ranks, model, lanes in who:
        with torch.cuda.stream(place.stream):
            step = model.prefill_step().planned()

        def once(model: Model = model, step: Any = step, lanes: Lanes = lanes) -> None:
            with group.using(lanes):
                model.decoder.forward(step)

        runs[f"{provider} {ranks}"] = once
    return list(group.time(runs, place, rounds=3).values())
