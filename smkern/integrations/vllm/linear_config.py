"""`quantization="smkern"` of vLLM: linear layers by smkern, in the checkpoint's dtype."""

from __future__ import annotations

from typing import Any

import torch
import vllm
from torch import nn
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

from smkern.integrations.vllm import NAME, check_version
from smkern.integrations.vllm.linear import DTYPES, SmkernLinearMethod, Warm, max_tokens


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
        return [*DTYPES]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Whatever a checkpoint says of itself, who asks for smkern's layers gets them."""
        return NAME if user_quant == NAME else None

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> QuantizationConfig:
        """Of a checkpoint that says how it is quantised.

        Raises:
            ConfigError: another vLLM, or a quantisation that is not served.
        """
        check_version(vllm.__version__)
        from smkern.integrations.vllm.fp8 import config_from  # imports most of vLLM

        return config_from(config)

    def get_quant_method(self, layer: nn.Module, prefix: str) -> SmkernLinearMethod | None:
        if not isinstance(layer, LinearBase):
            return None
        return SmkernLinearMethod(max_tokens(), self._warm)
