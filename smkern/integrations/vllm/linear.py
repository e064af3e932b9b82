"""smkern's GEMM as linear layers of vLLM 0.26: `quantization="smkern"`, which quantises nothing."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import vllm
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

import smkern
from smkern.errors import ConfigError
from smkern.integrations.vllm import NAME, check_version


class Warm(NamedTuple):
    """Products that are compiled and loaded."""

    rows: int
    columns: int
    dtype: torch.dtype
    epilogue: str


class SmkernLinearConfig(QuantizationConfig):  # type: ignore[misc]
    """Linear layers in bf16 or fp16 by `smkern.gemm`; the head, experts and attention as stock.

    Raises:
        ConfigError: another vLLM.
    """

    def __init__(self) -> None:
        check_version(vllm.__version__)
        super().__init__()
        self._warm = set[Warm]()

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> SmkernLinearConfig:
        """Of a checkpoint that says how it is quantised.

        Raises:
            ConfigError: always: only checkpoints in bf16 and fp16 are served.
        """
        raise ConfigError(
            f"the checkpoint is quantised by {config.get('quant_method', 'a method')!r}: "
            f"quantization={NAME} serves bf16 and fp16; leave it out"
        )

    def get_quant_method(self, layer: nn.Module, prefix: str) -> SmkernLinearMethod | None:
        if not isinstance(layer, LinearBase):
            return None
        scheduler = get_current_vllm_config().scheduler_config
        return SmkernLinearMethod(int(scheduler.max_num_batched_tokens), self._warm)


class SmkernLinearMethod(UnquantizedLinearMethod):  # type: ignore[misc]
    """A linear layer of the current stream's budget.

    Args:
        max_tokens: Rows of a step, at most.
        warm: What other layers have warmed up: a model has few shapes, and many layers of each.
    """

    def __init__(self, max_tokens: int, warm: set[Warm]) -> None:
        super().__init__()
        self._max_tokens = max_tokens
        self._warm = warm

    def process_weights_after_loading(self, layer: Any) -> None:
        """Compile and load what steps may launch: a capture must find it there."""
        weight = layer.weight
        if not weight.is_cuda:
            return
        rows, columns = weight.shape
        has_bias = getattr(layer, "bias", None) is not None and not layer.skip_bias_add
        wanted = Warm(int(rows), int(columns), weight.dtype, "bias" if has_bias else "none")
        if wanted in self._warm:
            return
        smkern.warmup(
            shapes=[(wanted.rows, wanted.columns)],
            budgets=[smkern.current_num_sms()],
            max_m=self._max_tokens,
            dtypes=[wanted.dtype],
            epilogues=[wanted.epilogue],
            workers=1,  # a worker is often a daemon, which may have no children
            progress=False,
        )
        self._warm.add(wanted)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., in] to [..., out]."""
        rows = x.reshape(-1, x.shape[-1])
        return smkern.gemm(rows, layer.weight, bias=bias).view(*x.shape[:-1], layer.weight.shape[0])
