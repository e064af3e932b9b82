"""What a product of e4m3 would run, and how much workspace that takes; nothing is launched."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

import smkern
from smkern.errors import ArgumentError
from tests.extras import set_cutlass
from tests.ops.test_fp8 import E4M3, refused


def test_an_explanation_names_kernel_and_kind():
    options = {"num_sms": 24, "confined": "mask"}
    why = smkern.explain_gemm(64, 6144, 4096, dtype=E4M3, scales="block", **options)
    assert why.config.kernel == "ws"
    assert why.config.block_k == 128
    assert "64x6144x4096 e4m3 by blocks (none) on 24 SMs" in str(why)
    bf16 = smkern.explain_gemm(64, 6144, 4096, **options)
    assert why.predicted_us < bf16.predicted_us
    odd = smkern.explain_gemm(64, 6144, 4100, dtype=E4M3)
    assert odd.config.kernel == "pointer"
    assert smkern.gemm_workspace_bytes(64, 6144, 4096, dtype=E4M3) >= 0
    refused("k=200: block scales", smkern.explain_gemm, m=1, n=8, k=200, dtype=E4M3, scales="block")
    refused("cannot run", smkern.explain_gemm, m=1, n=8, k=128, dtype=E4M3, backend="tma")
    for scales, dtype in product(("rows", None, np.ones(2)), (E4M3, torch.bfloat16)):
        refused("use one of .'matrix', 'row'", smkern.explain_gemm, m=1, n=8, k=128, dtype=dtype,
                scales=scales)  # fmt: skip


def test_an_explanation_of_swiglu_is_of_the_product_or_of_the_one_kernel():
    options = {"dtype": E4M3, "num_sms": 100, "confined": "mask"}
    why = smkern.explain_gemm_swiglu(2048, 12288, 4096, scales="block", **options)
    assert why == smkern.explain_gemm(2048, 24576, 4096, scales="block", **options)
    blocks = {"scales": "block", "out_scale": "block"} | options
    fused = smkern.explain_gemm_swiglu(2048, 12288, 4096, **blocks)
    assert "2048x24576x4096 e4m3 by blocks (swiglu) on 100 SMs" in str(fused)
    assert fused.workspace_bytes == 0
    few = smkern.explain_gemm_swiglu(64, 12288, 4096, **blocks)
    assert smkern.explain_gemm_swiglu(64, 12288, 4096, backend="own", **blocks) != few
    others = (
        few, smkern.explain_gemm_swiglu(2048, 12288, 4096, backend="unfused", **blocks),
        smkern.explain_gemm_swiglu(2048, 12288, 4096, **blocks | {"out_scale": "token"}),
    )  # fmt: skip
    assert not any(x.problem.epilogue.swiglu for x in others)
    with pytest.raises(ArgumentError, match="cannot run gemm_swiglu of 64x24576x4096"):
        smkern.explain_gemm_swiglu(64, 12288, 4096, backend="own", out_scale="token", **options)
    with pytest.raises(ArgumentError, match="backend='cutlass': gemm_swiglu with out_scale"):
        smkern.explain_gemm_swiglu(64, 12288, 4096, backend="cutlass", **blocks)
    with pytest.raises(ArgumentError, match=r"out_scale='row': use one of .'token', 'block'"):
        smkern.explain_gemm_swiglu(64, 12288, 4096, dtype=E4M3, out_scale="row")
    with pytest.raises(ArgumentError, match="only e4m3's results have scales"):
        smkern.explain_gemm_swiglu(64, 12288, 4096, out_scale="block")


def test_a_workspace_is_sized_for_every_kernel_that_can_be_asked_for(monkeypatch):
    set_cutlass(monkeypatch, True)
    cut = {"batch_invariant": False, "num_sms": 16}
    for backend in ("own", "ws", "pointer", "cutlass"):
        plain = smkern.gemm_workspace_bytes(64, 24576, 4096, dtype=E4M3, backend=backend, **cut)
        found = smkern.gemm_swiglu_workspace_bytes(
            64, 12288, 4096, dtype=E4M3, backend=backend, **cut
        )
        assert found == plain
    assert smkern.gemm_workspace_bytes(77, 6144, 4096, backend="cutlass") >= 0


def test_an_explanation_says_who_chose():
    options = {"dtype": E4M3, "scales": "block", "num_sms": 24, "confined": "mask"}
    tuned = smkern.explain_gemm(64, 6144, 4096, **options)
    assert (tuned.source, tuned.config.block_k) == ("table", 128)
    assert smkern.explain_gemm(64, 6152, 4096, **options).source == "model"
    assert smkern.explain_gemm(64, 6144, 4096, batch_invariant=True, **options).source == "model"
    assert smkern.explain_gemm(64, 6144, 4096, backend="pointer", **options).source == "forced"
    modelled = smkern.explain_gemm(64, 6144, 4096, backend="model", **options)
    assert (modelled.source, modelled.config.kernel) == ("model", "ws"), "no table"
    whole = {"dtype": E4M3, "num_sms": 132, "confined": "mask"}
    many = smkern.explain_gemm(4096, 6144, 4096, **whole)
    assert (many.source, many.config.kernel) == ("library", "cublaslt")
    own = smkern.explain_gemm(4096, 6144, 4096, backend="own", **whole)
    assert (own.source, own.config.kernel) == ("table", "ws")
    assert many.predicted_us == own.predicted_us, "priced as our own"
    assert smkern.gemm_workspace_bytes(4096, 6144, 4096, dtype=E4M3) > 32 << 20
    assert smkern.explain_gemm(256, 6144, 4096, scales="matrix", **whole).source == "library"
    assert smkern.explain_gemm(256, 6144, 4096, **whole).source == "table"
