"""`sample` on CPU tensors: state, bad input, torch.library, warmup."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck

import smkern.ops as smkern
from smkern.errors import ArgumentError, BudgetError, WarmupError
from smkern.ops.operator_warmup import work_of
from smkern.ops.reference import sample as reference
from smkern.ops.sample.call import Sample, choices_of
from smkern.ops.sample.operators import SAMPLE
from smkern.ops.warming import Target
from smkern.tuning.sample import MAX_VOCAB, Budget
from tests.kernels.host_sample import HostDevice, needs_compiler
from tests.ops.sample_cases import DTYPES, KINDS, logits_of, options_of
from tests.ops.tensors import ints

pytestmark = pytest.mark.slow

EACH_KIND = pytest.mark.parametrize("kind", KINDS)


@EACH_KIND
def test_cpu_tensors_run_the_reference(kind):
    logits, options = logits_of(6, 500, torch.bfloat16), options_of(kind, 6)
    want = reference.sample(logits, choices_of(Sample(logits, **options)))
    assert torch.equal(smkern.sample(logits, **options, check=True, num_sms=3), want)
    out = ints(*[-7] * 6)
    assert smkern.sample(logits, **options, out=out) is out
    assert torch.equal(out, want)


def test_state():
    logits = torch.eye(5)
    finished = torch.tensor([0, 1, 0, 0, 0], dtype=torch.uint8)
    lengths = ints(1, 2, 3, 4, 5)
    tokens = smkern.sample(
        logits, finished=finished, lengths=lengths, steps=lengths, max_lengths=ints(9, 9, 4, 9, 9),
        stop_tokens=ints(3, 7, -1), pad_token=-5,
    )  # fmt: skip
    assert tokens.tolist() == [0, -5, 2, 3, 4]
    assert finished.tolist() == [0, 1, 1, 1, 0]
    assert lengths.tolist() == [2, 2, 4, 5, 6]


LOGITS = torch.zeros(3, 8)
SEEDS = torch.arange(3)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "cold": ({"temperature": -0.5, "seeds": SEEDS}, r"temperature=-0.5: pass a number of at least"),
    "nan": ({"temperature": torch.nan, "seeds": SEEDS}, "temperature=nan"),
    "hot": ({"temperature": torch.inf, "seeds": SEEDS}, "temperature=inf"),
    "no-p": ({"top_p": 0.0}, r"top_p=0.0: pass a number above 0"),
    "much-p": ({"top_p": 1.5}, r"top_p=1.5"),
    "nan-p": ({"top_p": torch.nan}, "top_p=nan"),
    "min-p": ({"min_p": -0.1}, r"min_p=-0.1"),
    "k": ({"top_k": -1}, r"top_k=-1: give a whole number of at least 0"),
    "half-k": ({"top_k": 1.5}, "top_k=1.5 is no whole number"),
    "steps": ({"steps": -1}, "steps=-1"),
    "seeds": ({"seeds": 2**63}, "seeds=9223372036854775808"),
    "no-seeds": ({"temperature": 1.0}, "without seeds"),
    "no-seeds-tensor": ({"temperature": torch.ones(3)}, "without seeds"),
    "short": ({"top_k": ints(1, 2)}, r"top_k has shape \[2\], wanted \[3\]"),
    "dtype": ({"top_p": torch.ones(3).double()}, "top_p is torch.float64, wanted torch.float32"),
    "seed-dtype": ({"seeds": ints(1, 2, 3)}, "seeds is torch.int32, wanted torch.int64"),
    "finished": ({"finished": ints(0, 0, 0)}, "finished is torch.int32"),
    "told": ({"stop_tokens": ints(1)}, "stop_tokens is given without finished"),
    "counted": ({"max_lengths": ints(1, 2, 3), "finished": torch.zeros(3).bool()},
                "max_lengths is given without lengths"),
    "stops": ({"stop_tokens": ints(1).view(1, 1), "finished": torch.zeros(3).bool()},
              r"stop_tokens has shape \[1, 1\] for 3 rows"),
    "stop-dtype": ({"stop_tokens": SEEDS, "finished": torch.zeros(3).bool()},
                   "stop_tokens is torch.int64"),
    "out": ({"out": SEEDS.clone()}, r"out is \[3\] torch.int64"),
    "overlap": ({"out": LOGITS.view(torch.int32)[0, :3]}, "out at .* overlaps logits"),
    "pad": ({"pad_token": 2**40}, "pad_token=1099511627776"),
}  # fmt: skip


@pytest.mark.parametrize(("options", "words"), BAD.values(), ids=BAD)
def test_bad_input_is_named(options, words):
    with pytest.raises(ArgumentError, match=words):
        smkern.sample(LOGITS, **options)


@pytest.mark.parametrize(
    ("logits", "words"),
    [
        (torch.zeros(8), r"wanted \[batch, vocab\]"),
        (torch.zeros(2, 8).long(), "logits is torch.int64: use torch.bfloat16"),
        (torch.zeros(2, 0), "a vocabulary has 1 to"),
        (torch.zeros(1, MAX_VOCAB + 1), "a vocabulary has 1 to 262144"),
        (torch.zeros(8, 2).t(), "inner stride must be 1"),
        (torch.zeros(20_000, 1), "at most 16384 fit"),
        (None, "logits is NoneType"),
    ],
)
def test_bad_logits_are_named(logits, words):
    with pytest.raises(ArgumentError, match=words):
        smkern.sample(logits)
    with pytest.raises(BudgetError):
        smkern.sample(LOGITS, num_sms=0)


def test_check_names_the_row():
    good = {"temperature": torch.ones(3), "seeds": SEEDS, "top_k": ints(1, 0, 3)}
    smkern.sample(LOGITS, **good, check=True)
    for changed, words in (
        ({"temperature": torch.tensor([1.0, torch.nan, 1.0])}, r"temperature\[1\] is nan: wanted"),
        ({"top_k": ints(1, -2, 3)}, r"top_k\[1\] is -2"),
        ({"top_p": torch.tensor([1.0, 0.5, 0.0])}, r"top_p\[2\] is 0.0: wanted above 0"),
        ({"min_p": torch.tensor([2.0, 0.5, 0.0])}, r"min_p\[0\] is 2.0"),
        ({"steps": ints(1, 2, -3)}, r"steps\[2\] is -3"),
        ({"finished": torch.zeros(3).bool(), "stop_tokens": ints(1, 8)}, r"stop_tokens\[0\] is"),
    ):
        with pytest.raises(ArgumentError, match=words):
            smkern.sample(LOGITS, **good | changed, check=True)
    nothing = LOGITS.clone()
    nothing[2] = -torch.inf
    with pytest.raises(ArgumentError, match=r"logits\[2\]: wanted a row with a number above -inf"):
        smkern.sample(nothing, check=True)
    over = torch.tensor([False, False, True])
    smkern.sample(nothing, check=True, finished=over)


@EACH_KIND
def test_library(kind):
    logits, options = logits_of(6, 50, torch.bfloat16), options_of(kind, 6)
    named = {
        f"{name}_tensor" if isinstance(x, torch.Tensor) else name: x for name, x in options.items()
    }
    state = {"finished": torch.zeros(6).bool(), "lengths": ints(*range(6))}
    opcheck(torch.ops.smkern.sample.default, (logits,), named | state)
    opcheck(torch.ops.smkern.sample_out.default, (logits, ints(*[0] * 6)), named)


def test_compiled_and_fake():
    logits, options = logits_of(6, 50, torch.bfloat16), options_of("all", 6)
    step = torch.compile(smkern.sample, fullgraph=True, backend="aot_eager")
    assert torch.equal(step(logits, **options), smkern.sample(logits, **options))
    with FakeTensorMode() as mode:
        made = smkern.sample(mode.from_tensor(logits))
    assert (made.shape, made.dtype) == ((6,), torch.int32)


def test_the_arguments_are_the_schemas():
    names = [part.split("=")[0].split()[-1] for part in Sample.schema.split(", ") if part != "*"]
    names = [name for name in names if not name.endswith("_tensor")]
    public = [n for n in inspect.signature(smkern.sample).parameters if n != "check"]
    assert [*names, "out", "num_sms"] == public == list(Sample._fields)


@needs_compiler
def test_after_a_warmup_captures_load_nothing(monkeypatch, tmp_path):
    device = HostDevice(tmp_path).patch(monkeypatch)
    calls = smkern.SampleCalls(504, tuple(DTYPES.values()))
    cpu = torch.device("cpu")
    target = Target(-1, 132, (Budget(132, "mask"),), (True,))
    work = work_of(SAMPLE, calls.calls(cpu, True), target, device.eager)
    assert (work.choices, work.variants, len(work.compile)) == (3, 12, 12)
    for launch in work.launches:
        launch()
    assert not work_of(SAMPLE, calls.calls(cpu, True), target, device.eager).compile
    device.is_capturing = True
    device.budgets[8] = Budget(3, "grid")
    for dtype in DTYPES.values():
        for device.stream in (7, 8):
            logits = logits_of(3, 904, dtype)
            assert torch.equal(device(logits), logits.argmax(1).int())
    with pytest.raises(WarmupError, match="once before"):
        device(logits_of(3, 901, torch.bfloat16))
    with pytest.raises(ArgumentError, match="a vocabulary has"):
        smkern.SampleCalls(0)
