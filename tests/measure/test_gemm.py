from __future__ import annotations

import torch

from smkern.measure.gemm import GemmOperands
from smkern.measure.timing import sets_for

N, K = 48, 32


def test_operands_exceed_the_cache_and_differ():
    assert sets_for(2 * 28672 * 4096) == 2
    assert sets_for(2 * 4096 * 4096) * 4096 * 4096 * 2 >= 150e6
    assert sets_for(2) == 64
    ops = GemmOperands(N, K, 8, device="cpu", num_sets=2)
    assert ops.w(0).data_ptr() == ops.w(2).data_ptr() != ops.w(1).data_ptr()
    assert ops.a(4, 0).shape == (4, K)
    assert torch.equal(ops.a(4, 1), ops.a(8, 1)[:4])
    ops.poison(4)
    assert ops.error(4) != ops.error(4)
    ops.out(4, 0).copy_(ops.reference(4))
    assert ops.error(4) == 0.0
