"""How the lines of providers look, in every picture alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smkern.panels import Mark, curve, look

STYLES = {
    "smkern": look("smkern", "#1b6ca8", "o", linewidth=2.0, zorder=4),
    "smkern:triton": look("smkern, own kernels only", "#58a4d6", ".", linewidth=1.2, zorder=3),
    "cublas": look("cuBLAS, better of two partitions", "#c8553d", "s", linewidth=1.6, zorder=3),
    "flashinfer:fa2": look(
        "FlashInfer FA2, better of two partitions", "#6a994e", "^", linewidth=1.4, zorder=3
    ),
    "flashinfer:fa3": look(
        "FlashInfer FA3, better of two partitions", "#c8553d", "s", linewidth=1.4, zorder=3
    ),
    "flashinfer:cuda-cores": look("FlashInfer, CUDA cores", "#a7c080", "v", linewidth=1.0),
    "flashinfer:xqa": look("FlashInfer XQA", "#d9a441", "P", linewidth=1.0),
    "sdpa:cudnn": look(
        "cuDNN through SDPA, no pages", "#8d6a9f", "D", linewidth=1.0, linestyle="--"
    ),
    "wrong-budget": look(
        "our kernel told the whole device's budget", "#999999", "x", linewidth=1.0, linestyle=":"
    ),
    "ideal": look(
        "ideal: the partition's measured ceiling",
        "#444444",
        linewidth=1.0,
        linestyle="--",
        zorder=1,
    ),
}
"""Provider to its line, in every picture alike."""


def provider_curve(name: str, points: Mapping[int, float], **style: Any) -> Mark:
    """A provider's line over budgets, in its own style where `style` says no other."""
    return curve(points, **{"markersize": 4, **STYLES[name], **style})
