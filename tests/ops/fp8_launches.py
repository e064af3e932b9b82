"""Eager calls on e4m3 on a driver that does nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from smkern.kernels.compile import Artifact
from smkern.kernels.fp8 import gated_launch, gemm_compile, grouped_launch, rows_launch
from smkern.kernels.fp8.gemm_launch import ScaledGemmKernels
from smkern.ops.fp8.dispatch import ScaledDispatcher
from smkern.ops.operator_eager import EagerOperator
from smkern.ops.streams import Streams
from smkern.ops.workspace import Workspaces
from smkern.profile import load_profile
from smkern.tuning.config import Budget
from tests.ops.fake_layer import Launched, without_driver

E4M3 = torch.float8_e4m3fn
H200 = load_profile("h200")
BUDGET = Budget(24, "mask", True)
WHOLE = Budget(132, "mask", True)
WS = ["x_map", *["-"] * 4, "y_map", *["-"] * 4, "out", "bias", "residual", "partials", "counters",
      "a_scale", "w_scale", *gemm_compile.NUMBERS]  # fmt: skip
CUTLASS = ["x_map", "y_map", "out", "bias", "residual", "a_scale", "w_scale", "m", "n",
           "out_stride", "residual_stride", "a_step", "a_block_step", "w_step", "tiles_x",
           "tiles_y", "k_iters", "group", "early"]  # fmt: skip
"""As `fp8_gemm`'s kernel has them; nothing of Triton's."""
GROUPED_POINTER = ["a", "w", *grouped_launch.ADDRESSES, *grouped_launch.POINTER_NUMBERS]
GROUPED_WS = ["a_map", *["-"] * 4, "w_map", *["-"] * 4, *grouped_launch.ADDRESSES,
              *grouped_launch.WS_NUMBERS]  # fmt: skip
GATED = ["x_map", *["-"] * 4, "y_map", *["-"] * 8, *gated_launch.ADDRESSES, *gated_launch.NUMBERS]


def artifact(variant: Any) -> Artifact:
    boxes: Any = ()
    if getattr(variant, "kernel", "") in ("ws", "cutlass"):
        boxes = ((variant.rows, 64), (variant.columns, 64))
    if isinstance(variant, grouped_launch.ScaledGroupedVariant) and variant.config.kernel == "ws":
        boxes = ((variant.config.block_m, 64), (variant.config.block_n, 64))
    if isinstance(variant, gated_launch.GatedVariant):
        boxes = ((128, 64), (1, 2, 128, 64))
    return Artifact("kernel", b"", 384, 0, (3, 3), boxes)


@contextmanager
def recorded() -> Iterator[list[Launched]]:
    """What is launched meanwhile, compiled by nobody."""
    found: list[Launched] = []
    variants = (
        gemm_compile.ScaledVariant, rows_launch.QuantVariant, grouped_launch.ScaledGroupedVariant,
        gated_launch.GatedVariant,
    )  # fmt: skip
    with without_driver(found):
        patches: list[Any] = [patch.object(variant, "compile", artifact) for variant in variants]
        for each in patches:
            each.start()
        yield found
        for each in patches:
            each.stop()


def run(
    op: Any, call: Any, dispatcher: Any, capturing: bool = False, budget: Budget = BUDGET
) -> Any:
    streams = Streams(lambda: -1, lambda index: 7, lambda raw, index: budget, lambda: capturing)
    workspaces = Workspaces(torch.device("cpu"), streams.capturing, lambda raw: 0)
    with patch("smkern.ops.checks.check_capability"):
        return EagerOperator(op, -1, dispatcher, streams, workspaces)(call)


def gemms() -> ScaledDispatcher:
    return ScaledDispatcher(-1, H200, lambda: ScaledGemmKernels(90, 0))


def named(launch: Launched, names: list[str]) -> dict[str, int | None]:
    assert len(launch.values) == len(names) + 2, "two of Triton's own come last"
    return dict(zip(names, launch.values, strict=False))


def rows(count: int, columns: int, pitch: int) -> Tensor:
    return torch.zeros(count, pitch, dtype=torch.uint8).view(E4M3)[:, :columns]
