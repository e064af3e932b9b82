"""Attention that writes e4m3 and its scales: `out_scale=` on CPU tensors and on a fake device."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import smkern.ops as smkern
from smkern.errors import ArgumentError, DeviceError
from smkern.kernels.attention.args import NUM_ADDRESSES, AttentionArguments
from smkern.kernels.attention.cuda import params_of, variant_of, violations
from smkern.ops.attention.paged import SCALED_ATTENTION
from smkern.ops.operator_eager import EagerOperator
from smkern.tuning.attention.constraints import writes_e4m3
from smkern.tuning.attention.shapes import AttentionConfig, AttentionProblem, AttentionShape
from tests.ops.attention.cases import FP8, NAMES, Case, Made, make
from tests.ops.attention.conftest import FakeDevice, memory
from tests.ops.conftest import streams_of

DECODE = Case(lengths=((1, 37), (1, 5), (1, 0)), head_dim=128)
RAGGED = Case(lengths=((1, 37), (3, 40), (0, 4), (9, 9)), head_dim=128)


def scales_for(made: Made, by_columns: bool = False) -> Tensor:
    """Room for a call's scales, of -1, in a frame of -1."""
    tokens, heads, dim = made.args[0].shape
    frame = torch.full((tokens + 2, heads * dim // 128), -1.0)
    if by_columns:
        frame = torch.full(frame.shape[::-1], -1.0).t()
    return frame[1:-1]


def in_two_passes(made: Made, **options) -> tuple[Tensor, Tensor]:
    out = smkern.paged_attention(*made.args, **(made.options | options))
    return smkern.quantize(out.flatten(1), "block")


def same(found: Tensor, scale: Tensor, wanted: tuple[Tensor, Tensor]) -> None:
    assert found.dtype is FP8
    assert torch.equal(found.flatten(1).view(torch.uint8), wanted[0].view(torch.uint8))
    assert torch.equal(scale.nan_to_num(-2.0), wanted[1].nan_to_num(-2.0))


CASES = [
    DECODE,
    RAGGED,
    replace(RAGGED, head_dim=64, flat=True),
    replace(RAGGED, head_dim=256, dtype=torch.bfloat16, options={"window": 3, "softcap": 2.0}),
    replace(RAGGED, dtype=torch.float32, cache_dtype=FP8, options={"v_scale": 0.01}),
]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("by_columns", [False, True])
def test_bits_are_those_of_two_passes(case: Case, by_columns: bool):
    made = make(case)
    wanted, scale = in_two_passes(made), scales_for(made, by_columns)
    same(smkern.paged_attention(*made.args, **made.options, out_scale=scale), scale, wanted)
    assert int((scale._base == -1).sum()) == 2 * scale.shape[1]
    into = torch.full(made.args[0].shape, math.nan).to(FP8)
    got, lse = smkern.paged_attention(
        *made.args, **made.options, out=into, out_scale=scale, return_lse=True, check=True
    )
    assert got is into
    same(got, scale, wanted)
    assert torch.equal(lse, smkern.paged_attention(*made.args, **made.options, return_lse=True)[1])


def test_groups_of_zeros_and_of_what_is_not_finite():
    """Two requests without keys; values of another are infinite in one head's second block."""
    made = make(replace(DECODE, head_dim=256, lengths=((1, 37), (1, 0), (1, 0), (1, 20))))
    v_cache, table = made.args[2], made.args[3]
    v_cache[table[3, 0].long(), :, 1, 200] = math.inf
    scale = scales_for(made)
    out = smkern.paged_attention(*made.args, out_scale=scale)
    assert torch.equal(scale[1:3], torch.ones(2, 8))
    assert not out[1:3].float().any()
    bad = torch.zeros(4, 8, dtype=torch.bool)
    bad[3, [5, 7]] = True  # of heads 2 and 3, which read KV head 1
    assert torch.equal(scale.isnan(), bad)
    assert torch.equal(out.float().isnan().view(4, 8, 128), bad[:, :, None].expand(4, 8, 128))


def test_tokens_of_no_request_keep_what_they_hold():
    made = make(RAGGED)
    q = torch.cat([made.args[0], torch.zeros(3, *made.args[0].shape[1:]).half()])
    args, scale = (q, *made.args[1:]), torch.full((len(q), 4), -1.0)
    out = torch.full(q.shape, 7.0).to(FP8)
    smkern.paged_attention(*args, **made.options, out=out, out_scale=scale)
    assert bool((out[-3:].float() == 7).all())
    assert bool((scale[-3:] == -1).all())
    assert bool((scale[:-3] > 0).all())


def test_heads_that_write_it():
    assert writes_e4m3(32, 8, 128)
    assert writes_e4m3(5, 5, 256)
    assert writes_e4m3(8, 4, 64)
    for heads in ((5, 5, 64), (6, 2, 64), (8, 4, 96)):
        assert not writes_e4m3(*heads)


BAD = [
    ({"head_dim": 96}, (3, 3), r"4 heads of 96 on 2 KV heads.*call smkern\.quantize"),
    ({"head_dim": 64, "kv_heads": 4}, (3, 2), "4 heads of 64 on 4 KV heads: 128 columns must be"),
    ({}, (3,), r"out_scale has shape \[3\], wanted \[3, 4\].*smkern\.quantize\(x, 'token'\)"),
    ({}, (4, 4), r"out_scale has shape \[4, 4\], wanted \[3, 4\]"),
    ({}, (3, 2), r"wanted \[3, 4\]"),
]


@pytest.mark.parametrize(("case", "shape", "message"), BAD)
def test_scales_that_cannot_be(case, shape, message):
    made = make(replace(DECODE, **case))
    with pytest.raises(ArgumentError, match=message):
        smkern.paged_attention(*made.args, out_scale=torch.zeros(shape))


OTHERS = [
    ({"out_scale": torch.zeros(3, 4).half()}, "out_scale is torch.float16, wanted torch.float32"),
    ({"out_scale": [1.0]}, "out_scale is list"),
    ({"out_scale": torch.zeros(3, 8)[:, ::2]}, r"out_scale has strides \(8, 2\)"),
    ({"out_scale": torch.zeros(1, 4).expand(3, 4)}, "out_scale has strides"),
    ({"out_scale": torch.zeros(3, 4, device="meta")}, "out_scale is on meta"),
    ({"out_scale": torch.zeros(3, 4), "out": torch.zeros(3, 4, 128).half()}, "out is .*float16"),
    ({"out": torch.zeros(3, 4, 128).to(FP8)}, "out is .*float8_e4m3fn, the result is .*float16"),
]


@pytest.mark.parametrize(("bad", "message"), OTHERS)
def test_named_errors(bad, message):
    with pytest.raises(ArgumentError, match=message):
        smkern.paged_attention(*make(DECODE).args, **bad)


def test_results_that_overlap():
    room = torch.zeros(3 * 4 * 128, dtype=torch.uint8)
    out, scale = room.view(FP8).view(3, 4, 128), room[:48].view(torch.float32).view(3, 4)
    with pytest.raises(ArgumentError, match="overlaps"):
        smkern.paged_attention(*make(DECODE).args, out=out, out_scale=scale)


def test_an_odd_group_of_heads_is_not_warmed():
    with pytest.raises(ArgumentError, match="3 heads of 64 on 1 KV heads"):
        smkern.AttentionCalls(3, 1, 64, 16, out_scale=True)
    (problem,) = smkern.AttentionCalls(2, 1, 64, 16, out_scale=True).problems()
    assert problem.scaled


@pytest.mark.slow
def test_compiled_functions():
    made = make(DECODE)
    wanted = in_two_passes(made)
    given = [*made.args, torch.zeros(3, 4)]
    functional, into = (
        torch.ops.smkern.scaled_paged_attention,
        torch.ops.smkern.scaled_paged_attention_out,
    )
    # torch's check of schemas multiplies what it compares, which it cannot do in e4m3
    opcheck(functional.default, given, test_utils=("test_faketensor", "test_autograd_registration"))
    opcheck(into.default, [*given, torch.zeros(3, 4, 128).to(FP8)], test_utils="test_faketensor")

    @torch.compile(backend="aot_eager")
    def run(q: Tensor, scale: Tensor) -> Tensor:
        return smkern.paged_attention(q, *made.args[1:], out_scale=scale)

    scale = torch.zeros(3, 4)
    same(run(made.args[0], scale), scale, wanted)


class TestLaunch:
    """What a GPU's launch is given."""

    SHAPE = AttentionShape(3, 4, 2, 128, 16, 1, 64, 3, 192)
    CONFIG = AttentionConfig("cuda")

    def arguments(self, out_stride: int, scale_steps: tuple[int, int]) -> AttentionArguments:
        strides = ((512, 128), (out_stride, 128), *[(4096, 256, 128)] * 2)
        sizes = (*strides, 4, 4, 9, 3, 0.1, 0.0, 1.0, 1.0, scale_steps)
        return AttentionArguments.of([0] * NUM_ADDRESSES, sizes)

    def call(self, device: FakeDevice, made: Made, scale: Tensor) -> Tensor:
        eager = EagerOperator(SCALED_ATTENTION, -1, device.dispatcher, streams_of(device))
        call = dict.fromkeys(SCALED_ATTENTION.call._fields) | {"causal": True, "check": False}
        call |= dict(zip(NAMES, made.args, strict=True)) | made.options
        call |= {"return_lse": False, "out_scale": scale}
        return eager(SCALED_ATTENTION.call(**call))[0]

    def test_scales_and_their_steps(self, device: FakeDevice, monkeypatch: pytest.MonkeyPatch):
        """Also behind a plan that the call makes itself; the kernel is the one that scales."""
        found = []

        def prepare(problem, config, budget, aligned=True):
            def bind(sizes):
                def launch(stream: int, *addresses: int) -> None:
                    args = AttentionArguments.of(addresses[:NUM_ADDRESSES], sizes)
                    found.append((problem, args, addresses[NUM_ADDRESSES:]))
                    memory(addresses[-1], (3, 4), args.scale_steps, torch.float32).fill_(3.0)

                return launch

            return bind

        monkeypatch.setattr(device.kernels, "prepare", prepare)
        for by_columns in (False, True):
            made = make(DECODE)
            scale = scales_for(made, by_columns)
            assert self.call(device, made, scale).dtype is FP8
            ((problem, args, behind),) = found
            assert problem.scaled
            assert args.scale_steps == scale.stride()
            assert args.out_strides == (512, 128)
            assert len(behind) == 4
            assert bool((scale == 3).all())
            found.clear()

    def test_a_gpu_without_e4m3(self, make_device: type[FakeDevice]):
        made = make(DECODE)
        with pytest.raises(DeviceError, match=r"8\.0 has no e4m3"):
            self.call(make_device((8, 0)), made, scales_for(made))

    def test_the_kernels_parameters(self):
        """Scales follow what all kernels take, and have a variant of their own."""
        plain = AttentionProblem(self.SHAPE)
        scaled = replace(plain, scaled=True)
        args = self.arguments(512, (12, 3))
        short, long = params_of(plain, args), params_of(scaled, args)
        assert long[: len(short)] == short
        assert memory_words(long[len(short) :]) == [0, 12, 3]
        assert "OUT8=1" in variant_of(scaled, self.CONFIG, 90).defines
        assert "OUT8=0" in variant_of(plain, self.CONFIG, 90).defines

    @pytest.mark.parametrize(("stride", "served"), [(512, True), (528, True), (520, False)])
    def test_rows_of_whole_16_bytes(self, stride: int, served: bool):
        """Elements are bytes: 8 of them are no whole vector, as they are in 16 bits."""
        problem = AttentionProblem(self.SHAPE, scaled=True)
        args = self.arguments(stride, (4, 1))
        assert (not violations(args, problem)) == served
        assert not violations(args, replace(problem, scaled=False))


def memory_words(raw: bytes) -> list[int]:
    return [int.from_bytes(raw[at : at + 8], "little") for at in range(0, len(raw), 8)]
