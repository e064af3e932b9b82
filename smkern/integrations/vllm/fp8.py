"""fp8 checkpoints in vLLM: its own configs of them, whose linear layers smkern multiplies.

Weights and scales stay as they are loaded: nothing is quantised anew, transposed or padded.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm import envs
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.fp8 import Fp8Config
from vllm.model_executor.parameter import (
    BlockQuantScaleParameter,
    ChannelQuantScaleParameter,
    ModelWeightParameter,
    PerTensorScaleParameter,
)
from vllm.model_executor.utils import replace_parameter

import smkern
from smkern.errors import ConfigError
from smkern.integrations.vllm import NAME
from smkern.integrations.vllm.linear import (
    DTYPES,
    SmkernLinearMethod,
    epilogue_of,
    max_tokens,
    warm_once,
)
from smkern.limits import FP8_BLOCK
from smkern.models.quantization import Quantization, quantization_from_hf


class _SmkernLinears:
    """What smkern changes of a config of vLLM's: the method of its linear layers.

    Attributes:
        scaled: How the checkpoint's linear layers are stored.
        warm: What layers have warmed up, quantised ones and those that are not.
    """

    scaled: Quantization
    warm: set[Any]

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [*DTYPES]

    @classmethod
    def get_min_capability(cls) -> int:
        return 89

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """vLLM's method of heads, experts and caches; of linear layers it says which are fp8."""
        stock = super().get_quant_method(layer, prefix)  # type: ignore[misc]
        if not isinstance(layer, LinearBase):
            return stock
        if isinstance(stock, UnquantizedLinearMethod):
            return SmkernLinearMethod(max_tokens(), self.warm)
        is_inverse = isinstance(self, Fp8Config) and self.scaled.kind == "fp8-block"
        name = "weight_scale_inv" if is_inverse else "weight_scale"
        return SmkernFp8LinearMethod(self.scaled, name, max_tokens(), self.warm)


class SmkernFp8Config(_SmkernLinears, Fp8Config):  # type: ignore[misc]
    """Of checkpoints whose `quant_method` is fp8."""


class SmkernCompressedTensorsConfig(_SmkernLinears, CompressedTensorsConfig):  # type: ignore[misc]
    """Of checkpoints whose `quant_method` is compressed-tensors."""


CONFIGS: dict[str, Any] = {
    "fp8": SmkernFp8Config,
    "compressed-tensors": SmkernCompressedTensorsConfig,
}


def config_from(given: dict[str, Any]) -> QuantizationConfig:
    """vLLM's config of a checkpoint, its linear layers by smkern.

    Args:
        given: The `quantization_config` of its config.json.

    Raises:
        ConfigError: another quantisation than those of `smkern.models.Quantization`.
    """
    try:
        scaled = quantization_from_hf(given, [])
    except ConfigError as reason:
        raise ConfigError(f"{reason}; or leave quantization={NAME} out") from reason
    found = CONFIGS[given["quant_method"]].from_config(given)
    found.scaled, found.warm = scaled, set()
    return found


@register_weight_loader_v2_supported_method
class SmkernFp8LinearMethod(LinearMethodBase):  # type: ignore[misc]
    """A linear layer in e4m3 of the current stream's budget.

    Args:
        scaled: How it is stored.
        scale_name: Of the weight's scales, in the checkpoint.
        max_tokens: Rows of a step, at most.
        warm: What other layers have warmed up.
    """

    def __init__(
        self, scaled: Quantization, scale_name: str, max_tokens: int, warm: set[Any]
    ) -> None:
        self._is_block = scaled.kind == "fp8-block"
        self._is_static = scaled.activations == "static"
        self._kind = scaled.kind
        self._scale_name = scale_name
        self._max_tokens = max_tokens
        self._warm = warm
        self._batch_invariant = bool(envs.VLLM_BATCH_INVARIANT)

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Parameters as the checkpoint has them: vLLM's loaders find projections and shards."""
        parts, columns = output_partition_sizes, input_size_per_partition
        rows, load = sum(parts), extra_weight_attrs.get("weight_loader")
        if self._is_block:
            is_shard = output_size != rows
            check_blocks(layer.prefix, parts if is_shard else parts[:-1], columns)
        layer.logical_widths = parts
        layer.input_size_per_partition = columns
        layer.orig_dtype = params_dtype
        layer.weight_block_size = [FP8_BLOCK, FP8_BLOCK] if self._is_block else None
        values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
        both = {"output_dim": 0, "input_dim": 1, "weight_loader": load}
        layer.register_parameter("weight", ModelWeightParameter(data=values, **both))
        if self._is_block:
            shape = (-(-rows // FP8_BLOCK), columns // FP8_BLOCK)
            scale = BlockQuantScaleParameter(data=_missing(*shape), **both)
        elif self._kind == "fp8-channel":
            of_rows = {"output_dim": 0, "weight_loader": load}
            scale = ChannelQuantScaleParameter(data=_missing(rows, 1), **of_rows)
        else:
            scale = PerTensorScaleParameter(data=_missing(len(parts)), weight_loader=load)
        layer.register_parameter(self._scale_name, scale)
        if self._is_static:
            scale = PerTensorScaleParameter(data=_missing(len(parts)), weight_loader=load)
            layer.register_parameter("input_scale", scale)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Projections' scales become ones of rows, inputs have the largest; then warm up.

        One projection's scale stays a number where inputs have one, too: cuBLASLt takes such pairs.
        """
        if self._kind == "fp8-tensor" and not (self._is_static and len(layer.logical_widths) == 1):
            scale = getattr(layer, self._scale_name).data
            widths = torch.tensor(layer.logical_widths, device=scale.device)
            replace_parameter(layer, self._scale_name, scale.repeat_interleave(widths)[:, None])
        if self._is_static:
            replace_parameter(layer, "input_scale", layer.input_scale.data.max().reshape(1))
        if not layer.weight.is_cuda:
            return
        rows, columns = (int(size) for size in layer.weight.shape)
        wanted = smkern.Fp8Calls(
            shapes=((rows, columns),),
            epilogues=(epilogue_of(layer),),
            blocks=self._is_block,
            max_m=self._max_tokens,
            batch_invariant=(self._batch_invariant,),
            quantized=() if self._is_static else (columns,),
            static=(columns,) if self._is_static else (),
            dtype=layer.orig_dtype,
        )
        warm_once(self._warm, wanted, calls=[wanted])

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [..., in] to [..., out], its rows quantised on the way."""
        rows = x.reshape(-1, x.shape[-1])
        if self._is_static:
            values, scale = smkern.quantize(rows, "tensor", scale=layer.input_scale)
        else:
            values, scale = smkern.quantize(rows, "block" if self._is_block else "token")
        found = smkern.gemm(
            values, layer.weight, bias=bias, a_scale=scale,
            w_scale=getattr(layer, self._scale_name), out_dtype=x.dtype,
            batch_invariant=self._batch_invariant,
        )  # fmt: skip
        return found.view(*x.shape[:-1], layer.weight.shape[0])


def check_blocks(name: str, parts: list[int], columns: int) -> None:
    """Raise ConfigError for projections or shards that end within a block.

    Args:
        name: The layer's.
        parts: Rows of those that another follows, on this rank or the next.
        columns: Columns on this rank.
    """
    if any(size % FP8_BLOCK for size in (*parts, columns)):
        raise ConfigError(
            f"{name}: projections of {parts} rows and {columns} columns on a GPU, and scales of "
            f"blocks want multiples of {FP8_BLOCK}: set a smaller tensor_parallel_size, or leave "
            f"quantization={NAME} out"
        )


def _missing(*shape: int) -> Tensor:
    """Scales that are to be loaded: one that is not makes its results NaN."""
    return torch.full(shape, float("nan"), dtype=torch.float32)
