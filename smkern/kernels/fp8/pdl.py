"""The beginning of a Triton kernel that may be launched while the one before it still runs."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait(PDL: tl.constexpr):
    """Let the next launch begin, and wait for the previous one."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
