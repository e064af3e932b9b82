"""From an append problem to its launch: variants, compilation, parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from smkern.kernels.aot import FamilyKernels, KernelSource, Launch, compile_source
from smkern.kernels.compile import Artifact
from smkern.kernels.driver import OVERLAP_FROM, may_overlap
from smkern.tuning.append import (
    VECTOR,
    WARPS,
    AppendConfig,
    AppendProblem,
    Budget,
    item_tokens,
    kv_count,
    num_ctas,
    q_count,
)

POINTERS = (
    "q_ptr", "k_ptr", "v_ptr", "out_ptr", "k_cache_ptr", "v_cache_ptr", "table_ptr", "indptr_ptr",
    "lens_ptr", "cu_ptr", "positions_ptr", "cos_sin_ptr", "q_norm_ptr", "k_norm_ptr", "k_scale_ptr",
    "v_scale_ptr",
)  # fmt: skip
STRIDES = (
    "q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "out_token", "out_head",
    "k_page", "k_slot", "k_cache_head", "v_page", "v_slot", "v_cache_head", "table_stride",
    "cos_sin_stride",
)  # fmt: skip
NUMBERS = (
    "tokens", "batch", "first_step", "table_len", "num_pages", "max_position", "positions_step",
    "with_k_scale", "with_v_scale",
)  # fmt: skip
SCALARS = ("eps", "k_scale", "v_scale")
"""The kernel's run-time parameters, in its order."""
_INT32 = ("table_ptr", "indptr_ptr", "lens_ptr", "cu_ptr", "positions_ptr")
_ROWS = ("q_ptr", "k_ptr", "v_ptr", "out_ptr", "k_cache_ptr", "v_cache_ptr")
_NATIVE_E4M3 = 89
"""The first capability with instructions for conversion to e4m3."""
_FORMAT = f"{len(POINTERS)}Q{len(STRIDES)}q{len(NUMBERS)}q" + "f4x" * len(SCALARS)


@dataclass(frozen=True, slots=True, order=True)
class AppendVariant:
    """One compiled kernel: the part of a problem and a configuration that selects code."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    cache_dtype: str
    rotary_dim: int
    interleaved: bool
    norm: bool
    ragged: bool
    flat: bool
    table_dtype: str
    weight_dtype: str
    aligned: bool
    tokens: int
    q_count: int
    kv_count: int
    num_warps: int
    capability: int

    @property
    def unit(self) -> int:
        """Unit of row strides, elements."""
        return VECTOR if self.aligned else 1

    @property
    def constants(self) -> dict[str, Any]:
        """The kernel's compile-time parameters."""
        half = self.head_dim // 2
        table_unit = (4 if self.table_dtype == "fp32" else VECTOR) if self.aligned else 1
        fp8 = 0 if self.cache_dtype != "fp8" else 1 if self.capability >= _NATIVE_E4M3 else 2
        return {
            "TOKENS": self.tokens,
            "Q_COUNT": self.q_count,
            "KV_COUNT": self.kv_count,
            "H": half,
            "PAD": 1 << (half - 1).bit_length(),
            "TURNED": self.rotary_dim // 2,
            "INTERLEAVED": self.interleaved,
            "NORM": self.norm,
            "Q_HEADS": self.num_q_heads,
            "KV_HEADS": self.num_kv_heads,
            "PAGE": self.page_size,
            "RAGGED": self.ragged,
            "FLAT": self.flat,
            "FP8": fp8,
            "UNIT": self.unit,
            "T_UNIT": table_unit,
            "PDL": self.capability >= OVERLAP_FROM,
        }

    def compile(self) -> Artifact:
        """Compile it (or take it from Triton's cache). Needs no GPU."""
        return compile_append(self)


_SHARED = tuple(
    name for name in AppendVariant.__slots__ if name in AppendProblem.__dataclass_fields__
)


def variant_of(problem: AppendProblem, config: AppendConfig, capability: int) -> AppendVariant:
    """The kernel for a problem and a configuration, without what does not affect its code."""
    same = {name: getattr(problem, name) for name in _SHARED}
    if not problem.rotary_dim:
        same |= {"interleaved": False, "table_dtype": "fp32"}
    if not problem.norm:
        same |= {"weight_dtype": problem.dtype}
    same |= {
        "tokens": item_tokens(problem, config),
        "q_count": q_count(problem, config),
        "kv_count": kv_count(problem),
    }
    return AppendVariant(**same, num_warps=config.num_warps, capability=capability)


def variants_of(problem: AppendProblem, capability: int) -> tuple[AppendVariant, ...]:
    """The kernels for a kind of problem: one per CTA size."""
    return tuple(variant_of(problem, AppendConfig(warps), capability) for warps in WARPS)


def compile_append(variant: AppendVariant) -> Artifact:
    """Compile one kernel (or take it from Triton's cache). Needs no GPU."""
    from smkern.kernels.append_triton import append_rows

    cache = variant.cache_dtype
    if cache == "fp8":
        cache = "fp8e4nv" if variant.capability >= _NATIVE_E4M3 else "u8"
    signature = {name: "*i32" if name in _INT32 else "*fp32" for name in POINTERS}
    signature |= dict.fromkeys(_ROWS, f"*{variant.dtype}")
    signature |= dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), f"*{cache}")
    signature |= dict.fromkeys(("q_norm_ptr", "k_norm_ptr"), f"*{variant.weight_dtype}")
    signature |= {"cos_sin_ptr": f"*{variant.table_dtype}"} | dict.fromkeys(STRIDES, "i64")
    signature |= dict.fromkeys(NUMBERS, "i32") | dict.fromkeys(SCALARS, "fp32")
    whole = (*_ROWS, "cos_sin_ptr", "q_norm_ptr", "k_norm_ptr") if variant.aligned else ()
    return compile_source(
        KernelSource(
            append_rows, signature, variant.constants, whole, variant.num_warps, variant.capability
        )
    )


class AppendKernels(FamilyKernels[AppendProblem]):
    """The append kernels of one device."""

    def variants(self, problem: AppendProblem) -> tuple[AppendVariant, ...]:
        return variants_of(problem, self.capability)

    def prepare(self, problem: AppendProblem, config: AppendConfig, budget: Budget) -> Launch:
        """The launch of a problem within a budget; loads all kernels of its kind on first use."""
        mine = variant_of(problem, config, self.capability)
        if not self._set.is_loaded(mine):
            self._load(problem)
        overlap = may_overlap(config.overlap, budget, self.capability)
        return self._set.bind(mine, _FORMAT, num_ctas(problem, config, budget), overlap=overlap)


def first_step(batch: int) -> int:
    """First step of the bisection for a token's request: the largest power of two below `batch`."""
    return (1 << (batch - 1).bit_length()) >> 1 if batch > 1 else 0
