"""Attention's kernels: the plan's layout, launches, device code in Triton, CUDA of `csrc/`."""
