"""Sums over GPUs that share a model: the formula, measured times, and what a launch adds up to."""

from __future__ import annotations

import pytest

from smkern.errors import ArgumentError
from smkern.latency import Chunk, Ring, Size
from smkern.latency.sizes import ModelSizes
from smkern.models import Shard, preset
from smkern.runtime import SimDevice
from smkern.runtime.device import Work
from smkern.runtime.interleaver import Interleaver
from smkern.runtime.sim.rates import ConstantRates

FOUR = Ring(4, hidden_size=1000, vocab_size=5000, nvlink_tbps=0.5, startup_us=2.0)


def test_the_formula_by_hand() -> None:
    # six starts of 2 us; three quarters of a million bytes twice, at 0.5 million bytes a us
    assert FOUR.all_reduce_us(1e6) == pytest.approx(6 * 2.0 + 1.5 / 0.5)
    assert FOUR.all_reduce_us(0) == 0
    assert Ring(1, 1000, 5000).all_reduce_us(1e6) == 0


def test_measured_times_and_lines_between_them() -> None:
    ring = Ring(2, 1000, 5000, measured=((1000, 10.0), (3000, 20.0)))
    assert [ring.all_reduce_us(n) for n in (1, 1000, 2000, 3000, 6000)] == [10, 10, 15, 20, 40]


def test_sums_of_launches() -> None:
    def hidden(tokens: int) -> float:
        return FOUR.all_reduce_us(2 * tokens * 1000)

    def logits(rows: int) -> float:
        return 3 * 2.0 + 0.75 * 2 * rows * 5000 / 0.5 / 1e6  # three starts, three quarters once

    step = Size(num_layers=3, batch=7, total_kv=70)
    assert FOUR.launch_us(step) == pytest.approx(7 * hidden(7) + logits(7))
    layers = Size((Chunk(20), Chunk(5, 3)), layers=2, num_layers=3)
    assert FOUR.launch_us(layers) == pytest.approx(4 * hidden(25))
    last = Size((Chunk(20), Chunk(5, 3)), layers=1, num_layers=3, head=True)
    assert FOUR.launch_us(last) == pytest.approx(hidden(25) + 2 * hidden(2) + logits(2))
    assert FOUR.launch_us(Size()) == 0


def test_a_simulated_device_adds_the_sums() -> None:
    size = Size(num_layers=3, batch=7, total_kv=70)
    times = []
    for tp in (None, FOUR):
        device = SimDevice(132, (32,), ConstantRates(), tp=tp)
        step = Interleaver(device).launch("decode", Work("decode", lambda place: None, size))
        device.wait([step.event])
        times.append(device.now_us())
    assert times[1] - times[0] == pytest.approx(FOUR.launch_us(size))


def test_parts_of_a_model_as_ranks_have_them() -> None:
    for name in ("qwen3-8b", "qwen3-32b", "qwen3-30b-a3b"):
        config = preset(name)
        for tp in (1, 2, 4, 8, 16):
            part = Shard(0, tp).config(config)
            want = ModelSizes.of(part.replace(vocab_size=config.vocab_size // tp))
            assert ModelSizes.of(config).sharded(tp) == want, (name, tp)
    with pytest.raises(ArgumentError, match="tp=3 does not divide 4 key heads"):
        ModelSizes.of(config).sharded(3)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"gpus": 0}, "gpus=0"),
        ({"hidden_size": 10**400}, "hidden_size="),
        ({"nvlink_tbps": 0.0}, "nvlink_tbps=0.0"),
        ({"startup_us": -1.0}, "startup_us=-1.0"),
        ({"measured": ((2, 1.0), (1, 1.0))}, "ascending"),
        ({"measured": ((2, 0.0),)}, "ascending"),
    ],
)
def test_what_cannot_be(changes: dict[str, object], named: str) -> None:
    given = {"gpus": 2, "hidden_size": 8, "vocab_size": 8}
    with pytest.raises(ArgumentError, match=named):
        Ring(**given | changes)  # type: ignore[arg-type]


def test_sums_without_a_predictor() -> None:
    with pytest.raises(ArgumentError, match="one GPU's part"):
        SimDevice(132, tp=FOUR)
    with pytest.raises(ArgumentError, match="tp=2"):
        SimDevice(132, predictor=ConstantRates(), tp=2)  # type: ignore[arg-type]
