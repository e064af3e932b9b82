"""Kernels that are compiled and loaded, and empty forwards, so that serving never loads a kernel or
makes a workspace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import torch

from smkern.device import device_info
from smkern.latency.work import padded_rows
from smkern.models.config import ModelConfig
from smkern.models.layered import LayeredModel
from smkern.models.step import Caches, Step, batch_buckets
from smkern.models.warming import ModelCalls
from smkern.ops.warming import Within
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
    """Compile and load all that forwards of any size launch wherever they may run: those with
    prompts on the whole device and on prefill's side of each split, decode steps on its other side.

    Args:
        config: The model, whole.
        ladder: The splits; None: the whole device alone.
        page_size: Tokens of a page.
        max_running, max_prefill, max_tokens: Of the executor.
        batch_invariant: The decoder's mode.
        cache_dtype: Dtype of the pool. None: the model's.
        tp: GPUs that share the model.
    """
    calls_of = partial(
        ModelCalls, config, page_size, batch_invariant=batch_invariant, cache_dtype=cache_dtype,
        tp=tp,
    )  # fmt: skip
    forwards = calls_of(
        max_tokens=max_tokens + max_running, max_batch=max_prefill + max_running,
        max_q_len=max_tokens,
    )  # fmt: skip
    steps = calls_of(max_tokens=max_running, max_batch=max_running, max_q_len=1)
    splits = list(ladder or ())
    decode = [split.decode for split in splits]
    return warmup(
        calls=[*(Within(each, decode) for each in steps.calls()), *forwards.calls()],
        budgets=[device_info().num_sms, *(split.prefill for split in splits)],
        progress=False,
    )


def warm_sizes(max_tokens: int) -> list[int]:
    """New tokens of forwards that are met all the time, powers of two, and the largest."""
    powers = (1 << i for i in range(4, max_tokens.bit_length()))
    return sorted({*powers, *sizes.mixed_rows(max_tokens), padded_rows(max_tokens)})


class EmptyForwards:
    """Parts of forwards of a prefill slot, for tokens of requests without keys; writes no page.

    Args:
        state: The rows; those of the slot are finished, and no request has them.
        max_prefill: Chunks of a forward.
    """

    def __init__(
        self,
        model: LayeredModel,
        state: RowState,
        caches: Caches,
        prompts: PrefillBuffers,
        max_prefill: int,
    ) -> None:
        self._model = model
        self._state = state
        self._caches = caches
        self._prompts = prompts
        self.max_prefill = max_prefill

    def layer(self, tokens: int) -> None:
        """The embedding and a layer, for so many tokens of as many requests as have some."""
        step = self._step(tokens, min(self.max_prefill, tokens))
        step = step.planned_in(self._prompts.plans)
        self._model.embed(step)
        self._model.layer(0, step)

    def head(self, batch: int) -> None:
        """What follows attention for the last token of so many requests."""
        step = self._step(1, batch)
        rows = self._state.inputs(self._prompts.first_row, batch)
        rows.draw(self._model.head(step), step.kv_lens, num_sms=step.num_sms)

    def _step(self, tokens: int, batch: int) -> Step:
        prompts, model = self._prompts, self._model
        rows = self._state.inputs(prompts.first_row, batch)
        # torch has a kernel for each alignment, and serving begins at any entry
        first, device = batch.bit_length() % 4, self._state.device
        cu_q_lens = torch.full((first + batch + 1,), tokens, dtype=torch.int32, device=device)
        cu_q_lens = cu_q_lens[first:]
        cu_q_lens[0] = 0
        # A page may end behind the positions that the model was made for.
        page_size = self._caches[0][0].shape[1]
        most = min(CONTEXT, self._state.layout.max_pages * page_size, model.max_position)
        return Step.make(
            prompts.activations,
            token_ids=prompts.token_ids[:tokens],
            kv_lens=torch.zeros_like(rows.kv_lens),
            page_table=rows.page_table,
            caches=self._caches,
            cu_q_lens=cu_q_lens,
            num_sms=prompts.num_sms,
            **sizes.bounds([tokens], [most] * batch, most),
        )


def warm_prompts(
    device: Device, max_tokens: int, max_running: int, forwards: Sequence[EmptyForwards]
) -> None:
    """Run parts of forwards of every size wherever prompts run; waits for each.

    Args:
        max_tokens: New tokens of the largest forward.
        max_running: Requests that may decode in a forward of slot 0.
        forwards: One of each prefill slot.
    """
    whole, chunks = Place.whole(device.num_sms), min(forwards[0].max_prefill, max_tokens)
    sides = [Place.of("prefill", rung, device.num_sms) for rung in device.rungs]
    runs: list[tuple[Lane, Place, EmptyForwards, int]] = [
        ("prefill", place, forward, chunks) for place, forward in product([whole, *sides], forwards)
    ]
    # chunks beside rows that decode
    runs.append(("decode", whole, forwards[0], chunks + max_running))
    for lane, place, forward, most in runs:
        parts = [partial(forward.layer, tokens) for tokens in warm_sizes(max_tokens)]
        parts += [partial(forward.head, batch) for batch in batch_buckets(most)]
        for part in parts:

            def run(_: Place, part: Callable[[], None] = part) -> None:
                part()

            device.launch(lane, place, Work("warm", run))
            device.synchronize()
