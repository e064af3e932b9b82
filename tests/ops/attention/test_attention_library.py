"""`smkern::paged_attention` in torch.library, on CPU and fake tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import smkern.ops as smkern
from smkern.errors import ArgumentError
from tests.ops.attention.cases import FP8, SIZES, Case, make
from tests.ops.compiled import check_compiled_once

pytestmark = pytest.mark.slow

DECODE = Case(lengths=((1, 37), (1, 5), (1, 20)))
RAGGED = Case(lengths=((1, 37), (3, 40), (9, 9)))
CASES = [
    DECODE,
    replace(RAGGED, flat=True, options={"sinks": True, "softcap": 3.0, "num_sms": 3}),
    replace(DECODE, options={"window": 4, "causal": False, "scale": 0.3}),
]


def prepared(case):
    """A call whose caches hold no NaN: opcheck compares inputs with equality."""
    made = make(case)
    q, k_cache, v_cache, *rest = made.args
    caches = [x.float().nan_to_num(1.0).to(x.dtype) for x in (k_cache, v_cache)]
    return (q, *caches, *rest), made.options


def plan_of(args, options, **more):
    named = {name: options[name] for name in ("cu_q_lens", "max_q_len", "num_sms", "window",
                                              "causal") if name in options}  # fmt: skip
    return smkern.plan_attention(args[4], **SIZES, **named, **more)


def planned(args, options):
    plan = plan_of(args, options)
    return options | {
        "plan_buffer": plan.buffer,
        "plan_workspace": plan.workspace,
        "plan_numbers": plan.numbers,
    }


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("return_lse", [True, False])
def test_opcheck_functional(case, return_lse):
    args, options = prepared(case)
    options["return_lse"] = return_lse
    opcheck(torch.ops.smkern.paged_attention.default, args, options)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("with_lse", [True, False])
def test_opcheck_out(case, with_lse):
    args, options = prepared(case)
    out = torch.zeros_like(args[0])
    options["lse"] = torch.zeros(args[0].shape[:2]) if with_lse else None
    opcheck(torch.ops.smkern.paged_attention_out.default, (*args, out), options)


@pytest.mark.parametrize("case", CASES[:2])
def test_opcheck_with_a_plan(case):
    args, options = prepared(case)
    opcheck(torch.ops.smkern.paged_attention.default, args, planned(args, options))


def test_opcheck_merge_states():
    outs, lses = torch.randn(2, 3, 4, 64), torch.randn(2, 3, 4)
    opcheck(torch.ops.smkern.merge_states.default, (outs, lses), {"num_sms": 4})
    places = torch.zeros(3, 4, 64), torch.zeros(3, 4)
    opcheck(torch.ops.smkern.merge_states_out.default, (outs, lses, *places))


@pytest.mark.parametrize("ragged", [True, False])
def test_opcheck_plan(ragged):
    args, options = prepared(RAGGED if ragged else DECODE)
    plan = plan_of(args, options | {"num_sms": 3})
    given = (args[4], options.get("cu_q_lens"))
    opcheck(torch.ops.smkern.plan_attention.default, given, {"numbers": plan.numbers})
    buffers = (torch.zeros_like(plan.buffer), torch.zeros_like(plan.workspace))
    opcheck(
        torch.ops.smkern.plan_attention_out.default, (*given, *buffers), {"numbers": plan.numbers}
    )
    buffer, _ = torch.ops.smkern.plan_attention(*given, numbers=plan.numbers)
    assert torch.equal(buffer, plan.buffer)


@pytest.mark.parametrize("num_sms", [3, None])
def test_a_step_with_its_plan_compiles(num_sms):
    """A given budget stays in the graph; the stream's is read outside of it."""
    args, options = prepared(RAGGED)

    @torch.compile(backend="aot_eager", fullgraph=num_sms is not None)
    def step(args, options, out):
        plan = plan_of(args, options | {"num_sms": num_sms})
        x = smkern.paged_attention(*args, **options, plan=plan, num_sms=num_sms)
        plan = plan_of(args, options | {"num_sms": num_sms}, out=out)
        return plan, x, smkern.paged_attention(*args, **options, plan=plan, num_sms=num_sms)

    kept = plan_of(args, options | {"num_sms": num_sms})
    want_buffer = kept.buffer.clone()
    kept.buffer.zero_()
    plan, x, y = step(args, options, kept)
    want = smkern.paged_attention(*args, **options)
    assert torch.equal(x, want)
    assert torch.equal(y, want)
    assert plan.buffer is kept.buffer
    assert torch.equal(kept.buffer, want_buffer)


def test_it_is_what_the_public_operator_runs():
    args, options = prepared(CASES[1])
    want, want_lse = smkern.paged_attention(*args, **options, return_lse=True)
    out, lse = torch.ops.smkern.paged_attention(*args, **planned(args, options), return_lse=True)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
    out, lse = torch.ops.smkern.paged_attention(*args, **options)
    assert torch.equal(out, want)
    assert lse.numel() == 0


@pytest.mark.parametrize("with_plan", [True, False])
def test_compiled_without_a_break(with_plan):
    args, options = prepared(replace(RAGGED, cache_dtype=FP8))
    options |= {"k_scale": 0.5, "v_scale": torch.tensor([2.0])}
    plan = plan_of(args, options) if with_plan else None

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def layers(args, options, plan):
        x, lse = smkern.paged_attention(*args, **options, plan=plan, return_lse=True)
        y = smkern.paged_attention(x, *args[1:], **options, plan=plan)
        return y + 1, lse

    x, want_lse = smkern.paged_attention(*args, **options, return_lse=True)
    want = smkern.paged_attention(x, *args[1:], **options) + 1
    got, lse = layers(args, options, plan)
    assert torch.equal(got, want)
    assert torch.equal(lse, want_lse)


def test_compiled_into_given_places():
    args, options = prepared(DECODE)
    out, lse = torch.zeros_like(args[0]), torch.zeros(3, 4)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def layer(out, lse):
        smkern.paged_attention(*args, **options, out=out, lse=lse)
        return smkern.merge_states(torch.stack([out, out]), torch.stack([lse, lse]))

    merged, _ = layer(out, lse)
    want, want_lse = smkern.paged_attention(*args, **options, return_lse=True)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
    torch.testing.assert_close(merged, want)


def test_num_sms_stays_a_number_of_the_graph():
    args, _ = prepared(DECODE)
    check_compiled_once(lambda num_sms: smkern.paged_attention(*args, num_sms=num_sms))


def test_fake_and_meta_tensors_get_shapes_only():
    args, options = prepared(DECODE)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = [torch.empty(x.shape, dtype=x.dtype) for x in args]
        out, lse = smkern.paged_attention(*fakes, **options, return_lse=True)
        assert (out.shape, lse.shape, lse.dtype) == ((3, 4, 64), (3, 4), torch.float32)
        with pytest.raises((ArgumentError, RuntimeError)):
            smkern.paged_attention(torch.empty(3, 4, 96).half(), *fakes[1:])
        with pytest.raises(ArgumentError, match="backend='fa3'"):
            smkern.paged_attention(*fakes, backend="fa3")
        plan = plan_of(fakes, options)
        assert plan.buffer.shape == plan_of(args, options).buffer.shape
        merged, _ = smkern.merge_states(torch.empty(2, 3, 4, 64), torch.empty(2, 3, 4))
        assert merged.shape == (3, 4, 64)
    metas = [x.to("meta") for x in args]
    assert smkern.paged_attention(*metas, **options).device.type == "meta"


def test_under_make_fx_it_is_one_operator():
    from torch.fx.experimental.proxy_tensor import make_fx

    args, options = prepared(DECODE)
    graph = make_fx(lambda q: smkern.paged_attention(q, *args[1:], **options))(args[0])
    assert torch.ops.smkern.paged_attention.default in [node.target for node in graph.graph.nodes]
