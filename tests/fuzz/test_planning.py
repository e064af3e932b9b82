"""What plans and explains calls without tensors: a right answer, or smkern's own errors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from inspect import signature
from typing import Any

import pytest
import torch

import smkern
from smkern.errors import DeviceError, SmkernError
from smkern.kv import KvSizes, PagePool
from smkern.ops import Rope
from tests.fuzz.conftest import Cases
from tests.fuzz.hostile import changed

H200 = smkern.load_profile("h200").info
PRODUCT = {"backend": "model", "num_sms": 16, "confined": "grid", "batch_invariant": True}
HEADS = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128, "page_size": 16}
MADE: dict[Callable[..., Any], dict[str, Any]] = {
    smkern.explain_gemm: {"m": 64, "n": 4096, "k": 512, "bias": True} | PRODUCT,
    smkern.explain_gemm_swiglu: {"m": 64, "inner": 1024, "k": 512} | PRODUCT,
    smkern.gemm_workspace_bytes: {"m": 64, "n": 4096, "k": 512, "num_sms": 16},
    smkern.gemm_swiglu_workspace_bytes: {"m": 64, "inner": 1024, "k": 512, "num_sms": 16},
    smkern.explain_attention: {"batch": 2, **HEADS, "max_kv_len": 600, "kv_lens": [9, 600]},
    smkern.AttentionCalls: {**HEADS, "max_q_len": 64, "window": 100},
    smkern.AppendCalls: {**HEADS, "rotary_dim": 128, "norm": True, "ragged": (False, True)},
    smkern.MoeCalls: {"hidden": 64, "intermediate": 32, "num_experts": 8, "top_k": 2},
    smkern.RowsCalls: {"hidden": [64], "added": [64], "gated": [32], "embedded": [64]},
    smkern.SampleCalls: {"vocab": 1000, "dtypes": [torch.bfloat16]},
    smkern.SwigluCalls: {"shapes": [(64, 32)], "max_m": 8, "dtypes": [torch.bfloat16]},
    smkern.models.SamplingParams: {"max_new_tokens": 4, "temperature": 0.5, "top_k": 3},
    Rope: {"rotary_dim": 64, "theta": 1e4},
    Rope(64).table: {"max_position": 16},
    KvSizes: {"num_layers": 2, "num_kv_heads": 1, "head_dim": 64, "page_size": 16},
    PagePool: {"num_pages": 4, "page_size": 16},
    smkern.plan_ladder: {"info": H200, "decode_sms": [16, 32], "atom": 8},
}

if not torch.cuda.is_available():  # with a GPU they would do it
    MADE[smkern.warmup] = {"shapes": [(64, 64)], "calls": [smkern.SampleCalls(64)], "budgets": [16]}
    MADE[smkern.ladder] = {"decode_sms": [16], "placement": "spread"}
    MADE[smkern.current_num_sms] = {}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch has some of tensors so odd
@pytest.mark.parametrize("made", MADE, ids=lambda made: made.__name__)
def test_what_does_not_belong_is_refused_by_name(made: Callable[..., Any], cases: Cases) -> None:
    with suppress(DeviceError):  # without a GPU, of what needs one
        made(**MADE[made])
    names = [name for name in signature(made).parameters if name != "info"]
    for random in cases(150):
        arguments = dict(MADE[made])
        name = random.choice(names)
        value = arguments.get(name)
        if isinstance(value, list | tuple) and random.random() < 0.5:
            arguments[name] = [*value[1:], changed(random, value[0])]
        else:
            arguments[name] = changed(random, value)
        with suppress(SmkernError):
            made(**arguments)
