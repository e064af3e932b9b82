"""Attention that writes e4m3, interpreted: both paths, merged pieces, heads that share a scale.

The interpreter's conversion to e4m3 is not the hardware's: some carries and subnormals are wrong.
"""

from __future__ import annotations

import pytest
import torch

from smkern.ops.reference.fp8 import dequantize, quantize
from smkern.tuning.attention import shapes as attention
from tests.interpreter.attention_support import Case, answer, inputs, run

RAGGED = ((1, 40), (3, 70), (0, 20), (1, 0), (20, 33))
PIECES = ((1, 300), (2, 65), (1, 64))


@pytest.mark.parametrize(("q_heads", "head_dim"), [(4, 64), (12, 64), (3, 128), (2, 256)])
@pytest.mark.parametrize("requests", [RAGGED, PIECES])
def test_values(monkeypatch: pytest.MonkeyPatch, q_heads: int, head_dim: int, requests) -> None:
    monkeypatch.setattr(attention, "DECODE_PIECE", 64)
    kv_heads = 1 if q_heads < 12 else 2
    case = Case(requests, q_heads, kv_heads, head_dim, scaled=True)
    given = inputs(case)
    out, _ = run(case, given)
    exact = answer(case, given)[0].half().flatten(1)
    wanted = dequantize(*quantize(exact, "block")).view(out.shape)
    off = (out - wanted).abs()
    near = off <= torch.maximum(wanted.abs() / 7, wanted.abs().amax(-1, keepdim=True) / 2**15)
    assert float(near.float().mean()) > 0.95
    assert bool(out.isfinite().all())
    assert float(off.norm()) < 0.1 * float(wanted.norm())
