"""How transformers comes to know an attention implementation."""

from __future__ import annotations

import torch

from smkern.integrations.transformers.attention import Attention


def register_attention(name: str, attention: Attention) -> None:
    """Register an attention function and its mask function under a name.

    Raises:
        ImportError: transformers is absent, or older than 5.17.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            f"{error}: smkern's attention needs transformers 5.17 or later; pip install "
            "'smkern[transformers]'"
        ) from error
    # what they make and keep between forwards is no part of a compiled graph
    AttentionInterface.register(name, torch.compiler.disable(attention.attend))
    AttentionMaskInterface.register(name, torch.compiler.disable(attention.mask))
