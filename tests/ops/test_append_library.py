"""The append operators on CPU tensors, in torch.library, on fake tensors and compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import smkern.ops as smkern
from smkern.errors import ArgumentError
from smkern.ops.reference import append as reference
from smkern.rope import Rope
from tests.ops.append_cases import ALL, DECODE, FP8, Case, check_caches, make, plain_options

pytestmark = pytest.mark.slow

CASES = {
    "decode": DECODE,
    "all": ALL,
    "flat": replace(ALL, flat=True, options={"eps": 1e-3, "num_sms": 3}),
    "heads-first": replace(ALL, heads_first=True, dtype=torch.bfloat16),
    "interleaved": replace(ALL, rope=Rope(32, interleaved=True)),
    "fp32": replace(ALL, dtype=torch.float32),
    "fp8": replace(ALL, cache_dtype=FP8, options={"k_scale": 0.5, "v_scale": torch.tensor([3.0])}),
    "positions": replace(ALL, options={"positions": torch.arange(13)}),
    "256": replace(ALL, head_dim=256, page_size=1),
}
EACH = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def twins(case: Case):
    """The same call twice, over caches of their own."""
    torch.manual_seed(3)
    first = make(case)
    torch.manual_seed(3)
    return first, make(case)


@EACH
def test_cpu_tensors_run_the_reference(case):
    (args, options), (same, _) = twins(case)
    out = smkern.qk_norm_rope_append(*args, **options, check=True)
    known = {name: x for name, x in options.items() if name != "num_sms"}
    want = reference.qk_norm_rope_append(*same, **known)
    assert torch.equal(out, want)
    check_caches(args, same)


@EACH
def test_plain_append(case):
    (args, options), (same, _) = twins(case)
    assert smkern.append_kv(*args[1:], **plain_options(options), check=True) is None
    known = {name: x for name, x in plain_options(options).items() if name != "num_sms"}
    reference.append_kv(*same[1:], **known)
    check_caches(args, same)


@EACH
def test_into_and_in_place(case):
    (args, options), (same, _) = twins(case)
    q = args[0].clone()
    out = torch.full_like(q, torch.nan)
    assert smkern.qk_norm_rope_append(*args, **options, out=out) is out
    assert torch.equal(args[0], q)
    assert smkern.qk_norm_rope_append(*same, **options, out=same[0]) is same[0]
    assert torch.equal(same[0], out)
    assert torch.equal(same[1], args[1])


def library_options(options):
    found = dict(options)
    for name in ("k_scale", "v_scale"):
        if isinstance(found.get(name), torch.Tensor):
            found[f"{name}_tensor"] = found.pop(name)
    return found


@pytest.mark.parametrize(
    "case",
    [
        DECODE,
        replace(CASES["flat"], options=CASES["flat"].options | CASES["positions"].options),
        replace(CASES["heads-first"], rope=CASES["interleaved"].rope),
    ],
    ids=["decode", "flat-positions", "heads-first-interleaved"],
)  # not of fp8: torch cannot compare it
def test_opcheck(case):
    args, options = make(replace(case, fill=0.0))
    options = library_options(options)
    operators = torch.ops.smkern
    opcheck(operators.qk_norm_rope_append.default, args, options)
    out = torch.zeros_like(args[0])
    opcheck(operators.qk_norm_rope_append_out.default, (*args, out), options)
    args = (args[0].clone(), *args[1:])
    opcheck(operators.qk_norm_rope_append_.default, args, options)
    plain = {x: y for x, y in options.items() if x in ("k_scale_tensor", "v_scale_tensor")}
    opcheck(operators.append_kv.default, args[1:], plain | plain_options(options))


@pytest.mark.parametrize("place", ["new", "out", "in-place"])
def test_compiled_without_a_break(place):
    (args, options), (same, _) = twins(replace(ALL, fill=0.0))

    def layer(q, k, v, k_cache, v_cache, table, kv_lens):
        q = 2 * q
        out = {"new": None, "out": torch.empty_like(q), "in-place": q}[place]
        got = smkern.qk_norm_rope_append(
            q, k, v, k_cache, v_cache, table, kv_lens, **options, out=out
        )
        return got + 1

    want = layer(*same)
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(*args)
    assert torch.equal(got, want)
    check_caches(args, same)


def test_compiled_over_halves_of_one_buffer_and_of_one_matrix():
    args, options = make(replace(ALL, fill=0.0))
    pages, *rest = args[3].shape
    qkv, both = torch.randn(13, 8, 64).half(), torch.zeros(pages, 2, *rest).half()

    def layer(qkv, both, table, kv_lens):
        q, k, v = (2 * qkv).split([4, 2, 2], 1)
        k_cache, v_cache = both.unbind(1)
        q = smkern.qk_norm_rope_append(q, k, v, k_cache, v_cache, table, kv_lens, **options, out=q)
        smkern.append_kv(k, v, v_cache, k_cache, table, kv_lens, cu_q_lens=options["cu_q_lens"])
        return q + 1

    same = both.clone()
    want = layer(qkv, same, *args[5:])
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(qkv, both, *args[5:])
    assert torch.equal(got, want)
    assert torch.equal(both, same)


def test_fake_tensors_know_the_shape():
    args, options = make(ALL)
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(x) for x in args]
    known = {
        name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x
        for name, x in options.items()
    }
    with mode:
        out = smkern.qk_norm_rope_append(*fakes, **known)
        assert out.shape == args[0].shape
        assert smkern.append_kv(*fakes[1:], **plain_options(known)) is None
        with pytest.raises(ArgumentError, match="k has 1 heads of 64, the caches 2 of 64"):
            smkern.append_kv(*(x[:, :1] for x in fakes[1:3]), *fakes[3:], **plain_options(known))


def test_nothing_to_append():
    empty = Case(requests=())
    args, options = make(empty)
    out = smkern.qk_norm_rope_append(*args, **options)
    assert out.shape == (0, 4, 64)
    assert smkern.append_kv(*args[1:]) is None


def test_a_result_requires_no_gradient():
    args, options = make(replace(ALL, dtype=torch.float32))
    weights = options["q_norm"].requires_grad_()
    assert not smkern.qk_norm_rope_append(*args, **(options | {"q_norm": weights})).requires_grad
