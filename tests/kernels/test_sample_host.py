"""The sampler's kernel, run from its own source on the CPU, against a sort."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from smkern.ops.reference import sample as reference
from smkern.ops.sample.call import Sample, choices_of
from smkern.tuning.sample import Budget, SampleConfig
from tests.kernels.host_sample import HostDevice, needs_compiler
from tests.ops.sample_cases import DTYPES, KINDS, logits_of, odd_rows, options_of

pytestmark = [needs_compiler, pytest.mark.slow]
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
EACH_KIND = pytest.mark.parametrize("kind", KINDS)
EACH_LOADED = pytest.mark.parametrize(
    ("dtype", "kind"),
    [(DTYPES["bf16"], kind) for kind in KINDS]
    + [(DTYPES[name], kind) for name in ("fp16", "fp32") for kind in ("greedy", "mixed")],
    ids=str,
)
"""A logit is fp32 once it is loaded, whatever is done with it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("host")


@pytest.fixture
def device(folder, monkeypatch) -> HostDevice:
    made = HostDevice(folder).patch(monkeypatch)
    made.budgets = {
        7: Budget(2, "mask"), 1: Budget(1, "grid"), 5: Budget(5, "grid"), 40: Budget(40, "mask"),
    }  # fmt: skip
    return made


def wanted(logits, **options):
    return reference.sample(logits, choices_of(Sample(logits, **options)))


@EACH_LOADED
def test_values(device, dtype, kind):
    """Spread, flat and equal logits: few candidates, more than fit, and ties alone."""
    for vocab in (1, 7, 4097, 9_001):
        options = options_of(kind, 6)
        for spread in (3.0, 0.1, 0.0):
            logits = logits_of(6, vocab, dtype, spread)
            got = device(logits, **options)
            assert torch.equal(got, wanted(logits, **options)), (vocab, spread)


@pytest.mark.parametrize("kind", ["greedy", "all", "mixed"])
def test_a_real_vocabulary(device, kind):
    logits = logits_of(6, 151_936, torch.bfloat16)
    options = options_of(kind, 6)
    want = wanted(logits, **options)
    for stream in (7, 40):
        device.stream = stream
        assert torch.equal(device(logits, **options), want)


@EACH_LOADED
def test_odd_rows(device, dtype, kind):
    logits = odd_rows(dtype)
    options = options_of(kind, 8)
    assert torch.equal(device(logits, **options), wanted(logits, **options))


@EACH_KIND
def test_neither_batch_nor_budget_nor_threads_change_a_token(folder, monkeypatch, kind):
    """Rows alone, in a batch, as ranges of rows and as pieces of one, bit for bit."""
    logits, options = logits_of(5, 30_000, torch.bfloat16, 0.5), options_of(kind, 5)
    want = wanted(logits, **options)
    for threads in (32, 64):
        device = HostDevice(folder, threads).patch(monkeypatch)
        for sms in (1, 8, 77):
            device.budgets[7] = Budget(sms, "grid")
            assert torch.equal(device(logits, **options), want)
            last = {k: v[4:] if isinstance(v, torch.Tensor) else v for k, v in options.items()}
            assert torch.equal(device(logits[4:], **last), want[4:])


@EACH_DTYPE
def test_rows_that_are_apart_or_not_whole_16_bytes(device, dtype):
    options = options_of("mixed", 6)
    wide = logits_of(6, 9100, dtype)
    for view in (wide[:, :9003], wide[:, 1:9003], wide[:, 8:9000]):
        assert torch.equal(device(view, **options), wanted(view, **options))


def test_clamped_parameters(device):
    nan, inf = torch.nan, torch.inf
    logits = logits_of(6, 9003, torch.float32)
    seeds = torch.arange(6)
    for name, values in {
        "temperature": (-1.0, nan, 1e-6, inf, 1e38, 1e-5),
        "top_p": (-1.0, 0.0, nan, inf, 2.0, 1.0),
        "min_p": (-1.0, 0.0, nan, inf, 2.0, 1.0),
    }.items():
        options = {"temperature": 1.0, "seeds": seeds, name: torch.tensor(values)}
        assert torch.equal(device(logits, **options), wanted(logits, **options))
    least = -(2**31)
    top_k = torch.tensor([-1, least, 0, 9003, 9004, 2**31 - 1], dtype=torch.int32)
    options = {"temperature": 1.0, "seeds": seeds, "top_k": top_k}
    assert torch.equal(device(logits, **options), wanted(logits, **options))


def test_state(device):
    """Stop tokens, lengths, rows that were finished; steps that are the lengths."""
    logits = logits_of(6, 5000, torch.bfloat16)
    finished = torch.tensor([False, True, False, False, False, False])
    lengths = torch.tensor([3, 4, 5, 6, 7, 8], dtype=torch.int32)
    state = {"finished": finished, "lengths": lengths, "steps": lengths, "pad_token": -9,
             "max_lengths": torch.tensor([9, 9, 6, 9, 7, 20], dtype=torch.int32)}  # fmt: skip
    options = {"temperature": 0.7, "seeds": torch.arange(6)}
    first = wanted(logits, **options, steps=lengths)
    stop = torch.stack([first, torch.full_like(first, -1)], 1)
    stop[1:3] = stop[4:] = -1
    tokens = device(logits, **options, **state, stop_tokens=stop)
    first[1] = -9
    assert torch.equal(tokens, first)
    assert lengths.tolist() == [4, 4, 6, 7, 8, 9]
    assert finished.tolist() == [True, True, True, True, True, False]
    tokens = device(logits, **options, **state, stop_tokens=stop)
    assert tokens[:5].tolist() == [-9] * 5
    assert lengths.tolist() == [4, 4, 6, 7, 8, 10]


def test_finished_rows_are_not_read(device):
    logits = torch.full((3, 5000), torch.nan)
    finished = torch.tensor([1, 1, 1], dtype=torch.uint8)
    assert device(logits, finished=finished, pad_token=7).tolist() == [7, 7, 7]


@pytest.mark.parametrize("config", [SampleConfig(16, 2), SampleConfig(32, 1, False)], ids=str)
def test_the_grid_keeps_the_budget(device, config):
    device.config = config
    device.budgets[3] = Budget(3, "grid")
    for rows, vocab in ((1, 100), (1, 20_000), (2, 20_000), (50, 3000)):
        for stream, most in ((3, 3), (7, 2 * config.ctas_per_sm), (40, 40 * config.ctas_per_sm)):
            device.stream = stream
            logits = logits_of(rows, vocab, torch.float32)
            assert torch.equal(device(logits), logits.argmax(1).int())
            ctas, threads, overlap = device.launches[-1]
            assert 1 <= ctas <= most
            assert threads == 32 * config.num_warps
            assert overlap == (config.pdl and stream != 3)


READS = {
    "greedy": ({}, 3.0, 1.01),
    "temperature": ({"temperature": 1.0}, 3.0, 1.03),
    "top-k": ({"temperature": 1.0, "top_k": 50}, 3.0, 1.1),
    "top-k-top-p": ({"temperature": 0.8, "top_k": 50, "top_p": 0.95}, 4.0, 1.1),
    "top-p": ({"temperature": 0.8, "top_p": 0.9}, 8.0, 1.6),
    "min-p": ({"temperature": 0.8, "min_p": 0.05}, 4.0, 1.1),
    "much-k": ({"temperature": 1.0, "top_k": 20_000}, 1.0, 4.2),
    "flat-top-p": ({"temperature": 1.0, "top_p": 0.9}, 1.0, 4.8),
    "flat-both": ({"temperature": 1.0, "top_k": 50_000, "top_p": 0.9}, 1.0, 7.3),
}


@pytest.mark.parametrize(("options", "spread", "most"), READS.values(), ids=READS)
def test_reads_of_the_logits(device, options, spread, most):
    """How often a row is read: at most three times unless much of a flat one is kept."""
    logits = logits_of(4, 151_936, torch.bfloat16, spread)
    options = options | ({"seeds": torch.arange(4)} if options else {})
    device.budgets[7] = Budget(4, "mask")
    assert torch.equal(device(logits, **options), wanted(logits, **options))
    assert 1.0 <= device.loaded / logits.nbytes <= most
