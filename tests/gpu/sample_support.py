"""What the sampler's tests on a GPU share: its kernels compiled ahead, side by side."""

from __future__ import annotations

import os

import torch

from smkern.kernels.compile import compile_all
from smkern.kernels.sample import variants_of
from smkern.ops.operator_dispatch import Compile
from smkern.tuning.sample import SampleProblem


def precompile() -> None:
    """Every kernel into this user's cache."""
    major, minor = torch.cuda.get_device_capability()
    variants = [
        variant
        for dtype in ("bf16", "fp16", "fp32")
        for aligned in (True, False)
        for variant in variants_of(SampleProblem(1, 64, dtype, aligned), 10 * major + minor)
    ]
    compile_all([Compile(x) for x in variants], workers=len(os.sched_getaffinity(0)))
