"""Kernels that are compiled and loaded, and empty forwards, so that serving never loads a kernel or
makes a workspace."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from typing import TYPE_CHECKING

import torch

from smkern.device import device_info
from smkern.models.config import ModelConfig
from smkern.models.layered import LayeredModel
from smkern.models.step import Caches, Step
from smkern.models.warming import ModelCalls
from smkern.ops.warmup import WarmupReport, warmup
from smkern.runtime.device import Device, Work
from smkern.runtime.model import sizes
from smkern.runtime.model.prefill import PrefillBuffers
from smkern.runtime.model.row_state import RowState
from smkern.runtime.place import Lane, Place

if TYPE_CHECKING:
    from smkern.partition import Ladder

CONTEXT = 8192
"""Keys of a request that the plan's memory is made for; it grows for longer ones."""


def warm_kernels(
    config: ModelConfig,
    ladder: Ladder | None,
    *,
    page_size: int,
    max_running: int,
    max_prefill: int,
    max_tokens: int,
    batch_invariant: bool = False,
    cache_dtype: torch.dtype | None = None,
    tp: int = 1,
) -> WarmupReport:
    """Compile and load all that forwards of any size launch, on every side of every split.

    Args:
        config: The model, whole.
        ladder: The splits; None: the whole device alone.
        page_size: Tokens of a page.
        max_running, max_prefill, max_tokens: Of the executor.
        batch_invariant: The decoder's mode.
        cache_dtype: Dtype of the pool. None: the model's.
        tp: GPUs that share the model.
    """
    calls = ModelCalls(
        config, page_size, max_tokens=max_tokens + max_running,
        max_batch=max_prefill + max_running, max_q_len=max_tokens,
        batch_invariant=batch_invariant, cache_dtype=cache_dtype, tp=tp,
    )  # fmt: skip
    sides = [side for split in ladder or () for side in (split.decode, split.prefill)]
    return warmup(calls=[calls], budgets=[device_info().num_sms, *sides], progress=False)


def warm_sizes(max_tokens: int) -> list[int]:
    """New tokens of forwards that are met all the time, powers of two, and the largest."""
    powers = (1 << i for i in range(4, max_tokens.bit_length()))
    return sorted({*powers, *sizes.mixed_rows(max_tokens), max_tokens})


def empty_forward(
    model: LayeredModel,
    state: RowState,
    caches: Caches,
    prompts: PrefillBuffers,
    max_prefill: int,
    tokens: int,
) -> None:
    """A layer and the head for tokens that belong to requests without keys; writes no page.

    Args:
        state: The rows; those of the slot are finished, and no request has them.
    """
    device, batch = state.device, min(max_prefill, tokens)
    rows = state.inputs(prompts.first_row, batch)
    cu_q_lens = torch.full((batch + 1,), tokens, dtype=torch.int32, device=device)
    cu_q_lens[0] = 0
    # A page may end behind the positions that the model was made for.
    most = min(CONTEXT, state.layout.max_pages * caches[0][0].shape[1], model.max_position)
    step = Step.make(
        prompts.activations,
        token_ids=prompts.token_ids[:tokens],
        kv_lens=torch.zeros_like(rows.kv_lens),
        page_table=rows.page_table,
        caches=caches,
        cu_q_lens=cu_q_lens,
        num_sms=prompts.num_sms,
        **sizes.bounds([tokens], [most] * batch, most),
    ).planned_in(prompts.plans)
    model.embed(step)
    model.layer(0, step)
    rows.draw(model.head(step), step.kv_lens, num_sms=step.num_sms)


Forward = Callable[[int], object]
"""Runs an empty forward of so many tokens."""


def warm_prompts(device: Device, max_tokens: int, forwards: Iterable[Forward]) -> None:
    """Run forwards of every size wherever prompts run; waits for each.

    Args:
        max_tokens: New tokens of the largest forward.
        forwards: One of each prefill slot.
    """
    whole = Place.whole(device.num_sms)
    lanes: list[tuple[Lane, Place]] = [("prefill", whole), ("decode", whole)]
    lanes += [("prefill", Place.of("prefill", rung, device.num_sms)) for rung in device.rungs]
    for (lane, place), forward, tokens in product(lanes, forwards, warm_sizes(max_tokens)):

        def run(_: Place, forward: Forward = forward, tokens: int = tokens) -> None:
            forward(tokens)

        device.launch(lane, place, Work("warm", run))
        device.synchronize()
