"""Variants of the Triton attention kernel: selection, defaults, compilation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from smkern.kernels.aot import KernelSource, compile_source
from smkern.kernels.compile import Artifact
from smkern.tuning.attention.constraints import triton_config, triton_rows
from smkern.tuning.attention.shapes import (
    PREFILL_ROWS,
    AttentionConfig,
    AttentionDtype,
    AttentionProblem,
    CacheDtype,
)
from smkern.tuning.bucket_table import power_of_two

Path = Literal["decode", "prefill"]

POINTERS = (
    "q_ptr", "k_ptr", "v_ptr", "out_ptr", "lse_ptr", "table_ptr", "indptr_ptr", "sinks_ptr",
    "k_scale_ptr", "v_scale_ptr", "count_ptr", "items_ptr", "counters", "partials", "stats",
)  # fmt: skip
STRIDES = (
    "q_token", "q_head", "out_token", "out_head", "k_page", "k_slot", "k_head", "v_page", "v_slot",
    "v_head", "table_stride",
)  # fmt: skip
NUMBERS = (
    "table_len", "num_pages", "num_tokens", "kv_heads", "window", "with_lse", "is_flat",
    "with_k_scale", "with_v_scale",
)  # fmt: skip
SCALARS = ("scale", "softcap", "k_scale", "v_scale")
SCALES = ("out_scale_ptr", "scale_token", "scale_block")
"""The kernel's run-time parameters, in its order."""
_INT32 = ("table_ptr", "indptr_ptr", "count_ptr", "items_ptr", "counters")
_ALIGNED = ("q_ptr", "k_ptr", "v_ptr", "out_ptr", "counters", "partials", "stats")
_NATIVE_E4M3 = 89
"""The first capability with instructions to convert e4m3; others take it as bytes."""


@dataclass(frozen=True, slots=True, order=True)
class AttentionVariant:
    """One compiled kernel: the part of a problem and a configuration that selects code.

    A tile has `rows` of an item's `block_rows`. `aligned`: addresses and strides are multiples of
    16 bytes.
    """

    path: Path
    dtype: AttentionDtype
    cache_dtype: CacheDtype
    head_dim: int
    group: int
    page_size: int
    block_rows: int
    rows: int
    causal: bool
    window: bool
    softcap: bool
    sinks: bool
    scaled: bool
    keys: int
    num_warps: int
    num_stages: int
    aligned: bool
    capability: int

    @property
    def constants(self) -> dict[str, Any]:
        """The kernel's compile-time parameters."""
        prefill = self.path == "prefill"
        pad = power_of_two(self.head_dim)
        # 32 elements per thread, so that merging needs no more registers than attention
        merge_rows = min(power_of_two(self.block_rows), max(1, 1024 * self.num_warps // pad))
        return {
            "PREFILL": prefill,
            "BLOCK": self.block_rows,
            "ROWS": self.rows,
            "KEYS": self.keys,
            "DIM": self.head_dim,
            "PAD": pad,
            "GROUP": self.group,
            "PAGE": self.page_size,
            "CAUSAL": self.causal,
            "WINDOW": self.window,
            "SOFTCAP": self.softcap,
            "SINKS": self.sinks,
            "SCALED": self.scaled,
            "Q_UNIT": self.q_unit,
            "KV_UNIT": self.kv_unit,
            "STAGES": self.num_stages,
            "CHUNK": 4 if prefill else 16,
            "MERGE_ROWS": merge_rows,
            "MERGE_STAGES": 1 if prefill else 4,
        }

    @property
    def tiles(self) -> int:
        """Tiles of an item, per KV head."""
        return -(-self.block_rows // self.rows)

    @property
    def q_unit(self) -> int:
        return 8 if self.aligned else 1

    @property
    def kv_unit(self) -> int:
        return (16 if self.cache_dtype == "fp8" else 8) if self.aligned else 1

    def compile(self) -> Artifact:
        """Compile it (or take it from Triton's cache). Needs no GPU.

        Raises:
            DeviceError: it needs more shared memory than a CTA may have.
        """
        from smkern.kernels.attention.triton_device import attention_items

        whole = _ALIGNED if self.aligned else ()
        return compile_source(
            KernelSource(
                attention_items, _signature(self), self.constants, whole, self.num_warps,
                self.capability, self.num_stages,
            )
        )  # fmt: skip


def default_config(problem: AttentionProblem, path: Path, capability: int = 90) -> AttentionConfig:
    """The default for prefill or decode items; see `constraints.triton_config`."""
    return triton_config(problem, path == "prefill", divmod(capability, 10))


def variants_of(
    problem: AttentionProblem, config: AttentionConfig, capability: int, aligned: bool = True
) -> tuple[AttentionVariant, ...]:
    """The kernels of a launch, in order: prefill items, then decode items, if the shape has any.

    `config` applies to the prefill items if there are any, else to the decode items; decode items
    beside prefill take `default_config`.
    """
    shape = problem.shape
    paths: list[tuple[Path, AttentionConfig]] = [("decode", config)]
    if shape.has_prefill:
        paths = [("prefill", config)]
        if shape.has_decode:
            paths.append(("decode", default_config(problem, "decode", capability)))
    return tuple(
        AttentionVariant(
            path=path,
            dtype=problem.dtype,
            cache_dtype=problem.cache_dtype,
            head_dim=shape.head_dim,
            group=shape.group,
            page_size=shape.page_size,
            block_rows=PREFILL_ROWS if path == "prefill" else shape.decode_rows,
            rows=triton_rows(shape, path == "prefill"),
            causal=shape.causal,
            window=shape.window > 0,
            softcap=problem.softcap,
            sinks=problem.sinks,
            scaled=problem.scaled,
            keys=chosen.keys,
            num_warps=chosen.num_warps,
            num_stages=chosen.num_stages,
            aligned=aligned,
            capability=capability,
        )
        for path, chosen in paths
    )


def _signature(variant: AttentionVariant) -> dict[str, str]:
    cache: str = variant.cache_dtype
    if cache == "fp8":
        cache = "fp8e4nv" if variant.capability >= _NATIVE_E4M3 else "u8"
    pointers = {name: "*i32" if name in _INT32 else "*fp32" for name in POINTERS}
    pointers |= dict.fromkeys(("q_ptr", "out_ptr"), f"*{variant.dtype}")
    pointers |= dict.fromkeys(("k_ptr", "v_ptr"), f"*{cache}")
    if variant.scaled:
        pointers["out_ptr"] = "*fp8e4nv"
    return (
        pointers
        | dict.fromkeys(STRIDES, "i64")
        | dict.fromkeys(NUMBERS, "i32")
        | dict.fromkeys(SCALARS, "fp32")
        | dict(zip(SCALES, ("*fp32", "i64", "i64"), strict=True))
    )
