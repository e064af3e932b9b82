"""What the benchmarks and the tuner share: operands past L2, partitions, device times."""
