"""Bits that do not move: with the batch, the budget, the place of a row, or a neighbour."""

from __future__ import annotations

import torch

import smkern
from tests.gpu.sides import sides

SHAPES = [(512, 1024), (776, 4096)]


def _inputs(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16):
    return (
        torch.randn(m, k, device="cuda").to(dtype),
        torch.randn(n, k, device="cuda").to(dtype),
        torch.randn(n, device="cuda").to(dtype),
    )


def _differences(a, w, bias, want, rows, budgets) -> int:
    """How many (rows, budget) calls gave other bits than `want`."""
    found = torch.zeros((), dtype=torch.int64, device="cuda")
    out = torch.empty_like(want)
    for m in rows:
        for num_sms in budgets:
            part = out[:m]
            smkern.gemm(
                a[:m], w, bias=bias, activation="silu", out=part, batch_invariant=True,
                num_sms=num_sms,
            )  # fmt: skip
            found += (part != want[:m]).any()
    return int(found)


def test_every_batch_and_budget_gives_the_same_bits():
    every, some = range(1, 257), (1, 2, 8, 17, 64, 77, 128, 200, 256)
    for (n, k), rows in zip(SHAPES, (every, some), strict=True):
        a, w, bias = _inputs(256, n, k)
        want = smkern.gemm(a, w, bias=bias, activation="silu", batch_invariant=True)
        assert torch.isfinite(want).all()
        assert not _differences(a, w, bias, want, rows, range(8, 133, 4))


def test_shapes_that_have_tuned_cells_give_the_same_bits_too():
    a = torch.randn(256, 14336, device="cuda").bfloat16()
    w = torch.randn(4096, 14336, device="cuda").bfloat16()
    want = smkern.gemm(a, w, batch_invariant=True)
    differ = torch.zeros((), dtype=torch.int64, device="cuda")
    with smkern.ladder([16, 32, 48, 60]) as ladder:
        for side in (side for split in ladder for side in split):
            torch.cuda.synchronize()
            with side:
                for m in range(1, 257):
                    differ += (smkern.gemm(a[:m], w, batch_invariant=True) != want[:m]).any()
            side.synchronize()
    for m in range(1, 257):
        differ += (smkern.gemm(a[:m], w, batch_invariant=True) != want[:m]).any()
    assert int(differ) == 0


def test_large_batches_too():
    a, w, bias = _inputs(2048, 512, 1024, torch.float16)
    want = smkern.gemm(a, w, bias=bias, activation="silu", batch_invariant=True)
    assert not _differences(a, w, bias, want, (1, 256, 300, 1000, 2048), (8, 60, 132))


def test_a_rows_place_does_not_matter():
    a, w, _ = _inputs(200, 776, 4096)
    want = smkern.gemm(a, w, batch_invariant=True)
    order = torch.randperm(200, device="cuda")
    assert torch.equal(smkern.gemm(a[order], w, batch_invariant=True), want[order])


def test_partitions_give_the_same_bits():
    a, w, _ = _inputs(100, 776, 4096)
    want = smkern.gemm(a, w, batch_invariant=True)
    for partition in sides():
        torch.cuda.synchronize()
        with partition:
            got = smkern.gemm(a, w, batch_invariant=True)
        torch.cuda.synchronize()
        assert torch.equal(got, want)
        del got


def test_alone_and_beside_a_neighbour_bit_for_bit():
    """Every call, batch-invariant or not: the same plan sums in the same order."""
    shapes = [(8, 6144, 4096), (64, 4096, 14336), (512, 4096, 4096), (1000, 6144, 4096)]
    noise = torch.randn(4096, 4096, device="cuda").bfloat16()
    with smkern.ladder([32]) as ladder:
        split = ladder.split(decode=32)
        for m, n, k in shapes:
            a, w, _ = _inputs(m, n, k)
            outs = [torch.empty(m, n, dtype=a.dtype, device="cuda") for _ in range(4)]
            torch.cuda.synchronize()
            with split.decode:
                smkern.gemm(a, w, out=outs[0])
            torch.cuda.synchronize()
            with split.prefill:
                busy = [noise @ noise for _ in range(20)]
            with split.decode:
                for out in outs[1:]:
                    smkern.gemm(a, w, out=out)
            torch.cuda.synchronize()
            assert all(torch.equal(out, outs[0]) for out in outs[1:])
            del busy
