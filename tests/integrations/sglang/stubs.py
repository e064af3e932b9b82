"""SGLang's classes as its 0.5.23 has them, as far as the backend meets them; or SGLang's own."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tests.integrations.sglang import pdmux_stubs

BACKENDS: dict[str, Callable[[Any], Any]] = {}
CHOICES: list[str] = []
HAS_SGLANG = find_spec("sglang") is not None


class ForwardMode(enum.IntEnum):
    EXTEND, DECODE, MIXED, IDLE, SPLIT_PREFILL = range(1, 6)

    def is_idle(self) -> bool:
        return self == ForwardMode.IDLE

    def is_decode(self) -> bool:
        return self == ForwardMode.DECODE

    def is_decode_or_idle(self) -> bool:
        return self in (ForwardMode.DECODE, ForwardMode.IDLE)


class AttentionType(enum.Enum):
    DECODER, ENCODER_ONLY = "decoder", "encoder_only"


class AttentionBackend:
    def init_forward_metadata(self, forward_batch: Any) -> None:
        raise NotImplementedError

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        raise NotImplementedError

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: Any, forward_batch: Any,
        save_kv_cache: bool = True, **kwargs: Any,
    ) -> Any:  # fmt: skip
        mine: Any = self
        decodes = forward_batch.forward_mode.is_decode()
        run = mine.forward_decode if decodes else mine.forward_extend
        return run(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)


class RadixAttention(nn.Module):
    def __init__(
        self, num_heads: int, head_dim: int, scaling: float, num_kv_heads: int, layer_id: int,
        logit_cap: float = 0.0, v_head_dim: int = -1, sliding_window_size: int = -1,
        is_cross_attention: bool = False, logit_capping_method: str = "tanh",
        attn_type: AttentionType = AttentionType.DECODER,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tp_q_head_num, self.tp_k_head_num = num_heads, num_kv_heads
        self.head_dim, self.v_head_dim = head_dim, head_dim if v_head_dim == -1 else v_head_dim
        self.scaling, self.layer_id, self.logit_cap = scaling, layer_id, logit_cap
        self.sliding_window_size = sliding_window_size or -1
        self.is_cross_attention, self.attn_type = is_cross_attention, attn_type
        self.logit_capping_method, self.xai_temperature_len = logit_capping_method, -1


class MHATokenToKVPool:
    def __init__(
        self, size: int, page_size: int, dtype: torch.dtype, head_num: int, head_dim: int,
        layer_num: int, device: str, enable_memory_saver: bool,
    ) -> None:  # fmt: skip
        shape = (size + page_size, head_num, head_dim)
        self.dtype = dtype
        self.k_buffer = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layer_num)]
        self.v_buffer = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layer_num)]

    def get_kv_buffer(self, layer_id: int) -> tuple[Tensor, Tensor]:
        return self.k_buffer[layer_id], self.v_buffer[layer_id]


class ReqToTokenPool:
    def __init__(
        self, size: int, max_context_len: int, device: str, enable_memory_saver: bool
    ) -> None:
        self.req_to_token = torch.zeros((size + 1, max_context_len), dtype=torch.int32)


class HookType(enum.Enum):
    BEFORE, AFTER, AROUND, REPLACE = "before", "after", "around", "replace"


class HookRegistry:
    hooks: ClassVar[list[tuple[str, Any, HookType]]] = []

    @classmethod
    def register(cls, target: str, hook: Any, hook_type: HookType = HookType.AFTER) -> None:
        cls.hooks.append((target, hook, hook_type))


def register_attention_backend(name: str) -> Callable[[Any], Any]:
    def keep(made: Any) -> Any:
        BACKENDS[name] = made
        return made

    return keep


MODULES: dict[str, Any] = {
    "sglang": {"__version__": "0.5.23"},
    "sglang.srt": {},
    "sglang.srt.layers": {},
    "sglang.srt.layers.attention": {},
    "sglang.srt.layers.attention.attention_registry": {
        "register_attention_backend": register_attention_backend, "ATTENTION_BACKENDS": BACKENDS,
    },
    "sglang.srt.layers.attention.base_attn_backend": {"AttentionBackend": AttentionBackend},
    "sglang.srt.layers.radix_attention": {
        "AttentionType": AttentionType, "RadixAttention": RadixAttention,
    },
    "sglang.srt.mem_cache": {},
    "sglang.srt.mem_cache.memory_pool": {
        "MHATokenToKVPool": MHATokenToKVPool, "ReqToTokenPool": ReqToTokenPool,
    },
    "sglang.srt.model_executor": {},
    "sglang.srt.model_executor.forward_batch_info": {"ForwardMode": ForwardMode},
    "sglang.srt.multiplex": {},
    "sglang.srt.multiplex.multiplexing_mixin": {
        "SchedulerMultiplexMixin": pdmux_stubs.SchedulerMultiplexMixin,
    },
    "sglang.srt.multiplex.pdmux_context": pdmux_stubs.CONTEXT,
    "sglang.srt.plugins": {},
    "sglang.srt.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
    "sglang.srt.runtime_context": {
        "get_parallel": lambda: SimpleNamespace(attn_dcp_size=1), "get_server_args": lambda: None,
    },
    "sglang.srt.server_args": {"add_attention_backend_choices": CHOICES.extend},
}  # fmt: skip
OURS = "smkern.integrations.sglang.backend"


@contextmanager
def stubbed(**changes: dict[str, Any]) -> Iterator[SimpleNamespace]:
    """SGLang's names, of the package where it is installed, else of the classes above.

    Args:
        changes: What other attributes a module has, by its last name.
    """
    before = {name: sys.modules.get(name) for name in (*MODULES, OURS)}
    sys.modules.pop(OURS, None)
    if not HAS_SGLANG or changes:
        for name, values in MODULES.items():
            module: Any = ModuleType(name)
            module.__dict__.update(values | changes.get(name.rpartition(".")[2], {}))
            sys.modules[name] = module
    try:
        found = SimpleNamespace()
        for name, values in MODULES.items():
            if values:
                __import__(name)
                for key in values:
                    setattr(found, key, getattr(sys.modules[name], key))
        with ExitStack() as stack:
            if hasattr(found.get_parallel(), "override"):  # its own says nothing before it starts
                stack.enter_context(found.get_parallel().override(attn_dcp_size=1))
            yield found
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None) if not HAS_SGLANG or name == OURS else None
            else:
                sys.modules[name] = module
