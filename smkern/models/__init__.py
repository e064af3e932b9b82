"""Llama-3, Qwen3 and Qwen3-MoE decoders made of SM-aware operators.

>>> from smkern.models import Decoder, Weights, preset
>>> config = preset("qwen3-8b")
>>> decoder = Decoder(config, Weights.random(config, device="cuda"))   # doctest: +SKIP
>>> with split.prefill:                                                # doctest: +SKIP
...     decoder.layer(0, step)                                         # on this partition's SMs
"""

from __future__ import annotations

from typing import Any

from smkern.models.activations import ActivationBuffers, MoeBuffers, StepBuffers
from smkern.models.architecture import MoeConfig
from smkern.models.config import ModelConfig
from smkern.models.decoder import Decoder
from smkern.models.graph import DecodeGraph, DecodeInputs
from smkern.models.layers import AttentionWeights, DenseLayer, Layer, MoeLayer
from smkern.models.presets import preset, presets
from smkern.models.sampling import SamplingParams
from smkern.models.step import Step
from smkern.models.warming import ModelCalls
from smkern.models.weights import Weights

__all__ = [
    "ActivationBuffers",
    "AttentionWeights",
    "DecodeGraph",
    "DecodeInputs",
    "Decoder",
    "DenseLayer",
    "Layer",
    "ModelCalls",
    "ModelConfig",
    "MoeBuffers",
    "MoeConfig",
    "MoeLayer",
    "SamplingParams",
    "Step",
    "StepBuffers",
    "Weights",
    "preset",
    "presets",
]

_MOVED = {
    "Arena": "smkern.models.ActivationBuffers",
    "Buffers": "smkern.models.StepBuffers",
    "Completion": "smkern.Completion",
    "LLM": "smkern.LLM",
    "Piece": "smkern.Output",
    "layer_launch_us": "smkern.bench.model.host_cost.layer_launch_us",
}


def __getattr__(name: str) -> Any:
    """An error that names the new place of what is no longer here."""
    if name in _MOVED:
        # An AttributeError would lose its text in `from smkern.models import LLM`.
        raise ImportError(f"smkern.models.{name} is {_MOVED[name]} now: import it from there")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
