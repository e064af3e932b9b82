"""Kernels in CUTLASS's Python DSL, the CuTe DSL: tiles that Triton's powers of two leave out."""
