"""One token a row of logits, with what it does to its request."""

from smkern.ops.sample.operators import sample
from smkern.ops.sample.warmup import SampleCalls

__all__ = ["SampleCalls", "sample"]
