"""After a warmup no call on e4m3 compiles or loads, eager or captured."""

from __future__ import annotations

import torch

import smkern
from smkern.ops.reference import fp8


def test_nothing_is_loaded_after_a_warmup(ladder):
    calls = smkern.Fp8Calls(
        shapes=[(512, 256)], experts=[(4, 128, 256, True)], blocks=True, max_m=300, hidden=[256],
        gated=[256], quantized=[256], quantized_swiglu=[(256, 256)],
    )  # fmt: skip
    partition = ladder.split(decode=16).decode
    smkern.warmup(calls=[calls], budgets=[partition], progress=False)
    before = smkern.counters()
    w, w_scale = fp8.quantize(torch.randn(512, 256, device="cuda"), "weight_block")
    weight = torch.ones(256, device="cuda").bfloat16()
    for m in (1, 16, 17, 64, 130, 300):
        x = torch.randn(m, 256, device="cuda").bfloat16()
        scale = torch.empty(m, 2, device="cuda")
        torch.cuda.synchronize()
        with partition:
            a = smkern.rms_norm(x, weight, out_scale=scale)
            y = smkern.gemm(a, w, a_scale=scale, w_scale=w_scale)
            smkern.silu_and_mul(y, out_scale=scale)
            smkern.gemm_swiglu(
                a, w, a_scale=scale, w_scale=w_scale, out_scale=torch.empty_like(scale)
            )
            smkern.quantize(x, "block")
        partition.synchronize()
        assert bool(y.isfinite().all())
    assert smkern.counters() == before
