"""Frequencies against formulas written out pair by pair in Python's floats."""

from __future__ import annotations

from math import ceil, cos, floor, log, pi, sin
from types import SimpleNamespace

import pytest
import torch

from smkern.errors import ArgumentError
from smkern.rope import Linear, Llama3, Rope, Yarn

LLAMA = Llama3(8.0, 1.0, 4.0, 8192)
YARN = Yarn(4.0, 32768)


def plain(rope: Rope) -> list[float]:
    return [rope.theta ** (-2 * i / rope.rotary_dim) for i in range(rope.rotary_dim // 2)]


def llama3(rope: Rope) -> list[float]:
    """As Meta's release does it, by wavelengths."""
    s, found = rope.scaling, []
    for frequency in plain(rope):
        wavelength = 2 * pi / frequency
        if wavelength < s.original_max_position / s.high_freq_factor:
            found.append(frequency)
        elif wavelength > s.original_max_position / s.low_freq_factor:
            found.append(frequency / s.factor)
        else:
            smooth = s.original_max_position / wavelength - s.low_freq_factor
            smooth /= s.high_freq_factor - s.low_freq_factor
            found.append((1 - smooth) * frequency / s.factor + smooth * frequency)
    return found


def yarn(rope: Rope) -> list[float]:
    """As the paper's equation 23, with its code's limits."""
    s, dim = rope.scaling, rope.rotary_dim

    def correction(turns: float) -> float:
        return dim * log(s.original_max_position / (turns * 2 * pi)) / (2 * log(rope.theta))

    low, high = max(floor(correction(s.beta_fast)), 0), min(ceil(correction(s.beta_slow)), dim - 1)
    found = []
    for i, frequency in enumerate(plain(rope)):
        gamma = 1 - min(max((i - low) / (high - low), 0), 1)
        found.append((1 - gamma) * frequency / s.factor + gamma * frequency)
    return found


@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6])
@pytest.mark.parametrize(
    ("scaling", "formula"),
    [
        (None, plain),
        (Linear(4.0), lambda rope: [x / 4 for x in plain(rope)]),
        (LLAMA, llama3),
        (Llama3(32.0, 1.0, 4.0, 8192), llama3),
        (YARN, yarn),
        (Yarn(40.0, 4096, beta_fast=16.0, beta_slow=2.0), yarn),
    ],
)
def test_frequencies(dim, theta, scaling, formula):
    rope = Rope(dim, theta, scaling=scaling)
    want = torch.tensor(formula(rope), dtype=torch.float64)
    assert rope.inv_freq.dtype is torch.float32
    torch.testing.assert_close(rope.inv_freq.double(), want, rtol=1e-6, atol=0)


def test_llama3_scales_some_pairs_and_keeps_some():
    ratio = Rope(128, 5e5).inv_freq / Rope(128, 5e5, scaling=LLAMA).inv_freq
    assert float(ratio[0]) == 1.0
    assert float(ratio[-1]) == pytest.approx(8.0)
    assert ((ratio > 1.01) & (ratio < 7.9)).any()


@pytest.mark.parametrize(
    ("scaling", "want"),
    [
        (None, 1.0),
        (LLAMA, 1.0),
        (Linear(4.0), 1.0),
        (YARN, 0.1 * log(4.0) + 1),
        (Yarn(0.5, 4096), 1.0),
        (
            Yarn(40.0, 4096, mscale=0.707, mscale_all_dim=1.0),
            (0.0707 * log(40) + 1) / (0.1 * log(40) + 1),
        ),
        (Yarn(40.0, 4096, attention_factor=1.5), 1.5),
    ],
)
def test_attention_factor(scaling, want):
    assert Rope(64, scaling=scaling).attention_factor == pytest.approx(want)


def test_the_table_is_exact_far_out():
    rope = Rope(64, 1e6, scaling=YARN)
    table = rope.table(140_000)
    assert table.shape == (140_000, 64)
    frequencies = yarn(rope)
    for position in (0, 1, 65_535, 65_536, 131_072, 139_999):
        for i in (0, 1, 7, 31):
            angle, factor = position * frequencies[i], rope.attention_factor
            assert float(table[position, i]) == pytest.approx(factor * cos(angle), abs=1e-7)
            assert float(table[position, 32 + i]) == pytest.approx(factor * sin(angle), abs=1e-7)


def test_a_table_is_rounded_once():
    rope = Rope(64)
    assert torch.equal(rope.table(100, dtype=torch.bfloat16), rope.table(100).bfloat16())
    assert rope.table(3, "cpu").device.type == "cpu"


CONFIGS = [
    ({"head_dim": 128, "rope_theta": 1e6}, Rope(128, 1e6)),
    ({"hidden_size": 4096, "num_attention_heads": 32}, Rope(128)),
    ({"head_dim": 80, "partial_rotary_factor": 0.4}, Rope(32)),
    (
        {"head_dim": 128, "rope_theta": 5e5, "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}},
        Rope(128, 5e5, scaling=LLAMA),
    ),
    (
        {"head_dim": 128, "rope_parameters": {"rope_theta": 1e6, "rope_type": "default",
                                              "partial_rotary_factor": 0.5}},
        Rope(64, 1e6),
    ),
    (
        {"head_dim": 128, "max_position_embeddings": 32768,
         "rope_scaling": {"type": "yarn", "factor": 4.0}},
        Rope(128, scaling=Yarn(4.0, 32768)),
    ),
    (
        {"head_dim": 128, "max_position_embeddings": 32768,
         "rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": None}},
        Rope(128, scaling=Yarn(4.0, 32768, truncate=False)),
    ),
    (
        {"head_dim": 64, "max_position_embeddings": 131072,
         "rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 4096,
                          "truncate": False, "beta_fast": 16}},
        Rope(64, scaling=Yarn(32.0, 4096, beta_fast=16, truncate=False)),
    ),
    (
        {"head_dim": 64, "original_max_position_embeddings": 4096,
         "rope_scaling": {"type": "yarn", "factor": 32.0,
                          "original_max_position_embeddings": 8192}},
        Rope(64, scaling=Yarn(32.0, 4096)),
    ),
    (
        {"head_dim": 64, "rope_scaling": {"rope_type": "linear", "factor": 4.0},
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        Rope(64, scaling=Linear(4.0)),
    ),
    ({"head_dim": 64, "rope_scaling": {"type": "linear", "factor": 2.0}},
     Rope(64, scaling=Linear(2.0))),
    ({"head_dim": 128, "rope_scaling": {"rope_type": "dynamic", "factor": 6.0}}, Rope(128)),
]  # fmt: skip


@pytest.mark.parametrize(("config", "want"), CONFIGS)
@pytest.mark.parametrize("kind", [dict, lambda x: SimpleNamespace(**x)])
def test_from_config(config, want, kind):
    assert Rope.from_config(kind(config)) == want


def test_transformers_agrees():
    utils = pytest.importorskip("transformers.modeling_rope_utils")
    transformers = pytest.importorskip("transformers")
    for config, _ in CONFIGS[3:4]:
        made = transformers.LlamaConfig(hidden_size=4096, num_attention_heads=32, **config)
        want, factor = utils.ROPE_INIT_FUNCTIONS["llama3"](made, "cpu")
        rope = Rope.from_config(made)
        torch.testing.assert_close(rope.inv_freq, want, rtol=1e-5, atol=0)
        assert rope.attention_factor == factor


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Rope(63), "rotary_dim=63.*even"),
        (lambda: Rope(0), "rotary_dim=0.*at least 2"),
        (lambda: Rope(64.0), "no whole number"),
        (lambda: Rope(64, theta=1.0), r"theta=1.0.*above 1"),
        (lambda: Rope(64, scaling="yarn"), "scaling is str.*Linear, Llama3 or Yarn"),
        (lambda: Linear(0), "factor=0.*above 0"),
        (lambda: Llama3(8.0, 4.0, 4.0, 8192), "high_freq_factor=4.0.*above 4.0"),
        (lambda: Yarn(float("nan"), 4096), "factor=nan is no finite number"),
        (lambda: Yarn(4.0, 4096, beta_fast=0.5), "beta_fast=0.5.*at least 1.0"),
        (lambda: Rope(64).table(0), "max_position=0.*at least 1"),
        (lambda: Rope.from_config({}), "no head_dim"),
        (lambda: Rope.from_config({"head_dim": 64, "rope_scaling": {"type": "longrope"}}),
         "'longrope' is not there.*llama3"),
        (lambda: Rope.from_config({"head_dim": 64, "rope_scaling": {"type": "linear"}}),
         "'linear' has no factor"),
    ],
)  # fmt: skip
def test_bad_numbers(make, match):
    with pytest.raises(ArgumentError, match=match):
        make()
