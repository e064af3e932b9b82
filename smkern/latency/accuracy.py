"""How far latency models are from launches that they were not fitted to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol, runtime_checkable

from smkern.errors import ArgumentError, SmkernError
from smkern.latency.models import Factory
from smkern.latency.predictor import Predictor
from smkern.latency.sample import Sample
from smkern.latency.sizes import ModelSizes
from smkern.latency.work import Size
from smkern.profile import Profile

_KINDS = ("decode", "prefill", "mixed")


@runtime_checkable
class Guarded(Protocol):
    """A predictor with a bound on decode steps beside prompts."""

    def worst_us(self, size: Size, num_sms: int, beside: Size, beside_sms: int) -> float:
        """The longest that a decode step is expected to take beside prompts, microseconds."""
        ...


@dataclass(frozen=True, slots=True)
class Errors:
    """Absolute relative errors of predictions; 0.05 is 5%.

    Attributes:
        launches: How many were predicted.
        mean: Mean error.
        worst: Largest error.
    """

    launches: int
    mean: float
    worst: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> Errors:
        """Their number, mean and largest; all 0 where there are none."""
        if not errors:
            return cls(0, 0.0, 0.0)
        return cls(len(errors), sum(errors) / len(errors), max(errors))


@dataclass(frozen=True, slots=True)
class Accuracy:
    """A model's errors.

    Attributes:
        solo: Alone, by kind and "all".
        beside: Beside a neighbour, by kind and "all".
        guard_coverage: Share of decode steps beside prompts that took no longer than the guard
            says; None: the model has no guard, or there was no such step.
        guard_over: Mean of the guard over the truth, less 1, over the same steps.
        refused: Launches that the model would not predict.
        reason: Why, of the first of them.
    """

    solo: Mapping[str, Errors]
    beside: Mapping[str, Errors]
    guard_coverage: float | None = None
    guard_over: float | None = None
    refused: int = 0
    reason: str = ""

    def figures(self) -> dict[str, float]:
        """By the names that a results file gives them; shares and relative errors."""
        named: dict[str, float | None] = {}
        for name, errors in (("solo", self.solo["all"]), ("beside", self.beside["all"])):
            named[f"{name}_mape"] = errors.mean if errors.launches else None
            named[f"{name}_worst"] = errors.worst if errors.launches else None
        named["guard_coverage"], named["guard_over"] = self.guard_coverage, self.guard_over
        return {name: value for name, value in named.items() if value is not None}


def predict_us(model: Predictor, sample: Sample) -> float:
    """A model's time for a sample's launch, with its neighbour if it had one."""
    us = model.alone_us(sample.size, sample.num_sms)
    if sample.beside is None:
        return us
    return us * model.slowdown(sample.size, sample.num_sms, sample.beside, sample.beside_sms)


def accuracy(model: Predictor, samples: Iterable[Sample]) -> Accuracy:
    """A model's errors over samples; those beside a neighbour that is not known are left out."""
    errors: dict[tuple[bool, str], list[float]] = {}
    guards: list[float] = []
    refused: list[str] = []
    for sample in samples:
        if not sample.alone and sample.beside is None:
            continue
        try:
            ratio = predict_us(model, sample) / sample.us
            guards += _guard(model, sample)
        except SmkernError as error:
            refused.append(str(error))
            continue
        for kind in (sample.kind, "all"):
            errors.setdefault((sample.alone, kind), []).append(abs(ratio - 1))
    solo, beside = (
        {kind: Errors.of(errors.get((alone, kind), [])) for kind in (*_KINDS, "all")}
        for alone in (True, False)
    )
    coverage = sum(guard >= 1 for guard in guards) / len(guards) if guards else None
    over = sum(guards) / len(guards) - 1 if guards else None
    return Accuracy(solo, beside, coverage, over, len(refused), refused[0] if refused else "")


def error_table(models: Mapping[str, Predictor], samples: Iterable[Sample]) -> dict[str, Accuracy]:
    """The errors of each model over the same samples, none of which it was fitted to.

    Example:
        >>> from smkern.latency import Size, TablePredictor
        >>> ours = TablePredictor.load("qwen3-8b")
        >>> held_out = [Sample(Size(batch=48, total_kv=48 * 1500), 28, 9_700.0)]
        >>> table = error_table({"table": ours}, held_out)
        >>> table["table"].solo["decode"].launches
        1
    """
    samples = list(samples)
    return {name: accuracy(model, samples) for name, model in models.items()}


@dataclass(frozen=True, slots=True)
class LearningPoint:
    """A model fitted to some samples.

    Attributes:
        model: Its name.
        num_samples: Samples that it was fitted to.
        seed: Of their draw.
        accuracy: Its errors; None: it could not be fitted.
        reason: Why not.
    """

    model: str
    num_samples: int
    seed: int
    accuracy: Accuracy | None
    reason: str = ""


def learning_curve(
    factories: Mapping[str, Factory],
    samples: Sequence[Sample],
    held_out: Sequence[Sample],
    sizes: ModelSizes,
    profile: Profile,
    *,
    counts: Sequence[int],
    seeds: Sequence[int] = (0, 1, 2),
) -> list[LearningPoint]:
    """Errors over the number of samples that models are fitted to.

    Samples are shuffled once for each seed; a smaller number is a beginning of a larger one.

    Args:
        factories: Models by name, such as `MODELS`.
        samples: To draw from.
        held_out: To judge by.
        sizes: The LLM that they are of.
        profile: The device.
        counts: Numbers of samples.
        seeds: A draw for each.

    Raises:
        ArgumentError: a count is below 1 or above the number of samples.

    Source: Bullet section 3.2.4, Figure 11.
    """
    for count in counts:
        if not 1 <= count <= len(samples):
            raise ArgumentError(
                f"counts={list(counts)}: {count} of {len(samples)} samples cannot be drawn; take "
                f"1 to {len(samples)}"
            )
    points = []
    for seed in seeds:
        drawn = list(samples)
        Random(seed).shuffle(drawn)
        for count in counts:
            for name, factory in factories.items():
                try:
                    found = accuracy(factory(drawn[:count], sizes, profile), held_out)
                except SmkernError as error:
                    points.append(LearningPoint(name, count, seed, None, str(error)))
                else:
                    points.append(LearningPoint(name, count, seed, found))
    return points


def format_table(table: Mapping[str, Accuracy]) -> str:
    """Errors as text, a model a line: mean and worst in percent, alone and beside, by kind."""
    groups = [("alone", kind) for kind in (*_KINDS, "all")]
    groups += [("beside", kind) for kind in ("decode", "prefill")]
    heads = [f"{where} {kind}" for where, kind in groups]
    lines = [f"{'':22}" + "".join(f"{head:>17}" for head in [*heads, "guard", "refused"])]
    for name, found in table.items():
        cells = []
        for where, kind in groups:
            errors = (found.solo if where == "alone" else found.beside)[kind]
            cells.append(f"{100 * errors.mean:.1f} / {100 * errors.worst:.1f}")
            if not errors.launches:
                cells[-1] = "-"
        covered, over = found.guard_coverage, found.guard_over
        if covered is None or over is None:
            cells.append("-")
        else:
            cells.append(f"{100 * covered:.1f}, {100 * over:+.1f}")
        cells.append(str(found.refused))
        lines.append(f"{name:22}" + "".join(f"{cell:>17}" for cell in cells))
    return "\n".join(lines)


def _guard(model: Predictor, sample: Sample) -> list[float]:
    """The guard over the truth, where it speaks of this launch."""
    beside = sample.beside
    if sample.kind != "decode" or beside is None or not beside.chunks:
        return []
    if not isinstance(model, Guarded):
        return []
    return [model.worst_us(sample.size, sample.num_sms, beside, sample.beside_sms) / sample.us]
