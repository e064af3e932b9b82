"""Attention that writes e4m3 has the bits of attention that is quantized afterwards."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import smkern
from smkern.errors import WarmupError
from tests.gpu.attention.cases import DEVICE, GUARD, Case, Step, fresh_seed, make_step
from tests.gpu.attention.support import (
    BACKENDS,
    MIXED,
    RAGGED,
    attend,
    counters_are_zero,
    make_plan,
    poison_partials,
)
from tests.gpu.attention.test_graphs import CHUNKS, DECODE, VERIFY, Replayed, lengths
from tests.gpu.attention.truth import check, tolerance, truth

FP8 = torch.float8_e4m3fn
POISON = 0x7F
CASES = [
    Case(kv_lens=RAGGED),
    Case(kv_lens=(0, 300, 0, 5000), fp8=True, scales="tensor"),
    Case(kv_lens=(70, 5, 600), q_lens=(8, 1, 2)),
    Case(kv_lens=(300, 17, 2500), head_dim=256),
    Case(kv_lens=(300, 17, 2500), head_dim=64, fp8=True),
    Case(kv_lens=(300, 17, 2500), q_lens=(8, 3, 1), q_heads=12, kv_heads=2, head_dim=64),
    Case(kv_lens=(300, 17), q_heads=5, kv_heads=1, dtype="fp16"),
    Case(kv_lens=(40_000, 33_000, 300), head_dim=64, q_heads=4, kv_heads=1),
    MIXED,
    replace(MIXED, head_dim=64, dtype="fp16"),
    replace(MIXED, head_dim=256),
    replace(MIXED, fp8=True),
    replace(MIXED, q_heads=6, kv_heads=2, window=100, softcap=5.0, sinks=True),
    Case(kv_lens=(1700, 256, 2048, 333), q_lens=(130, 128, 64, 9)),
    Case(kv_lens=(20_000, 9000), q_lens=(40, 130), head_dim=64, q_heads=4, kv_heads=1),
    Case(kv_lens=(20_000, 9000), q_lens=(40, 130), q_heads=4, kv_heads=1, page_size=1),
]
UNSEEN = Case(kv_lens=(20, 30), head_dim=256, q_heads=8, kv_heads=1, dtype="fp16", scaled=True)
"""A variant that no other test loads."""
COMPILED = [
    (replace(case, scaled=True), backend)
    for case in (*CASES, DECODE, VERIFY, CHUNKS, UNSEEN)
    for backend in BACKENDS
]


@dataclass(frozen=True, slots=True)
class Scaled:
    """Room for a result in frames of poison: e4m3's NaN, and -1 as scales."""

    out: Tensor
    scale: Tensor
    frame: Tensor
    scale_frame: Tensor

    @classmethod
    def of(cls, step: Step, padding: int = 0, by_columns: bool = False) -> Scaled:
        """`padding`: bytes between tokens."""
        tokens, heads, dim = step.q.shape
        rows = tokens + 2 * GUARD
        frame = torch.full((rows, heads * dim + padding), POISON, dtype=torch.uint8, device=DEVICE)
        columns = heads * dim // 128
        shape = (columns, rows) if by_columns else (rows, columns)
        scales = torch.full(shape, -1.0, device=DEVICE)
        scales = scales.t() if by_columns else scales
        out = frame.view(FP8)[GUARD:-GUARD, : heads * dim].unflatten(1, (heads, dim))
        return cls(out, scales[GUARD:-GUARD], frame, scales)

    def poison(self) -> None:
        self.frame.fill_(POISON)
        self.scale_frame.fill_(-1.0)

    def bytes_of(self, owned: int) -> tuple[Tensor, Tensor]:
        return self.out[:owned].flatten(1).view(torch.uint8), self.scale[:owned]


def run_scaled(step: Step, into: Scaled, **options: Any) -> Tensor:
    """The scaled call; its log-sum-exps."""
    got, lse = smkern.paged_attention(
        step.q, step.k_cache, step.v_cache, step.page_table, step.kv_lens, out=into.out,
        out_scale=into.scale, return_lse=True, **(step.options() | options),
    )  # fmt: skip
    assert got is into.out
    return lse


def compare(step: Step, into: Scaled) -> None:
    """Against a step's 16-bit outputs; poison must be where nobody has to write."""
    owned, columns = sum(step.case.queries), step.out[0].numel()
    if owned:
        values, scales = smkern.quantize(step.out[:owned].flatten(1), "block")
        found, found_scales = into.bytes_of(owned)
        assert torch.equal(found_scales.isnan(), scales.isnan())
        assert torch.equal(found_scales.nan_to_num(-2.0), scales.nan_to_num(-2.0))
        different = (found != values.view(torch.uint8)).nonzero()
        assert not len(different), f"{step.case}: {len(different)} bytes, first {different[0]}"
    mask = torch.ones_like(into.frame, dtype=torch.bool)
    mask[GUARD : GUARD + owned, :columns] = False
    assert bool((into.frame[mask] == POISON).all()), f"{step.case}: wrote outside of its output"
    outside = torch.cat([into.scale_frame[:GUARD], into.scale_frame[GUARD + owned :]])
    assert bool((outside == -1).all()), f"{step.case}: wrote outside of its scales"


def scaled_attention(step: Step, **options: Any) -> None:
    """Run a step, whose 16-bit output is there, in e4m3, with its own plan and without."""
    into = Scaled.of(step)
    plan = make_plan(step)
    for plans in ({"plan": plan}, {}):
        into.poison()
        lse = run_scaled(step, into, **plans, **options)
        compare(step, into)
        owned = sum(step.case.queries)
        assert torch.equal(lse[:owned], step.lse[:owned])
    torch.cuda.synchronize()
    assert counters_are_zero(plan)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bits_are_those_of_two_passes(case: Case, backend: str):
    step = make_step(case)
    attend(step, backend=backend)
    check(step)
    scaled_attention(step, backend=backend)


@pytest.mark.parametrize("case", [CASES[0], CASES[4], MIXED], ids=str)
def test_values_against_float64(case: Case):
    """Half a step of e4m3, 2^-4 of a value or 2^-10 of its scale, beside what 16 bits are off."""
    step = make_step(case)
    into = Scaled.of(step)
    run_scaled(step, into)
    owned, want = sum(case.queries), truth(step)
    wide = into.scale.double().repeat_interleave(128, 1).view(step.q.shape)[:owned]
    found, right = into.out[:owned].float().double() * wide, want.out[:owned]
    room = 1.01 * torch.maximum(right.abs() / 16, wide / 1024)
    assert bool(((found - right).abs() <= room + 2 * tolerance(want, step.q.dtype)[:owned]).all())


@pytest.mark.parametrize("padding", [16, 8, 5])
@pytest.mark.parametrize("case", [CASES[0], MIXED], ids=str)
def test_rows_apart_and_scales_by_columns(case: Case, padding: int):
    """16 bytes between rows suit the CUDA kernels; else Triton's stand in, with bits of theirs."""
    step = make_step(case)
    attend(step, backend=None if padding == 16 else "triton")
    into = Scaled.of(step, padding, by_columns=True)
    run_scaled(step, into)
    compare(step, into)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [Case(kv_lens=(0, 40, 700)), MIXED], ids=str)
def test_what_is_not_finite_spoils_its_block_alone(case: Case, backend: str):
    """An infinite value of one dim of KV head 1 that all rows of the second request see."""
    step = make_step(case)
    step.v_cache[step.page_table[1, 0].long(), 0, 1, 77] = float("inf")
    attend(step, backend=backend)
    into = Scaled.of(step)
    run_scaled(step, into, backend=backend)
    compare(step, into)
    start = sum(case.queries[:1])
    rows = slice(start, start + case.queries[1])
    assert bool(into.scale[rows, 4:].isnan().all())
    assert bool(into.scale[rows, :4].isfinite().all())
    others = torch.cat([into.scale[: rows.start], into.scale[rows.stop : sum(case.queries)]])
    assert bool(others.isfinite().all())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [DECODE, VERIFY, CHUNKS], ids=["decode", "verify", "chunks"])
def test_one_graph_serves_changing_lengths(case: Case, backend: str):
    chance = random.Random(fresh_seed())
    replayed = Replayed.of(case)
    step = replayed.step
    replayed.fill_queries()
    plan = make_plan(step)
    into = Scaled.of(step)
    attend(step, plan=plan, backend=backend)
    run_scaled(step, into, plan=plan, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert make_plan(step, out=plan) is plan
        attend(step, plan=plan, backend=backend)
        run_scaled(step, into, plan=plan, backend=backend)
    for _ in range(6):
        replayed.set(*lengths(chance, case))
        into.poison()
        poison_partials(plan)
        graph.replay()
        check(step)
        compare(step, into)
        assert counters_are_zero(plan)


def test_budgets_and_partitions_give_the_same_bits():
    step = make_step(MIXED)
    into = Scaled.of(step)
    run_scaled(step, into)
    wanted = [x.clone() for x in (into.frame, into.scale_frame)]
    w = torch.randn(256, step.out[0].numel(), device=DEVICE, dtype=step.q.dtype)
    weight, w_scale = smkern.quantize(w, "weight_block")
    owned = sum(MIXED.queries)
    rows, scale = into.out.flatten(1)[:owned], into.scale[:owned]
    product = smkern.gemm(rows, weight, a_scale=scale, w_scale=w_scale, static_weights=True)

    def same() -> bool:
        found = (into.frame, into.scale_frame)
        return all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))

    for num_sms in (1, 7, 16):
        into.poison()
        run_scaled(step, into, num_sms=num_sms)
        assert same()
    with smkern.ladder([24]) as ladder:
        for place in ladder.split(decode=24):
            torch.cuda.synchronize()
            with place:  # the product overlaps the attention before it
                for _ in range(10):
                    into.poison()
                    run_scaled(step, into)
                    after = smkern.gemm(
                        rows, weight, a_scale=scale, w_scale=w_scale, static_weights=True
                    )
            place.synchronize()
            assert same()
            torch.testing.assert_close(after, product, rtol=2e-2, atol=2e-2)


def test_a_capture_needs_a_warmup():
    """Of the kernel that scales: that the others are there does not help."""
    case = UNSEEN
    step = make_step(case)
    into = Scaled.of(step)
    attend(step)
    plan = make_plan(step)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(WarmupError, match=r"smkern.warmup"), torch.cuda.graph(graph):
        run_scaled(step, into, plan=plan)
    torch.cuda.synchronize()
    calls = smkern.AttentionCalls(
        case.q_heads, case.kv_heads, case.head_dim, case.page_size, dtype=step.q.dtype,
        out_scale=True,
    )  # fmt: skip
    smkern.warmup(attention=[calls], budgets=[132], progress=False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_scaled(step, into, plan=plan)
    into.poison()
    graph.replay()
    compare(step, into)
