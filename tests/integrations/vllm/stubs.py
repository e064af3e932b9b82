"""What of vLLM 0.26 to 0.33 smkern's classes are written against: its own by their signatures."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

from torch import Tensor

from tests.integrations.vllm.linear_stubs import NAMES as OF_LINEAR
from tests.integrations.vllm.linear_stubs import QUANTIZED, SECOND_LOADER

M = TypeVar("M")


class AttentionType:
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


class AttentionCGSupport(Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class AttentionBackend:
    forward_includes_kv_cache_update = True

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size in cls.get_supported_head_sizes()

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        return kv_cache_dtype is None or kv_cache_dtype in cls.supported_kv_cache_dtypes


class AttentionImpl:
    pass


class AttentionMetadataBuilder(Generic[M]):
    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any
    ) -> None:
        self.kv_cache_spec = kv_cache_spec
        self.vllm_config = vllm_config


@dataclass
class CommonAttentionMetadata:
    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Tensor
    slot_mapping: Tensor
    causal: bool | Tensor = True
    mm_req_doc_ranges: dict[int, list[tuple[int, int]]] | None = None
    rswa_prefix_lens: Tensor | None = None


class Platform:
    CAPABILITY = (9, 0)

    @classmethod
    def is_device_capability(cls, capability: tuple[int, int]) -> bool:
        return capability == cls.CAPABILITY


class Backends(Enum):
    """The registry; values of members are class paths."""

    CUSTOM = None

    def is_overridden(self) -> bool:
        return self in REGISTERED


REGISTERED: dict[Backends, str] = {}
LAYOUT = ["NHD"]


def register_backend(backend: Backends, class_path: str) -> None:
    REGISTERED[backend] = class_path


def modules(version: str) -> dict[str, ModuleType]:
    """vLLM's modules that smkern imports."""
    of_backend = (
        AttentionBackend,
        AttentionCGSupport,
        AttentionImpl,
        AttentionMetadataBuilder,
        AttentionType,
        CommonAttentionMetadata,
    )
    registry = {"AttentionBackendEnum": Backends, "register_backend": register_backend}
    scheduler = SimpleNamespace(max_num_batched_tokens=64)
    names = {
        "vllm": {"__version__": version},
        "vllm.platforms": {"current_platform": Platform},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.config": {
            "get_current_vllm_config": lambda: SimpleNamespace(scheduler_config=scheduler)
        },
        **OF_LINEAR,
        "vllm.v1": {},
        "vllm.v1.attention": {},
        "vllm.v1.attention.backends": {},
        "vllm.v1.attention.backend": {x.__name__: x for x in of_backend},
        "vllm.v1.attention.backends.registry": registry,
        "vllm.v1.attention.backends.utils": {},
    }
    if version < "0.29":  # later ones lay out caches without asking
        names["vllm.v1.attention.backends.utils"]["get_kv_cache_layout"] = lambda: LAYOUT[0]
    made = {}
    for name, values in names.items():
        made[name] = ModuleType(name)
        made[name].__dict__.update(values)
    made["vllm"].__dict__["envs"] = made["vllm.envs"]
    return made


OURS = tuple(
    f"smkern.integrations.vllm.{name}"
    for name in ("backend", "metadata", "linear", "linear_config", "fp8")
)


@contextmanager
def stubbed(version: str = "0.26.0") -> Iterator[None]:
    """vLLM is importable; what imported it is forgotten afterwards."""
    before = {name: x for name, x in sys.modules.items() if name.split(".")[0] == "vllm"}
    for name in (*before, *OURS):
        sys.modules.pop(name, None)
    sys.modules.update(modules(version))
    try:
        yield
    finally:
        for name in [x for x in sys.modules if x.split(".")[0] == "vllm" or x in OURS]:
            del sys.modules[name]
        sys.modules.update(before)
        REGISTERED.clear()
        QUANTIZED.clear()
        del SECOND_LOADER[3:]
