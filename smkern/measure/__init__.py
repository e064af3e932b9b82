"""Shared by the benchmarks and the tuner: operands larger than L2, partitions, device times."""
