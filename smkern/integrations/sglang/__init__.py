"""smkern in SGLang: paged attention as the attention backend `smkern`.

SGLang finds `register` by the entry point `sglang.srt.plugins`; nothing else is imported before
the backend is asked for:

    python -m sglang.launch_server --model-path Qwen/Qwen3-8B \\
        --attention-backend smkern --page-size 16
"""

from __future__ import annotations

from logging import getLogger
from typing import Any

NAME = "smkern"

__all__ = ["NAME", "register"]


def register() -> None:
    """Register the backend by its name; SGLang calls it before it reads its options.

    Its multiplexing gets smkern's partitions where both are asked for. One that has no such
    registries starts as if smkern were not there, and its log says so.
    """
    try:
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType
        from sglang.srt.server_args import add_attention_backend_choices
    except ImportError as reason:
        getLogger(__name__).warning("smkern is not registered with SGLang: %s", reason)
        return
    register_attention_backend(NAME)(_made)
    add_attention_backend_choices([NAME])
    from smkern.integrations.sglang.pdmux import Multiplexing

    Multiplexing().register(HookRegistry, HookType)


def _made(runner: Any) -> Any:
    from smkern.integrations.sglang.backend import SmkernBackend

    return SmkernBackend(runner)
