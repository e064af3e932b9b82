"""After a warmup appends find all that they ask for loaded, on a fake device."""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import product

import pytest
import torch

from smkern.errors import ArgumentError, WarmupError
from smkern.ops.append.warmup import AppendCalls
from smkern.ops.operator_warmup import joined, work_of
from smkern.ops.warming import Bar, Target
from smkern.ops.warmup import run_all
from smkern.rope import Rope
from smkern.tuning.append import Budget
from tests.ops.append_cases import ALL, DECODE, FP8, make
from tests.ops.tensors import misplaced
from tests.ops.test_append_eager import FakeDevice

CALLS = AppendCalls(4, 2, 64, 16, rotary_dim=64, norm=True, dtype=torch.float16)
TARGET = Target(-1, 132, (Budget(132, "mask"),), (True,))


def warm(device, calls=CALLS, target=TARGET):
    """What `smkern.warmup` does with these calls, compiling left out."""
    made = [one for aligned in target.aligned for one in calls.calls(torch.device("cpu"), aligned)]
    paths = {path.op: path for path in (device.eager, device.eager_kv)}
    work = joined([work_of(op, [call], target, paths[op]) for op, call in made])
    return work, run_all([replace(work, compile=[])], 1, Bar(False), 0.0)


VARIED = [
    (CALLS, ALL),
    (replace(CALLS, cache_dtype=FP8), replace(ALL, cache_dtype=FP8)),
    (replace(CALLS, flat=(True,)), replace(ALL, flat=True)),
    (
        replace(CALLS, rotary_dim=32, interleaved=True, norm=False),
        replace(ALL, rope=Rope(32, interleaved=True), norm=False),
    ),
    (replace(CALLS, dtype=torch.bfloat16), replace(ALL, dtype=torch.bfloat16)),
]


@pytest.mark.parametrize(("calls", "case"), VARIED)
def test_appends_after_a_warmup_load_nothing(calls, case):
    device = FakeDevice()
    work, report = warm(device, calls)
    assert report.launched == len(device.kernels.launches) == 2
    assert len(work.compile) == work.variants
    device.is_capturing = True
    steps = (case, replace(case, requests=DECODE.requests), replace(case, requests=((90, 99),)))
    for step, stream, num_sms in product(steps, (7, 8), (None, 16)):
        args, options = make(step)
        device.stream = stream
        device(*args, **options, num_sms=num_sms)
    assert not warm(device, calls)[0].compile


def test_the_plain_append():
    device, (args, options) = FakeDevice(), make(DECODE)
    warm(device, AppendCalls(0, 2, 64, 16, dtype=torch.float16))
    device.is_capturing = True
    device(None, *args[1:], **options)
    with pytest.raises(WarmupError):
        device(*args, **options)


def test_rows_that_are_not_aligned():
    device, (args, options) = FakeDevice(), make(DECODE)
    calls = AppendCalls(4, 2, 64, 16, dtype=torch.float16)
    q, *rest = args
    shifted = misplaced(q)
    warm(device, calls)
    device.is_capturing = True
    with pytest.raises(WarmupError):
        device(shifted, *rest, **options)
    device.is_capturing = False
    work, _ = warm(device, calls, replace(TARGET, aligned=(False,)))
    assert pickle.loads(pickle.dumps(work.compile)) == work.compile
    device.is_capturing = True
    device(shifted, *rest, **options)


BAD = [
    ({"num_q_heads": 3}, "3 query heads over 2 KV heads"),
    ({"head_dim": 80}, "head_dim=80"),
    ({"page_size": 24}, "page_size=24"),
    ({"rotary_dim": 65}, "rotary_dim"),
    ({"dtype": torch.float32}, "torch.float32 on a GPU"),
    ({"cache_dtype": torch.bfloat16}, "k_cache is torch.bfloat16"),
    ({"weight_dtype": torch.bfloat16}, "q_norm is torch.bfloat16"),
]


@pytest.mark.parametrize(("bad", "message"), BAD)
def test_calls_that_cannot_be(bad, message):
    with pytest.raises(ArgumentError, match=message):
        replace(CALLS, **bad)
