"""smkern in SGLang: paged attention as the attention backend `smkern`.

SGLang finds `register` by the entry point `sglang.srt.plugins`; nothing else is imported before
the backend is asked for:

    python -m sglang.launch_server --model-path Qwen/Qwen3-8B \\
        --attention-backend smkern --page-size 16
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from logging import getLogger
from typing import Any

NAME = "smkern"
_CONTEXT = "sglang.srt.multiplex.pdmux_context"
_MIXIN = "sglang.srt.multiplex.multiplexing_mixin.SchedulerMultiplexMixin"
HOOKS = {
    f"{_MIXIN}.init_pdmux": ("complete", "BEFORE"),
    f"{_CONTEXT}.initialize_stream_groups": ("initialize", "AROUND"),
    f"{_MIXIN}.adjust_stream_groups": ("adjust", "AROUND"),
    f"{_MIXIN}.update_split_prefill_batch": ("begin_step", "BEFORE"),
}
"""Functions of SGLang's multiplexing, the method of `pdmux.Multiplexing` that is called there, and
SGLang's name of when."""

__all__ = ["HOOKS", "NAME", "register"]


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
    multiplexing = cache(_multiplexing)
    for target, (name, kind) in HOOKS.items():
        HookRegistry.register(target, _hook(multiplexing, name), HookType[kind])


def _multiplexing() -> Any:
    from smkern.integrations.sglang.pdmux import Multiplexing

    return Multiplexing()


def _hook(multiplexing: Callable[[], Any], name: str) -> Callable[..., Any]:
    """A method of what is made when SGLang multiplexes for the first time."""
    return lambda *given, **named: getattr(multiplexing(), name)(*given, **named)


def _made(runner: Any) -> Any:
    from smkern.integrations.sglang.backend import SmkernBackend

    return SmkernBackend(runner)
