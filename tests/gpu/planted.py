"""A kernel with a fault, for tests that must find it."""

import triton
import triton.language as tl


@triton.jit
def write_past_the_end(buffer, size, BLOCK: tl.constexpr):
    """Stores BLOCK elements that begin one behind the end of `buffer`."""
    at = size + tl.arange(0, BLOCK)
    tl.store(buffer + at, 1.0)
