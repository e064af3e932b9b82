"""`smkern::gemm` in torch.library, on CPU and fake tensors."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import smkern.ops
from smkern.errors import ArgumentError
from tests.ops.compiled import check_compiled_once

pytestmark = pytest.mark.slow

HALF = torch.bfloat16
OPTIONS = [
    {},
    {"activation": "silu", "num_sms": 3, "static_weights": True},
    {"bias": True, "residual": True, "activation": "gelu", "batch_invariant": True},
]


def call(options):
    a, w, bias, residual = (
        torch.randn(shape).to(HALF) for shape in ((5, 16), (8, 16), (8,), (5, 8))
    )
    known = {"bias": bias, "residual": residual}
    return a, w, options | {name: x for name, x in known.items() if name in options}


@pytest.mark.parametrize("options", OPTIONS)
def test_opcheck_functional(options):
    a, w, made = call(options)
    opcheck(torch.ops.smkern.gemm.default, (a, w), made)


@pytest.mark.parametrize("options", OPTIONS)
def test_opcheck_out(options):
    a, w, made = call(options)
    opcheck(torch.ops.smkern.gemm_out.default, (a, w, torch.empty(5, 8, dtype=HALF)), made)


def test_compiled_without_a_break_and_with_any_budget():
    a, w, made = call({"residual": True})

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def layer(a, w, residual, num_sms):
        x = smkern.ops.gemm(a, w, residual=residual, activation="silu", num_sms=num_sms)
        return smkern.ops.gemm(x, x) + 1

    for num_sms in (None, 4, 77):
        x = smkern.ops.gemm(a, w, residual=made["residual"], activation="silu")
        assert torch.equal(layer(a, w, made["residual"], num_sms), smkern.ops.gemm(x, x) + 1)


def test_compiled_with_out_as_the_residual():
    a, w, made = call({"residual": True})

    @torch.compile(backend="aot_eager", fullgraph=True)
    def layer(a, w, x):
        out = x.clone()
        smkern.ops.gemm(a, w, residual=out, out=out)
        return out

    want = smkern.ops.gemm(a, w, residual=made["residual"])
    assert torch.equal(layer(a, w, made["residual"]), want)


def test_compiled_with_a_workspace():
    a, w, _ = call({})
    room = torch.zeros(1 << 16, dtype=torch.uint8)
    layer = torch.compile(
        lambda a, w, room: smkern.ops.gemm(a, w, workspace=room), backend="aot_eager"
    )
    assert torch.equal(layer(a, w, room), smkern.ops.gemm(a, w))


def test_fake_and_meta_tensors_get_shapes_only():
    with FakeTensorMode():
        got = smkern.ops.gemm(torch.empty(5, 16, dtype=HALF), torch.empty(8, 16, dtype=HALF))
    assert (got.shape, got.dtype) == ((5, 8), HALF)
    made = smkern.ops.gemm(torch.empty(5, 16, device="meta"), torch.empty(8, 16, device="meta"))
    assert made.device.type == "meta"
    assert made.shape == (5, 8)


def test_fake_tensors_are_checked():
    with FakeTensorMode():
        a, w = torch.empty(5, 16, dtype=HALF), torch.empty(8, 15, dtype=HALF)
        with pytest.raises((ArgumentError, RuntimeError)):
            smkern.ops.gemm(a, w)
        with pytest.raises(ArgumentError, match="activation='tanh'"):
            smkern.ops.gemm(a, a, activation="tanh")


def test_under_vmap_and_make_fx_it_is_one_operator():
    from torch.fx.experimental.proxy_tensor import make_fx

    a, w, _ = call({})
    graph = make_fx(lambda a, w: smkern.ops.gemm(a, w))(a, w)
    assert torch.ops.smkern.gemm.default in [node.target for node in graph.graph.nodes]


def test_num_sms_stays_a_number_of_the_graph():
    a, w, _ = call({})
    check_compiled_once(lambda num_sms: smkern.ops.gemm(a, w, num_sms=num_sms))
