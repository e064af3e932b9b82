"""Interpolation between timed launches."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smkern.errors import ArgumentError, ProfileError, TableError
from smkern.latency import Chunk, Size, TablePredictor
from smkern.latency.prompt_times import UNEVEN
from smkern.latency.roofline import Roofline
from smkern.latency.step_times import Attention
from smkern.latency.table import Timing, read_timings, shipped, shipped_path
from smkern.latency.table_predictor import GUARD
from smkern.profile import load_profile
from tests.latency.small import LAYERS, PROFILE, SIZES, TIMINGS

PREDICTOR = TablePredictor(TIMINGS, SIZES, PROFILE)
MODELS = ("qwen3-8b", "qwen3-32b")
SHIPPED = {model: TablePredictor.load(model) for model in MODELS}


def decode(batch: int, context: int) -> Size:
    return Size(batch=batch, total_kv=batch * context)


def roofline_us(size: Size, num_sms: int) -> float:
    return sum(max(bound) for bound in Roofline(SIZES, PROFILE).bounds(size, num_sms))


def least_us(size: Size, num_sms: int) -> float:
    """What the time of a decode step is taken over."""
    roofline = Roofline(SIZES, PROFILE)
    others_us = roofline.others_us(size.batch, size.batch, LAYERS, num_sms)
    return others_us + Attention(roofline, num_sms, size.batch).us(size.batch, size.total_kv)


def prompt(tokens: int, *, layers: int = LAYERS, head: bool = True, cached: int = 0) -> Size:
    return Size((Chunk(tokens, cached),), layers, LAYERS, head)


@pytest.mark.parametrize("timing", [t for t in TIMINGS if not t.beside_sms], ids=str)
def test_a_timed_launch_comes_back(timing: Timing) -> None:
    got = PREDICTOR.alone_us(timing.size(LAYERS), timing.num_sms)
    assert got == pytest.approx(TIMINGS[timing], rel=1e-6)


@pytest.mark.parametrize("model", MODELS)
def test_shipped_timings_come_back(model: str) -> None:
    """Steps and prompts as they were measured, but for pauses of the host in a few small ones; the
    others are smoothed over what is alike."""
    predictor = TablePredictor.load(model.upper(), "NVIDIA H200")
    cells, sizes = read_timings(shipped_path(model, "h200"))
    errors, paused = [], []
    for timing, us in cells.cells.items():
        if timing.beside_sms:
            continue
        got = predictor.alone_us(timing.size(sizes.num_layers), timing.num_sms)
        if timing.kind == "mixed" or timing.cached:
            errors.append(abs(got / us - 1))
        elif timing.kind == "prefill" and got < 0.999 * us:
            paused.append(timing.tokens)
            # 32B's 1,024 tokens on 124 SMs took 10% longer than on 120
            assert timing.tokens <= 257 or got > 0.95 * us
        else:
            assert got == pytest.approx(us, rel=1e-3)
    assert len(paused) < 15
    assert sum(errors) / len(errors) < 0.025
    assert max(errors) < 0.15


def test_a_predictor_says_what_it_is_of() -> None:
    said = repr(TablePredictor.load("qwen3-8b", "h200"))
    assert said.endswith(" timings of 36 layers of 4096 on NVIDIA H200)")


def test_a_prompt_takes_no_longer_than_one_of_more_tokens() -> None:
    """A pause of the host was timed with it. Nor on more SMs, but for what unevenness costs."""
    paused = {Timing("prefill", 100, prompts=1, tokens=32): 250.0}
    predictor = TablePredictor(TIMINGS | paused, SIZES, PROFILE)
    assert predictor.alone_us(prompt(32), 100) == pytest.approx(180)
    assert predictor.alone_us(prompt(64), 100) == pytest.approx(180)
    fewer = {Timing("prefill", 80, prompts=1, tokens=64): 150.0}
    predictor = TablePredictor(TIMINGS | fewer, SIZES, PROFILE)
    assert predictor.alone_us(prompt(64), 100) == pytest.approx(UNEVEN * 150)


def test_a_mixed_forward_takes_no_longer_than_one_with_more_of_everything() -> None:
    more = {Timing("mixed", 100, 16, 512, prompts=1, tokens=512): 2000.0}
    delayed = {Timing("mixed", 100, 8, 512, prompts=1, tokens=256): 4000.0}
    as_much = {Timing("mixed", 100, 8, 512, prompts=1, tokens=256): 2000.0}
    size = Size((Chunk(256),), LAYERS, LAYERS, True, 8, 8 * 512)
    told = [
        TablePredictor(TIMINGS | more | cells, SIZES, PROFILE).alone_us(size, 100)
        for cells in (delayed, as_much)
    ]
    assert told[0] == pytest.approx(told[1])


def test_between_cells_the_time_over_the_least_is_interpolated() -> None:
    def over(batch: int) -> float:
        size = decode(batch, 1024)
        return PREDICTOR.alone_us(size, 20) / least_us(size, 20)

    assert over(8) == pytest.approx((over(1) + over(64)) / 2)


def test_a_decode_step_by_hand() -> None:
    """On 20 SMs: 1 TB/s, 80 TFLOP/s; one row is bound by bytes everywhere."""
    layer = 1536 * 1024 + 1024 * 1024 + 3 * 4096 * 1024 + 2 * 1024 + 2 * 128 + 2 * 1024 * 256
    moved = 2 * (LAYERS * layer + 32_000 * 1024 + 1024)
    assert roofline_us(decode(1, 1024), 20) == pytest.approx(moved / 1e6)


@pytest.mark.parametrize(
    ("gpu", "measured"),
    [
        ("h100-80gb-hbm3", {16: 2.27, 24: 2.69, 32: 2.82, 48: 2.93, 132: 2.96}),
        ("h200", {16: 2.22, 24: 2.87, 32: 3.79, 48: 4.32, 132: 4.39}),
    ],
)
def test_attention_is_held_up_by_loads_in_flight_on_few_sms_and_by_memory_on_many(
    gpu: str, measured: dict[int, float]
) -> None:
    """TB/s of 64 x 4096, of `bench attention`; and what a key beyond two whole pieces costs."""
    roofline = Roofline(SHIPPED["qwen3-8b"].sizes, load_profile(gpu))
    keys = 64 * 4096
    moved = 2 * 2 * 36 * 8 * 128 * keys

    def tbps(num_sms: int) -> float:
        return moved / Attention(roofline, num_sms, 64).us(64, keys) / 1e6

    for num_sms, found in measured.items():
        assert tbps(num_sms) == pytest.approx(found, rel=0.12)
    for num_sms, least, most in ((8, 1.2, 1.25), (132, 1.12, 1.13)):
        attention = Attention(roofline, num_sms, 64)
        started = attention.us(64, 64 * 1025) / attention.us(64, 64 * 1024)
        assert least < started < most


def test_rows_that_nobody_tuned_cost_more_in_partitions_alone() -> None:
    """cuBLAS serves them on a whole device; between 16 and 32 rows GEMMs take what 32 take."""
    predictor = TablePredictor.load("qwen3-8b")

    def us(num_sms: int, batch: int) -> float:
        return predictor.alone_us(Size(batch=batch, total_kv=30_000), num_sms)

    most = max(us(132, 16), us(132, 32))
    assert all(us(132, batch) < 1.03 * most for batch in range(17, 32))
    assert us(100, 24) > 1.03 * max(us(100, 16), us(100, 32))


def test_beyond_the_cells_times_grow_as_the_roofline() -> None:
    twice = PREDICTOR.alone_us(prompt(2 * 65_536), 100) / PREDICTOR.alone_us(prompt(65_536), 100)
    assert 2 < twice < 4  # attention's share grows
    near, far = decode(64, 1024), decode(64, 4096)
    grown = least_us(far, 100) / least_us(near, 100)
    assert PREDICTOR.alone_us(far, 100) == pytest.approx(grown * 200.0)


def test_layers_of_a_prompt_add_up() -> None:
    whole = PREDICTOR.alone_us(prompt(2048), 80)
    parts = 3 * PREDICTOR.alone_us(prompt(2048, layers=1, head=False), 80)
    parts += PREDICTOR.alone_us(prompt(2048, layers=1), 80)
    assert parts == pytest.approx(whole)


def test_nothing_takes_no_time() -> None:
    assert PREDICTOR.alone_us(Size(), 100) == 0.0


def test_a_mixed_forward_takes_at_least_what_its_decode_rows_take() -> None:
    rows = decode(64, 1024)
    alone = PREDICTOR.alone_us(rows, 100)
    mixed = replace(rows, chunks=(Chunk(1),), layers=LAYERS, num_layers=LAYERS, head=True)
    assert alone <= PREDICTOR.alone_us(mixed, 100) < 1.5 * alone
    chunk = replace(mixed, chunks=(Chunk(2048),))
    both = alone + PREDICTOR.alone_us(prompt(2048), 100)
    assert PREDICTOR.alone_us(prompt(2048), 100) < PREDICTOR.alone_us(chunk, 100) < both


def test_timed_mixed_forwards_correct_the_others() -> None:
    timing = Timing("mixed", 100, batch=64, context=1024, prompts=1, tokens=512, cached=100)
    plain = PREDICTOR.alone_us(timing.size(LAYERS), 100)
    predictor = TablePredictor(TIMINGS | {timing: 1.5 * plain}, SIZES, PROFILE)
    assert predictor.alone_us(timing.size(LAYERS), 100) == pytest.approx(1.5 * plain)
    assert predictor.alone_us(decode(64, 1024), 100) == pytest.approx(200.0)


def test_a_mixed_forward_goes_up_a_stair_with_all_its_rows() -> None:
    """Not with its prompts' tokens alone: tiles are filled by decode rows as well."""
    stairs = {
        Timing("mixed", 100, 64, 1024, 1, tokens=tokens, cached=100): ratio
        for tokens, ratio in ((192, 1.1), (193, 1.5))
    }
    timed = {
        timing: ratio * PREDICTOR.alone_us(timing.size(LAYERS), 100)
        for timing, ratio in stairs.items()
    }
    predictor = TablePredictor(TIMINGS | timed, SIZES, PROFILE)
    for batch, tokens, ratio in ((1, 192, 1.1), (128, 128, 1.1), (128, 129, 1.5), (256, 1, 1.5)):
        size = Size((Chunk(tokens, 100),), LAYERS, LAYERS, True, batch, batch * 1024)
        assert predictor.alone_us(size, 100) == pytest.approx(ratio * PREDICTOR.alone_us(size, 100))


@pytest.mark.parametrize("model", MODELS)
@given(
    num_sms=st.integers(8, 132),
    batch=st.integers(1, 512),
    context=st.integers(1, 40_000),
    tokens=st.integers(1, 8192),
    cached=st.integers(0, 32_000),
)
def test_mixed_forwards_stay_between_their_parts(
    model, num_sms, batch, context, tokens, cached
) -> None:
    """Far from what was timed, too: about as long as either side at least, twice both at most.

    Times of up to 192 tokens alone hold pauses of the host.
    """
    predictor = SHIPPED[model]
    layers = predictor.sizes.num_layers
    chunk = Size((Chunk(tokens, cached),), layers, layers, True)
    rows = decode(batch, context)
    mixed = replace(chunk, batch=batch, total_kv=batch * context)
    sides = [predictor.alone_us(size, num_sms) for size in (chunk, rows)]
    us = predictor.alone_us(mixed, num_sms)
    least = 0.8 if tokens <= 192 else 0.88
    assert least * max(sides) <= us <= 2 * sum(sides)


def test_slowdowns() -> None:
    step, chunk = decode(64, 1024), prompt(2048)
    assert PREDICTOR.slowdown(step, 20, chunk, 80) == pytest.approx(1.5)
    assert PREDICTOR.slowdown(chunk, 80, step, 20) == pytest.approx(1.2)
    # Sharing all SMs costs each side twice besides.
    assert PREDICTOR.slowdown(step, 100, chunk, 100) == pytest.approx(3.0)


def test_what_ran_faster_beside_other_work_is_not_slowed() -> None:
    faster = next(timing for timing in TIMINGS if timing.beside_batch)
    predictor = TablePredictor(TIMINGS | {faster: 2000.0}, SIZES, PROFILE)
    assert predictor.slowdown(prompt(100), 80, decode(64, 10), 20) == 1.0


def test_kinds_that_were_not_timed() -> None:
    only = {Timing("decode", 20, batch=1, context=1024): 150.0}
    predictor = TablePredictor(only, SIZES, PROFILE)
    assert predictor.alone_us(prompt(2048), 80) > 0
    assert predictor.slowdown(prompt(2048), 80, decode(1, 9), 20) == 1.25
    prompts = {Timing("prefill", 80, prompts=1, tokens=2048): 3000.0}
    assert TablePredictor(prompts, SIZES, PROFILE).alone_us(decode(4, 9), 20) > 0


def test_another_model() -> None:
    assert PREDICTOR.for_model(SIZES) is PREDICTOR
    deeper = PREDICTOR.for_model(replace(SIZES, num_layers=8))
    assert deeper.sizes.num_layers == 8
    step = decode(64, 1024)
    assert 1.3 < deeper.alone_us(step, 20) / PREDICTOR.alone_us(step, 20) < 2
    assert PREDICTOR.alone_us(step, 20) == pytest.approx(400.0)


def test_the_same_model_in_fp8() -> None:
    """Times of bf16 over its rooflines hold: a step by its bytes, a prompt by its arithmetic."""
    small = PREDICTOR.for_model(replace(SIZES, linear_bytes=1))
    for size, num_sms in ((decode(4, 1024), 20), (prompt(2048), 80)):
        assert 0.45 < small.alone_us(size, num_sms) / PREDICTOR.alone_us(size, num_sms) < 0.95


sizes = st.builds(
    lambda new, cached, batch, context: (new, cached, batch, context),
    st.integers(0, 9000),
    st.integers(0, 9000),
    st.integers(0, 256),
    st.integers(1, 9000),
)


def as_size(new: int, cached: int, batch: int, context: int, layers: int) -> Size:
    chunks = (Chunk(new, cached),) if new else ()
    return Size(chunks, layers if new else 0, layers, bool(new), batch, batch * context)


@given(st.sampled_from(MODELS), st.integers(2, 132), sizes, st.integers(0, 3), st.integers(1, 500))
def test_more_work_takes_no_less(model, num_sms, least, which, more) -> None:
    predictor = SHIPPED[model]
    layers = predictor.sizes.num_layers
    grown = list(least)
    grown[which] += more
    small = predictor.alone_us(as_size(*least, layers), num_sms)
    large = predictor.alone_us(as_size(*grown, layers), num_sms)
    # Measured times over the roofline fall: by 23% from a step of one row to more of them on 130
    # SMs, by 13% where a mixed forward fills its tiles.
    assert large >= 0.75 * small >= 0


@given(st.integers(2, 132), sizes, st.integers(0, 3), st.integers(1, 500))
def test_the_roofline_of_more_work_is_no_lower(num_sms, least, which, more) -> None:
    predictor = SHIPPED["qwen3-8b"]
    layers = predictor.sizes.num_layers
    roofline = Roofline(predictor.sizes, predictor.profile)
    grown = list(least)
    grown[which] += more
    small, large = (
        sum(max(x.bytes_us, x.flops_us) for x in roofline.bounds(as_size(*s, layers), num_sms))
        for s in (least, tuple(grown))
    )
    assert large >= small * (1 - 1e-9) >= 0


@given(st.sampled_from(MODELS), sizes, sizes, st.integers(2, 130))
def test_a_slowdown_is_one_or_more(model, one, other, num_sms) -> None:
    layers = SHIPPED[model].sizes.num_layers
    size, beside = as_size(*one, layers), as_size(*other, layers)
    assert 1 <= SHIPPED[model].slowdown(size, num_sms, beside, 132 - num_sms) < 3


def test_what_contention_costs_on_an_h200() -> None:
    """The split that pays on 8B: decode 64 x 2048 on 24 SMs beside a prompt on 108."""
    predictor = TablePredictor.load()
    step, layers = decode(64, 2048), Size((Chunk(4096),), 36, 36, True)
    assert 1.4 < predictor.slowdown(step, 24, layers, 108) < 1.65
    assert predictor.alone_us(step, 24) < 15_000


def test_bad_requests() -> None:
    with pytest.raises(ArgumentError, match="no timings"):
        TablePredictor({}, SIZES, PROFILE)
    with pytest.raises(TableError, match=r"'gpt-5' on 'h200'.*qwen3-8b.*predictor_for"):
        TablePredictor.load("gpt-5")
    with pytest.raises(TableError, match=r"'h900'; there are \[\]"):
        TablePredictor.load("qwen3-8b", "h900")
    with pytest.raises(ProfileError, match=r"num_sms=101 is outside.*take 1 to 100"):
        PREDICTOR.alone_us(decode(1, 1), 101)
    assert set(MODELS) <= set(shipped("NVIDIA H200"))


@pytest.mark.parametrize("places", [(0, 100), (-3, 100), (32, 0), (133, 100), (32, 133)])
def test_a_slowdown_of_places_that_the_device_has_not(places: tuple[int, int]) -> None:
    predictor = TablePredictor.load("qwen3-8b")
    step, prompt = Size(batch=64, total_kv=64 * 2048), Size((Chunk(4096),), 36, 36, head=True)
    for asked in (predictor.slowdown, predictor.worst_us):
        with pytest.raises(ProfileError, match=r"is outside this profile .* take 1 to 132"):
            asked(step, places[0], prompt, places[1])


def test_a_guard_is_above_what_is_expected() -> None:
    step, chunk = decode(64, 1024), prompt(2048)
    expected = 1.5 * PREDICTOR.alone_us(step, 20)
    assert PREDICTOR.worst_us(step, 20, chunk, 80) == pytest.approx(GUARD * expected)


def shipped_text() -> tuple[dict[str, Any], str]:
    head, cells = shipped_path("qwen3-8b", "h200").read_text().split("\n", 1)
    return json.loads(head + "]}")["meta"], cells


def test_a_table_of_other_kernels_warns_once(tmp_path: Path) -> None:
    meta, cells = shipped_text()
    path = tmp_path / "model.json"
    head = {"format": "smkern-table", "version": 1, "meta": meta | {"kernels": "0123"}}
    path.write_text(json.dumps(head)[:-1] + ', "cells": [\n' + cells)
    with pytest.warns(UserWarning, match=r"model.json was measured with other kernels.*0123"):
        TablePredictor.read(path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TablePredictor.read(path)


def test_a_table_of_another_gpu_is_refused() -> None:
    with pytest.raises(TableError, match=r"was measured on 'NVIDIA H200', and this is 'small'"):
        TablePredictor.read(shipped_path("qwen3-8b", "h200"), PROFILE)


def test_broken_times_of_gemms(tmp_path: Path) -> None:
    meta, cells = shipped_text()
    path = tmp_path / "model.json"
    head = {"format": "smkern-table", "version": 1, "meta": meta | {"gemms": {"sms": [8]}}}
    path.write_text(json.dumps(head)[:-1] + ', "cells": [\n' + cells)
    with pytest.raises(TableError, match="broken times of GEMMs"):
        TablePredictor.read(path)
