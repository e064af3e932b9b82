"""What is counted while serving, against sums made by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smkern.latency import Chunk, Size
from smkern.latency.cost import Costs, Load, kernels_of, total_bytes, total_flops
from smkern.models.presets import preset
from smkern.policies import Decision
from smkern.runtime.place import LANES, Place
from smkern.runtime.timeline.meters import ASKED, L2_BYTES, Distribution, Rate, Samples
from smkern.runtime.timeline.stats import Stats, StatsMeter
from tests.runtime.timeline.timelines import NUM_SMS, Script, waiting

QWEN = preset("qwen3-8b")
DECODE_16, PREFILL_16 = (Place.of(lane, 16, NUM_SMS) for lane in ("decode", "prefill"))
DECODE_32, PREFILL_32 = (Place.of(lane, 32, NUM_SMS) for lane in ("decode", "prefill"))


def test_nothing_happened():
    stats = StatsMeter(Script().timeline).stats()
    assert stats == Stats(rates=dict.fromkeys(LANES, Rate(0, 0, 0)))
    assert stats.bubble_ratio == 0


def test_waits_of_two_requests():
    """The gap from the first token to the second counts as every other."""
    counts = StatsMeter(Script().timeline)
    counts.arrived(1, 0.0, prompt_tokens=100)
    counts.arrived(2, 50.0, prompt_tokens=10)
    counts.delivered([1], 300.0)
    counts.delivered([1, 2], 340.0)
    counts.delivered([1, 2], 360.0)
    counts.finished(1, 360.0, "length")
    counts.finished(2, 400.0, "cancelled")
    stats = counts.stats(1000.0, preemptions=3)
    assert (stats.ttft_us.count, stats.ttft_us.mean) == (2, (300 + 290) / 2)
    assert (stats.tbt_us.count, stats.tbt_us.max, stats.tbt_us.p50) == (3, 40, 20)
    assert (stats.requests, stats.prompt_tokens, stats.tokens) == (2, 110, 5)
    assert stats.finished == {"length": 1, "cancelled": 1}
    assert stats.preemptions == 3
    assert stats.elapsed_us == 400  # nothing is there any more
    assert stats.tokens_per_s == pytest.approx(5 / 400e-6)
    assert repr(stats) == (
        "Stats(5 tokens in 0.000 s, 12,500 a second; 2 requests, finished: 1 length, 1 cancelled; "
        "TTFT p50 0.29 ms, p99 0.30 ms; TBT p50 0.02 ms, p99 0.04 ms; 0.0% bubbles, 0 switches, "
        "3 preemptions)"
    )


def test_time_goes_on_while_requests_are_there():
    counts = StatsMeter(Script().timeline)
    counts.arrived(1, 100.0)
    assert counts.stats(600.0).elapsed_us == 500


def test_two_tokens_at_once_are_a_gap_of_nothing():
    counts = StatsMeter(Script().timeline)
    counts.arrived(1, 0.0)
    counts.delivered([1, 1], 10.0)
    assert (counts.stats().tbt_us.count, counts.stats().tbt_us.max) == (1, 0)


def test_a_request_that_never_came_may_leave():
    """Cancelled before its time of arrival."""
    counts = StatsMeter(Script().timeline)
    counts.finished(5, 1.0, "cancelled")
    counts.arrived(6, 2.0)
    assert counts.stats(10.0).elapsed_us == 8


def test_with_the_last_request_the_lanes_have_no_work():
    script = Script()
    counts = StatsMeter(script.timeline)
    counts.arrived(1, 0.0)
    script.decided(0.0, Decision(), running_kv=(5,))
    script.ran("decode", 0, 10)
    counts.finished(1, 10.0, "stop")
    counts.arrived(2, 900.0)
    script.decided(900.0, Decision(), running_kv=(5,))
    script.ran("decode", 900, 910)
    assert counts.stats().bubbles.decode.bubble_us == 0
    assert counts.stats().muxwise_bubble_ratio == pytest.approx(890 / 910)


def switches(*launches, at_us=100.0):
    """After a change from 16 to 32 SMs; launches: lane, place, launched."""
    script = Script()
    counts = StatsMeter(script.timeline)
    script.decided(0.0, Decision(rung=16))
    script.ran("decode", 1, 2, place=DECODE_16)
    script.ran("prefill", 1, 2, place=PREFILL_16)
    script.decided(at_us, Decision(rung=32))
    for lane, place, launched_us in launches:
        script.ran(lane, launched_us, launched_us + 1, place=place)
    return counts.stats().switches


def test_a_switch_is_over_when_both_sides_have_moved():
    found = switches(
        ("decode", DECODE_16, 101), ("prefill", PREFILL_32, 104), ("decode", DECODE_32, 160)
    )
    assert found.count == 2  # from the whole device to 16, too
    assert found.host_us.max == 4
    assert found.handover_us.max == 60


def test_a_switch_on_its_way_counts_without_times():
    found = switches(("prefill", PREFILL_32, 104))
    assert (found.count, found.host_us.count) == (2, 1)


def test_a_side_without_work_does_not_keep_a_switch_open():
    script = Script()
    counts = StatsMeter(script.timeline)
    script.decided(0.0, Decision(rung=32))
    script.ran("decode", 5, 9, place=DECODE_32)
    script.decided(20.0, Decision(rung=None))
    script.ran("decode", 21, 22)
    found = counts.stats().switches
    assert (found.count, found.host_us.count) == (2, 1)
    assert found.handover_us.max == 5


def test_launches_from_before_a_decision_are_no_moves():
    found = switches(("decode", DECODE_32, 99), ("prefill", PREFILL_32, 102), at_us=100)
    assert found.host_us.count == 1


def test_a_launch_may_outlast_the_decisions_that_are_remembered():
    script = Script()
    counts = StatsMeter(script.timeline)
    script.decided(0.0, Decision(rung=32))
    for number in range(ASKED + 1):
        script.decided(10.0 + number, Decision(rung=32))
    script.ran("prefill", 5, 900, launched_us=4, place=PREFILL_32)
    script.decided(901.0, Decision(rung=None))
    found = counts.stats().switches
    assert (found.count, found.host_us.count, found.host_us.max) == (2, 1, 4)


def test_rates_are_those_of_the_sizes():
    script = Script()
    counts = StatsMeter(script.timeline, config=QWEN)
    step = Size(batch=64, total_kv=64 * 2048, num_layers=36)
    script.ran("decode", 0, 10_000, size=step)
    script.ran("prefill", 0, 500)  # says nothing of itself
    stats = counts.stats()
    kernels = kernels_of(QWEN, Load(64, 64, 64 * 2048, 64 * 2048), l2_bytes=L2_BYTES)
    decode = stats.rates["decode"]
    assert decode.flops == total_flops(kernels)
    assert decode.bytes_moved == total_bytes(kernels)
    assert decode.tbps == pytest.approx(total_bytes(kernels) / 10e-3 / 1e12)
    assert stats.rates["prefill"].flops == 0
    assert stats.rates["prefill"].tflops == 0


def test_layer_groups_add_up_to_the_whole_forward():
    costs = Costs(QWEN, l2_bytes=L2_BYTES)
    chunks = (Chunk(512, 100), Chunk(30))
    groups = [Size(chunks, 9, 36, head=first == 27) for first in (0, 9, 18, 27)]
    whole = costs.of(Size(chunks, 36, 36, head=True))
    parts = [costs.of(group) for group in groups]
    assert sum(part.flops for part in parts) == whole.flops
    assert sum(part.bytes_moved for part in parts) == whole.bytes_moved


def test_a_mixed_forward_reads_its_weights_once():
    costs = Costs(QWEN, l2_bytes=L2_BYTES)
    chunk, batch = Size((Chunk(256),), 36, 36, head=True), Size(batch=8, total_kv=800)
    mixed = costs.of(Size((Chunk(256),), 36, 36, head=True, batch=8, total_kv=800))
    assert mixed.flops == costs.of(chunk).flops + costs.of(batch).flops
    assert mixed.bytes_moved < costs.of(chunk).bytes_moved + costs.of(batch).bytes_moved


def test_pairs_of_chunks_and_rows():
    load = Load.of(Size((Chunk(3, 2),), 1, 1, head=True, batch=2, total_kv=20))
    assert load == (5, 3, 25, (3 + 4 + 5) + 20, True)


@pytest.mark.parametrize(("layers", "head"), [(36, True), (36, False), (1, True)])
def test_the_last_layer_computes_rows_of_logits_behind_attention(layers: int, head: bool):
    chunks = (Chunk(500), Chunk(12))
    costs = Costs(QWEN, l2_bytes=L2_BYTES)
    behind = 4096 * (4096 + 3 * 12288)  # weights of o, gate, up and down
    drawn = 2 * (behind + 151_936 * 4096) if head else 0
    before = costs.of(Size(chunks, layers, 37)).flops
    found = costs.of(Size(chunks, layers, 36, head=head)).flops
    assert found == before - 2 * 512 * behind + 2 * drawn


values = st.lists(st.floats(0, 1e9), min_size=1, max_size=60)


@given(values, st.sampled_from([0, 5, 100]))
def test_percentiles_of_any_values(sample, exact):
    samples = Samples(exact)
    for value in sample:
        samples.add(value)
    found = samples.distribution()
    assert found.count == len(sample)
    assert found.max == max(sample)
    assert found.mean == pytest.approx(math.fsum(sample) / len(sample))
    for percent, got in ((50, found.p50), (90, found.p90), (99, found.p99)):
        wanted = sorted(sample)[max(0, math.ceil(len(sample) * percent / 100 - 1e-9) - 1)]
        if exact >= len(sample):
            assert got == wanted
        else:
            assert got == pytest.approx(wanted, rel=0.0051, abs=1e-3)


def test_samples_of_nothing():
    assert Samples().distribution() == Distribution()


def test_memory_of_samples_ends_to_grow():
    samples = Samples(exact=10)
    for i in range(10_000):
        samples.add(1000.0 + i % 100)
    assert samples._values is None
    assert len(samples._bins) < 20


def test_blocked_requests_make_no_bubbles():
    script = Script()
    counts = StatsMeter(script.timeline)
    script.decided(0.0, Decision(rung=32), waiting=waiting(1, pages=9), free_pages=1)
    script.ran("prefill", 0, 1)
    script.ran("prefill", 100, 101)
    assert counts.stats().bubbles.prefill.bubble_us == 0
