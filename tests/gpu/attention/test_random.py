"""Random ragged batches of random options, by hypothesis; a failure prints its case and seed."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.gpu.attention.cases import Case, make_step
from tests.gpu.attention.support import (
    BACKENDS,
    attend,
    counters_are_zero,
    make_plan,
    poison_partials,
)
from tests.gpu.attention.truth import check

MODELS = [
    {"q_heads": 8, "kv_heads": 2},
    {"q_heads": 5, "kv_heads": 1, "head_dim": 64, "dtype": "fp16", "page_size": 1},
    {"q_heads": 16, "kv_heads": 1, "page_size": 64, "sinks": True, "window": 128},
    {"q_heads": 34, "kv_heads": 2, "page_size": 64},
    {"q_heads": 4, "kv_heads": 4, "head_dim": 256, "page_size": 32, "softcap": 20.0},
    {"q_heads": 8, "kv_heads": 1, "fp8": True, "scales": "tensor", "layout": "hnd"},
]
"""Few, as each is a kernel of its own to compile; what is random within one costs nothing."""
MOST_Q = {"decode": 1, "verify": 8, "mixed": 200}
COMPILED = [
    (Case(kv_lens=(300,), q_lens=None if most == 1 else (most,), **model), backend)
    for model in MODELS
    for most in MOST_Q.values()
    for backend in BACKENDS
]

KV_LENS = st.one_of(
    st.sampled_from([0, 1, 16, 128, 255, 256, 257, 512]), st.integers(0, 400), st.integers(0, 5000)
)


@st.composite
def cases(draw: st.DrawFn, model: dict, most: int) -> Case:
    """A batch of a model: lengths, and the options that no kernel is compiled for."""
    lengths = st.one_of(st.sampled_from([0, 1, 8, 9, 64, 128, 129]), st.integers(0, most))
    requests = draw(
        st.lists(st.tuples(lengths, KV_LENS), min_size=1, max_size=9 if most < 100 else 5)
    )
    q_lens = tuple(min(q, most) for q, _ in requests)
    return Case(
        kv_lens=tuple(kv_len for _, kv_len in requests),
        q_lens=None if most == 1 else q_lens,
        max_q_len=most,
        scale=draw(st.sampled_from([None, 0.03, 0.4])),
        flat=draw(st.booleans()),
        **model,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("path", MOST_Q)
@pytest.mark.parametrize("model", MODELS, ids=lambda m: f"{m['q_heads']}x{m['kv_heads']}")
@settings(
    max_examples=8,
    database=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_random_batches(model, path, backend, data):
    case = data.draw(cases(model, MOST_Q[path]))
    seed = data.draw(st.integers(0, 2**31 - 1))
    sharp = data.draw(st.sampled_from([0.5, 2.0, 6.0]))
    step = make_step(case, seed, sharp=sharp)
    plan = None
    if data.draw(st.booleans()):
        plan = make_plan(step)
        poison_partials(plan)
    attend(step, plan=plan, backend=backend)
    check(step)
    assert plan is None or counters_are_zero(plan)
