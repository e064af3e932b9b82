"""Llama-3, Mistral, Qwen2, Qwen3 and Qwen3-MoE decoders made of SM-aware operators.

>>> from smkern.models import Decoder, Weights, preset
>>> config = preset("qwen3-8b")
>>> decoder = Decoder(config, Weights.random(config, device="cuda"))   # doctest: +SKIP
>>> with split.prefill:                                                # doctest: +SKIP
...     decoder.layer(0, step)                                         # on this partition's SMs
"""

from __future__ import annotations

from smkern.lazy import attach_stub

# At once: the function has its module's name.
from smkern.models.presets import preset as preset
from smkern.models.presets import presets as presets

# Sizes of a model and how its tokens are drawn load no torch.
__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
