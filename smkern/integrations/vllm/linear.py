"""smkern's GEMM as linear layers of vLLM, in bf16 and fp16."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from vllm import envs
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

import smkern

DTYPES = (torch.bfloat16, torch.float16)


class Warm(NamedTuple):
    """Products that are compiled and loaded."""

    rows: int
    columns: int
    dtype: torch.dtype
    epilogue: str


def max_tokens() -> int:
    """Rows of a step, at most."""
    return int(get_current_vllm_config().scheduler_config.max_num_batched_tokens)


def epilogue_of(layer: Any) -> str:
    """What a layer does to its products."""
    has_bias = getattr(layer, "bias", None) is not None and not layer.skip_bias_add
    return "bias" if has_bias else "none"


def warm_once(warm: set[Any], wanted: Any, **calls: Any) -> None:
    """Compile and load what steps may launch: a capture must find it there.

    Args:
        warm: What other layers have warmed up: a model has few shapes, and many layers of each.
        wanted: This layer's.
        calls: The same, as `smkern.warmup` takes it.
    """
    if wanted in warm:
        return
    budgets = [smkern.current_num_sms()]
    # a worker is often a daemon, which may have no children
    smkern.warmup(budgets=budgets, workers=1, progress=False, **calls)
    warm.add(wanted)


class SmkernLinearMethod(UnquantizedLinearMethod):  # type: ignore[misc]
    """A linear layer of the current stream's budget.

    Args:
        max_tokens: Rows of a step, at most.
        warm: What other layers have warmed up.
    """

    def __init__(self, max_tokens: int, warm: set[Any]) -> None:
        super().__init__()
        self._max_tokens = max_tokens
        self._warm = warm
        self._batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)

    def process_weights_after_loading(self, layer: Any) -> None:
        weight = layer.weight
        if not weight.is_cuda:
            return
        rows, columns = weight.shape
        wanted = Warm(int(rows), int(columns), weight.dtype, epilogue_of(layer))
        warm_once(
            self._warm, wanted, shapes=[(wanted.rows, wanted.columns)], max_m=self._max_tokens,
            dtypes=[wanted.dtype], epilogues=[wanted.epilogue],
            batch_invariant=[self._batch_invariant],
        )  # fmt: skip

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., in] to [..., out]."""
        rows = x.reshape(-1, x.shape[-1])
        found = smkern.gemm(rows, layer.weight, bias=bias, batch_invariant=self._batch_invariant)
        return found.view(*x.shape[:-1], layer.weight.shape[0])
