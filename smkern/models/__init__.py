"""Llama-3, Qwen3 and Qwen3-MoE decoders made of SM-aware operators.

>>> from smkern.models import Decoder, Weights, preset
>>> config = preset("qwen3-8b")
>>> decoder = Decoder(config, Weights.random(config, device="cuda"))   # doctest: +SKIP
>>> with split.prefill:                                                # doctest: +SKIP
...     decoder.layer(0, step)                                         # on this partition's SMs
"""

from __future__ import annotations

from typing import Any

from smkern.lazy import attach_stub

# At once: the function has its module's name.
from smkern.models.presets import preset as preset
from smkern.models.presets import presets as presets

# Sizes of a model and how its tokens are drawn load no torch.
_resolve, __dir__, __all__ = attach_stub(__name__, __file__)

_MOVED = {
    "Arena": "smkern.models.ActivationBuffers",
    "Buffers": "smkern.models.StepBuffers",
    "Completion": "smkern.Completion",
    "LLM": "smkern.LLM",
    "Piece": "smkern.Output",
    "layer_launch_us": "smkern.bench.model.host_cost.layer_launch_us",
}


def __getattr__(name: str) -> Any:
    """A name of the stub, or an error that names the new place of what is no longer here."""
    if name in _MOVED:
        # An AttributeError would lose its text in `from smkern.models import LLM`.
        raise ImportError(f"smkern.models.{name} is {_MOVED[name]} now: import it from there")
    return _resolve(name)
