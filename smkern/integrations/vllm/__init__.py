"""smkern in vLLM 0.26 to 0.33: paged attention as the backend `CUSTOM`, linear layers by the GEMM.

vLLM finds `register` by the entry point `vllm.general_plugins`; nothing else is imported before
the backend is asked for:

    vllm serve Qwen/Qwen3-8B --attention-backend CUSTOM --quantization smkern

Keys and values are written by `smkern.append_kv`, read by `smkern.paged_attention`; a plan is made
once a step and shared by the layers. Decode steps, those with a fixed number of speculative tokens
too, run in full CUDA graphs: their plans are made anew in place, outside the graph.

| what | what happens |
| --- | --- |
| bf16, fp16; fp8 (e4m3) caches; sliding windows, soft caps, sinks; grouped queries | served |
| chunked prefill, prefix caching, NHD and HND caches, blocks of 16 to 256 tokens | served |
| ALiBi, encoders, MLA, cascades, other head dims, quantised outputs | refused while the engine starts |
| linear layers in bf16, fp16; of checkpoints in e4m3 with scales of blocks, rows or tensors | served |
| other quantisations; blocks that projections or shards cut | refused while the engine starts |
| another vLLM | ConfigError where the backend is asked for |
"""  # noqa: E501

from __future__ import annotations

from logging import getLogger

from smkern.errors import ConfigError

VERSIONS = tuple(f"0.{minor}" for minor in range(26, 34))
"""Of vLLM, whose interfaces the classes implement."""
BACKEND = "smkern.integrations.vllm.backend.SmkernBackend"
NAME = "smkern"
"""Of the linear layers, as vLLM's `quantization`."""

__all__ = ["NAME", "VERSIONS", "check_version", "refuse", "register"]


def register() -> None:
    """Register the backend as `CUSTOM`, unless another plug-in has that name, and linear layers.

    vLLM calls it. One that has no such registries starts as if smkern were not there, and its log
    says so.
    """
    try:
        from vllm.model_executor.layers.quantization import register_quantization_config
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

        from smkern.integrations.vllm.linear_config import SmkernLinearConfig

        is_taken = AttentionBackendEnum.CUSTOM.is_overridden()
    except (ImportError, AttributeError) as reason:
        getLogger(__name__).warning(
            "smkern is not registered: it is written for vLLM %s to %s (%s)",
            VERSIONS[0], VERSIONS[-1], reason,
        )  # fmt: skip
        return
    register_quantization_config(NAME)(SmkernLinearConfig)
    if not is_taken:
        register_backend(AttentionBackendEnum.CUSTOM, BACKEND)


def check_version(version: str) -> None:
    """Raise ConfigError for a vLLM whose interface is another.

    Args:
        version: vLLM's, as "0.26.0".
    """
    if not any(version == known or version.startswith(f"{known}.") for known in VERSIONS):
        raise ConfigError(
            f"vLLM {version}: smkern's classes are written for {VERSIONS[0]} to {VERSIONS[-1]}; "
            "install one of these, or leave attention_backend=CUSTOM and quantization=smkern out"
        )


def refuse(is_asked: bool, what: str, instead: str) -> None:
    """Raise ConfigError where something is asked for that smkern's attention does not serve.

    Args:
        is_asked: Whether it is.
        what: It.
        instead: A backend of vLLM's that serves it.
    """
    if is_asked:
        raise ConfigError(
            f"{what} is not served by smkern's attention: start vLLM with "
            f"attention_backend={instead}, or without one"
        )
