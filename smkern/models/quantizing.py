"""Weights in fp8 from weights in bf16."""

from __future__ import annotations

from dataclasses import replace

from smkern.errors import ConfigError
from smkern.models.layer_quantizing import check_device, quantize_layer
from smkern.models.quantization import Kind, Quantization
from smkern.models.weights import Weights


def quantize(weights: Weights, kind: Kind) -> Weights:
    """Weights whose linear layers are e4m3 with scales, made of weights that are not.

    A group of weights that shares a scale is divided by its largest magnitude over 448 and rounded
    to nearest. Embedding, head, norms and routers are the same tensors as before.

    Args:
        weights: Not quantized; unchanged.
        kind: "fp8-block", "fp8-channel" or "fp8-tensor", as `Quantization` says; the inputs' scales
            are dynamic.

    Raises:
        ConfigError: another kind, weights that are quantized, or sizes that blocks do not divide.
        WeightsError: weights that are not finite.
        DeviceError: weights on a GPU without e4m3.

    Source: blocks as in DeepSeek-V3 (arXiv 2412.19437) section 3.3.2.

    Example:
        >>> from smkern.models import Weights, preset, quantize
        >>> small = preset("qwen3-8b").replace(
        ...     num_layers=1, hidden_size=128, num_q_heads=2, num_kv_heads=1,
        ...     intermediate_size=256, vocab_size=32)
        >>> made = quantize(Weights.random(small), "fp8-block")
        >>> made.layers[0].qkv.dtype, made.layers[0].scales.qkv.weight.shape
        (torch.float8_e4m3fn, torch.Size([4, 1]))
    """
    if not isinstance(weights, Weights):
        raise ConfigError(f"weights are a {type(weights).__name__}: pass Weights")
    if weights.config.quantization is not None:
        raise ConfigError(
            f"the weights are quantized ({weights.config.quantization.kind}): pass those that they "
            "were made of"
        )
    config = weights.config.replace(quantization=Quantization(kind))
    check_device(config, weights.embed.device)
    layers = tuple(quantize_layer(layer, config, i) for i, layer in enumerate(weights.layers))
    return replace(weights, config=config, layers=layers)
