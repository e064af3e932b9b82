"""Sums over the GPUs of a host by kernels of ours."""
