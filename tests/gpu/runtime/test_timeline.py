"""A timeline of a GPU's two lanes: the device's own times, in order, on the host's clock."""

from __future__ import annotations

from itertools import pairwise

import torch

import smkern
from smkern.latency import Size
from smkern.runtime.cuda_device import CudaDevice
from smkern.runtime.device import Work
from smkern.runtime.interleaver import Interleaver
from smkern.runtime.place import LANES, Place
from smkern.runtime.timeline.perfetto import load
from smkern.runtime.timeline.plot import draw
from smkern.runtime.timeline.timeline import Timeline

STEPS = 40
CYCLES = 2_000_000
"""About a millisecond of an SM's clock."""
APART_US = 100
"""The clocks of host and device are told from each other to some microseconds."""


def sleep(place: Place) -> None:
    torch.cuda._sleep(CYCLES)


def test_both_lanes_with_the_device_s_times(tmp_path):
    torch.cuda._sleep(1)  # loads it
    with smkern.ladder([16]) as ladder:
        device = CudaDevice(ladder)
        timeline = Timeline(device.num_sms, clock=device.now_us)
        lanes = Interleaver(device, on_launch=timeline.launched, on_over=timeline.over)
        lanes.aim(16)
        for _ in range(STEPS):
            for lane in LANES:
                while not lanes.can_launch(lane):
                    lanes.wait()
                    lanes.poll()
                lanes.launch(lane, Work(lane, sleep, Size(batch=1, total_kv=1)))
        lanes.drain()
        device.synchronize()
        trace = timeline.trace()
    assert len(trace.spans) == 2 * STEPS
    assert all(span.is_exact for span in trace.spans)
    for lane in LANES:
        spans = trace.lane(lane)
        assert {span.place.num_sms for span in spans} == {Place.of(lane, 16, trace.num_sms).num_sms}
        assert [span.number for span in spans] == sorted(span.number for span in spans)
        for span in spans:
            assert span.begin_us >= span.launched_us - APART_US
            assert span.begin_us <= span.end_us <= span.seen_us + APART_US
        for before, after in pairwise(spans):
            assert after.begin_us >= before.end_us - APART_US
    decode, prefill = (trace.lane(lane)[STEPS // 2] for lane in LANES)
    assert decode.begin_us < prefill.end_us
    assert prefill.begin_us < decode.end_us
    assert len(load(timeline.save(tmp_path / "t.json")).spans) == 2 * STEPS
    assert draw(trace, tmp_path / "t.png").exists()
