"""What of vLLM smkern's linear layers are written against: its own by their signatures."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

DTYPE = torch.float32
QUANTIZED: dict[str, type] = {}
SECOND_LOADER = ["UnquantizedLinearMethod", "Fp8LinearMethod", "CompressedTensorsLinearMethod"]
"""Names of the methods whose parameters load themselves."""


class BasevLLMParameter(nn.Parameter):
    def __new__(cls, data: Tensor, **_: Any) -> BasevLLMParameter:
        return super().__new__(cls, data=data, requires_grad=False)

    def __init__(self, data: Tensor, weight_loader: Callable[..., None]) -> None:
        self.weight_loader = weight_loader

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


class ChannelQuantScaleParameter(BasevLLMParameter):
    def __init__(self, output_dim: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.output_dim = output_dim


class ModelWeightParameter(ChannelQuantScaleParameter):
    def __init__(self, output_dim: int, input_dim: int, **kwargs: Any) -> None:
        super().__init__(output_dim, **kwargs)
        self.input_dim = input_dim


class BlockQuantScaleParameter(ModelWeightParameter):
    pass


class PerTensorScaleParameter(BasevLLMParameter):
    pass


def replace_parameter(
    layer: nn.Module, param_name: str, new_data: Tensor | None, prefer_copy: bool = False
) -> None:
    assert new_data is not None
    setattr(layer, param_name, nn.Parameter(new_data, requires_grad=False))


class LinearMethodBase:
    pass


class UnquantizedLinearMethod(LinearMethodBase):
    def create_weights(
        self, layer: nn.Module, input_size_per_partition: int, output_partition_sizes: list[int],
        input_size: int, output_size: int, params_dtype: torch.dtype, **extra_weight_attrs: Any,
    ) -> None:  # fmt: skip
        sizes = sum(output_partition_sizes), input_size_per_partition
        layer.weight = nn.Parameter(torch.empty(sizes, dtype=params_dtype), requires_grad=False)


class LinearBase(nn.Module):
    """A layer as vLLM makes it: the method creates its weights, loads them and applies them.

    Args:
        method: None: as `config` says.
        in_features: On this rank.
        out_features: Of each projection in it, on this rank.
        config: Chooses the method.
        prefix: Its name.
        tp: Ranks that share its rows.
    """

    def __init__(
        self, method: Any, in_features: int, out_features: int | list[int], *, config: Any = None,
        prefix: str = "layer", tp: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.prefix, self.skip_bias_add = prefix, False
        self.quant_method = method or config.get_quant_method(self, prefix=prefix)
        parts = [out_features] if isinstance(out_features, int) else out_features
        is_second = type(self.quant_method).__name__ in SECOND_LOADER
        self.quant_method.create_weights(
            layer=self, input_size_per_partition=in_features, output_partition_sizes=parts,
            input_size=in_features, output_size=sum(parts) * tp, params_dtype=DTYPE,
            weight_loader=self.weight_loader_v2 if is_second else self.weight_loader,
        )  # fmt: skip

    def weight_loader(self, param: Any, loaded: Tensor, shard: int = 0) -> None:
        """It knows no projections of a parameter without an `output_dim`."""
        assert param.shape == loaded.shape
        param.data.copy_(loaded)

    def weight_loader_v2(self, param: Any, loaded: Tensor, shard: int = 0) -> None:
        if isinstance(param, PerTensorScaleParameter):
            param.data[shard] = loaded.reshape(())
            return
        step = 1
        if isinstance(param, BlockQuantScaleParameter):
            step = self.weight_block_size[param.output_dim]
        ends = [0, *(-(-end // step) for end in accumulate(self.logical_widths))]
        place = param.data[ends[shard] : ends[shard + 1]]
        assert place.shape == loaded.shape
        place.copy_(loaded)


class QuantizationConfig:
    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        return None


@dataclass
class Stock:
    """A method of vLLM's own."""

    of: str
    config: Any


class RoutedExperts(nn.Module):
    pass


class Attention(nn.Module):
    pass


class ParallelLMHead(nn.Module):
    pass


class _OfCheckpoint(QuantizationConfig):
    """What both configs choose of layers that are not linear."""

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.half]

    @classmethod
    def get_min_capability(cls) -> int:
        return 70

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        if isinstance(layer, LinearBase):
            return UnquantizedLinearMethod() if self.skips(prefix) else Stock("linear", self)
        of = {RoutedExperts: "experts", Attention: "cache"}.get(type(layer))
        return None if of is None else Stock(of, self)

    def skips(self, prefix: str) -> bool:
        raise NotImplementedError


class Fp8Config(_OfCheckpoint):
    def __init__(
        self, is_checkpoint_fp8_serialized: bool = False, activation_scheme: str = "dynamic",
        ignored_layers: list[str] | None = None, weight_block_size: list[int] | None = None,
        store_dtype: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.ignored_layers, self.weight_block_size = ignored_layers or [], weight_block_size

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Fp8Config:
        ignored = config.get("ignored_layers") or config.get("modules_to_not_convert")
        return cls(
            is_checkpoint_fp8_serialized="fp8" in config["quant_method"],
            activation_scheme=config["activation_scheme"],
            ignored_layers=ignored,
            weight_block_size=config.get("weight_block_size"),
        )

    def skips(self, prefix: str) -> bool:
        return prefix in self.ignored_layers


class CompressedTensorsConfig(_OfCheckpoint):
    def __init__(
        self, target_scheme_map: dict[str, Any], ignore: list[str], quant_format: str,
        kv_cache_scheme: dict[str, Any] | None = None, config: dict[str, Any] | None = None,
        transform_config: dict[str, Any] | None = None, total_num_heads: int | None = None,
        total_num_kv_heads: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.ignore, self.kv_cache_scheme = ignore, kv_cache_scheme

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> CompressedTensorsConfig:
        return cls(
            target_scheme_map={}, ignore=config.get("ignore", []), quant_format=config["format"],
            kv_cache_scheme=config.get("kv_cache_scheme"), config=config,
        )  # fmt: skip

    def skips(self, prefix: str) -> bool:
        return any(
            re.match(name[3:], prefix) if name.startswith("re:") else name == prefix
            for name in self.ignore
        )


def register_weight_loader_v2_supported_method(cls: type) -> type:
    SECOND_LOADER.append(cls.__name__)
    return cls


def register_quantization_config(name: str) -> Any:
    def keep(made: type) -> type:
        assert issubclass(made, QuantizationConfig)
        QUANTIZED[name] = made
        return made

    return keep


LAYERS = "vllm.model_executor.layers"
QUANTIZATION = f"{LAYERS}.quantization"
COMPRESSED = f"{QUANTIZATION}.compressed_tensors"
LINEAR = (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
PARAMETERS = (
    BlockQuantScaleParameter,
    ChannelQuantScaleParameter,
    ModelWeightParameter,
    PerTensorScaleParameter,
)
NAMES: dict[str, dict[str, Any]] = {
    "vllm.model_executor": {},
    "vllm.model_executor.parameter": {x.__name__: x for x in PARAMETERS},
    "vllm.model_executor.utils": {"replace_parameter": replace_parameter},
    LAYERS: {},
    f"{LAYERS}.linear": {x.__name__: x for x in LINEAR},
    QUANTIZATION: {"register_quantization_config": register_quantization_config},
    f"{QUANTIZATION}.base_config": {"QuantizationConfig": QuantizationConfig},
    f"{QUANTIZATION}.fp8": {"Fp8Config": Fp8Config},
    COMPRESSED: {},
    f"{COMPRESSED}.compressed_tensors": {"CompressedTensorsConfig": CompressedTensorsConfig},
}
"""vLLM's modules, and what smkern imports of them."""
