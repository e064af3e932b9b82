"""Errors of latency models, what their guards cover, and the learning curve."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from smkern.errors import ArgumentError, LatencyError
from smkern.latency import Chunk, Size
from smkern.latency.accuracy import accuracy, error_table, format_table, learning_curve
from smkern.latency.models import MODELS
from smkern.latency.predictor import Predictor
from smkern.latency.sample import Sample
from smkern.latency.sizes import ModelSizes
from smkern.latency.work import Kind
from smkern.profile import Profile
from tests.latency.small import PROFILE, SIZES

LAYERS = 4
STEP = Size(layers=LAYERS, num_layers=LAYERS, batch=2, total_kv=20)
PROMPT = Size((Chunk(8),), LAYERS, LAYERS, True)
MIXED = Size((Chunk(8),), LAYERS, LAYERS, True, 2, 20)


class Constant:
    """100 us, twice as long beside others, three times where it guards; no fewer than 10 SMs."""

    def alone_us(self, size: Size, num_sms: int) -> float:
        if num_sms < 10:
            raise LatencyError(f"no launch on {num_sms} SMs")
        return 100.0

    def slowdown(self, size: Size, num_sms: int, beside: Size, beside_sms: int) -> float:
        return 2.0


class WithGuard(Constant):
    def worst_us(self, size: Size, num_sms: int, beside: Size, beside_sms: int) -> float:
        return 300.0


SAMPLES = [
    Sample(STEP, 20, 80.0),
    Sample(STEP, 20, 125.0),
    Sample(PROMPT, 20, 100.0),
    Sample(MIXED, 20, 50.0),
    Sample(STEP, 20, 250.0, PROMPT, 80),
    Sample(STEP, 20, 320.0, PROMPT, 80),
    Sample(PROMPT, 80, 160.0, STEP, 20),
]


def test_errors_by_hand() -> None:
    found = accuracy(Constant(), SAMPLES)
    # 100/80, 100/125, 100/100, 100/50
    assert found.solo["decode"].mean == pytest.approx((0.25 + 0.2) / 2)
    assert found.solo["decode"].worst == pytest.approx(0.25)
    assert found.solo["all"].mean == pytest.approx((0.25 + 0.2 + 0.0 + 1.0) / 4)
    assert (found.solo["all"].worst, found.solo["all"].launches) == (pytest.approx(1.0), 4)
    # 200/250, 200/320, 200/160
    assert found.beside["decode"].mean == pytest.approx((0.2 + 0.375) / 2)
    assert found.beside["prefill"].mean == pytest.approx(0.25)
    assert found.beside["mixed"].launches == 0
    assert found.guard_coverage is None


def test_a_guard_by_hand() -> None:
    found = accuracy(WithGuard(), SAMPLES)
    # 300 covers 250, not 320
    assert found.guard_coverage == 0.5
    assert found.guard_over == pytest.approx((300 / 250 + 300 / 320) / 2 - 1)
    assert found.figures() == pytest.approx(
        {
            "solo_mape": 0.3625,
            "solo_worst": 1.0,
            "beside_mape": (0.2 + 0.375 + 0.25) / 3,
            "beside_worst": 0.375,
            "guard_coverage": 0.5,
            "guard_over": found.guard_over,
        }
    )


def test_what_was_not_measured_has_no_figure() -> None:
    assert accuracy(WithGuard(), SAMPLES[:2]).figures().keys() == {"solo_mape", "solo_worst"}


def test_a_neighbour_that_nobody_wrote_down_is_left_out() -> None:
    unknown = Sample(STEP, 20, 1e9, None, 80)
    assert accuracy(WithGuard(), [*SAMPLES, unknown]) == accuracy(WithGuard(), SAMPLES)


def test_a_launch_that_a_model_refuses_is_counted() -> None:
    found = accuracy(Constant(), [*SAMPLES, Sample(STEP, 8, 1.0), Sample(STEP, 9, 1.0)])
    assert found.solo == accuracy(Constant(), SAMPLES).solo
    assert (found.refused, found.reason) == (2, "no launch on 8 SMs")


def test_the_table_as_text_has_a_line_a_model() -> None:
    text = format_table(error_table({"plain": Constant(), "guarded": WithGuard()}, SAMPLES))
    head, plain, guarded = text.splitlines()
    assert [len(head), len(plain)] == [len(guarded), len(guarded)]
    assert "22.5 / 25.0" in plain
    assert "50.0, +6.9" in guarded
    assert "50.0, +6.9" not in plain


def fewest(samples: Sequence[Sample], sizes: ModelSizes, profile: Profile) -> Predictor:
    """Needs three samples."""
    if len(samples) < 3:
        raise LatencyError(f"{len(samples)} samples")
    return Constant()


def test_learning_curves_have_a_point_for_each_count_and_seed() -> None:
    seen: list[list[Sample]] = []

    def watching(samples: Sequence[Sample], sizes: ModelSizes, profile: Profile) -> Predictor:
        seen.append(list(samples))
        return Constant()

    factories = {"watching": watching, "fewest": fewest}
    points = learning_curve(
        factories, SAMPLES, SAMPLES, SIZES, PROFILE, counts=(2, 5), seeds=(3, 4)
    )
    assert [(p.model, p.num_samples, p.seed) for p in points] == [
        (model, count, seed) for seed in (3, 4) for count in (2, 5) for model in factories
    ]
    # a smaller draw begins a larger one, another seed draws others, and the same seed the same
    assert seen[0] == seen[1][:2]
    assert seen[2] != seen[0]
    again = learning_curve(factories, SAMPLES, SAMPLES, SIZES, PROFILE, counts=(2, 5), seeds=(3, 4))
    assert again == points
    assert seen[:4] == seen[4:]
    failed = points[1]
    assert (failed.accuracy, failed.reason) == (None, "2 samples")
    assert points[3].accuracy == accuracy(Constant(), SAMPLES)


@pytest.mark.parametrize("count", [0, len(SAMPLES) + 1])
def test_more_samples_than_there_are_cannot_be_drawn(count: int) -> None:
    with pytest.raises(ArgumentError, match=f"{count} of 7 samples cannot be drawn; take 1 to 7"):
        learning_curve(MODELS, SAMPLES, SAMPLES, SIZES, PROFILE, counts=(count,))


def us_of(size: Size, num_sms: int) -> float:
    """A truth that every model can be fitted to."""
    prompts = sum(0.01 * n * n + 0.02 * n * r + 30 * n for n, r in size.chunks)
    return (500 + prompts + 40 * size.batch + 0.05 * size.total_kv) * 100 / num_sms


def measured() -> list[Sample]:
    chunks = [(64, 0), (512, 0), (2048, 0), (256, 2048), (1024, 512)]
    prompts = [Size((Chunk(*chunk),), LAYERS, LAYERS, True) for chunk in chunks]
    steps = [
        Size(layers=LAYERS, num_layers=LAYERS, batch=batch, total_kv=batch * context)
        for batch, context in [(1, 512), (8, 2048), (64, 512), (64, 4096)]
    ]
    alone = [Sample(size, sms, us_of(size, sms)) for size in prompts + steps for sms in (20, 80)]
    for step in steps:
        for prompt in prompts:
            alone.append(Sample(step, 20, 1.25 * us_of(step, 20), prompt, 80))
            alone.append(Sample(prompt, 80, 1.1 * us_of(prompt, 80), step, 20))
    return alone


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_made_from_samples_and_predicts(name: str) -> None:
    samples = measured()
    model = MODELS[name](samples, SIZES, PROFILE)
    found = accuracy(model, samples)
    assert found.refused == 0
    assert found.solo["all"].launches + found.beside["all"].launches == len(samples)
    for sample in samples:
        if sample.beside is not None:
            args = (sample.size, sample.num_sms, sample.beside, sample.beside_sms)
            assert model.slowdown(*args) >= 1.0


@pytest.mark.parametrize(("name", "most"), [("bullet", 1e-9), ("drift", 1e-6), ("muxwise", 1e-6)])
def test_models_that_hold_the_truth_find_it(name: str, most: float) -> None:
    assert accuracy(MODELS[name](measured(), SIZES, PROFILE), measured()).solo["all"].worst < most


def test_what_a_model_knows_of_contention_shows_beside_a_neighbour() -> None:
    table = error_table(
        {name: make(measured(), SIZES, PROFILE) for name, make in MODELS.items()}, measured()
    )

    def error(name: str, kind: Kind) -> float:
        return table[name].beside[kind].mean

    assert error("bullet", "decode") < 1e-9
    assert error("bullet", "prefill") < 1e-9
    assert error("contention_ignored", "decode") == pytest.approx(0.2)
    assert error("drift", "decode") == pytest.approx(0.2, rel=1e-4)
    # the guard's slowdown of decode is exact here; prompts have none
    assert error("muxwise", "decode") < 1e-6
    assert error("muxwise", "prefill") == pytest.approx(1 - 1 / 1.1, rel=1e-4)
    assert table["muxwise"].guard_coverage == 1.0
