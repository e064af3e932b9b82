"""Fit the cost model's constants to measured candidates: `python -m smkern.autotune.fit RAW`.

Least squares over the logarithms of the constants (Levenberg-Marquardt, numeric derivatives). A
residual is log(predicted / measured); its part that differs within a cell counts more than the
part that all of a cell share, because only the former changes what is picked.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import click
import numpy as np

from smkern.atomic import write_whole
from smkern.autotune import raw
from smkern.autotune.raw import GemmMeasurement
from smkern.measure.gemm import SHAPES
from smkern.profile import Profile, load_profile
from smkern.tuning.config import STREAM_K
from smkern.tuning.constraints import LIBRARIES, OPTIONAL, num_ctas, num_tiles
from smkern.tuning.cost_constants import DEFAULTS, FITTED, NAMES, CostConstants, variant_key
from smkern.tuning.cost_model import Ceilings, Estimate, streamed_tiles
from smkern.tuning.table import CellKey

SHARED_WEIGHT = 0.3
"""Weight of a cell's mean error against the differences within it."""
CLIP = 0.5
"""Residuals count up to this: a candidate that spilled or failed to overlap is no law."""
FIXED = "blend"
"""The constant that stays as it is."""
FEW = 4
"""Iterations that are enough from constants fitted to nearly the same."""
PRIOR = 15
"""Measurements of no difference that a variant's own are averaged with: few say little."""
AS_GOOD = 1.03
OFTEN = 0.003
"""A variant is kept that was `AS_GOOD` as the best in this share of the cells, and twice at least:
of 188 that ever were, 106 lose 0.05% in geomean, and choosing among them takes half the time."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Loss of the model's picks against the best measured candidates of the same cells."""

    cells: int
    geomean: float
    worst: float
    worst_cell: CellKey | None


def key_of(item: GemmMeasurement) -> CellKey:
    return CellKey.of(item.problem, item.budget)


def usable(measurements: Sequence[GemmMeasurement]) -> list[GemmMeasurement]:
    """Results of our own kernels; of repeats the last."""
    others, last = LIBRARIES + OPTIONAL, dict[tuple[Any, ...], GemmMeasurement]()
    for item in measurements:
        if item.error is None and item.config.kernel not in others:
            last[key_of(item), item.config] = item
    return list(last.values())


def by_cell(measurements: Sequence[GemmMeasurement]) -> dict[CellKey, list[int]]:
    """Cell to the indices of its measurements."""
    cells: dict[CellKey, list[int]] = {}
    for index, item in enumerate(measurements):
        cells.setdefault(key_of(item), []).append(index)
    return cells


def predictions(
    measurements: Sequence[GemmMeasurement], profile: Profile, constants: CostConstants
) -> np.ndarray[Any, Any]:
    """Predicted us of every measurement."""
    ceilings: dict[Any, Ceilings] = {}
    found = np.empty(len(measurements))
    for index, item in enumerate(measurements):
        if item.budget not in ceilings:
            ceilings[item.budget] = Ceilings(item.budget, profile, constants)
        estimate = Estimate(
            item.problem, item.config, ceilings[item.budget], constants, item.config.group_m
        )
        found[index] = estimate.launch_us(
            item.config.split, item.config.max_ctas, item.config.overlap
        )
    return found


def gap(measurements: Sequence[GemmMeasurement], profile: Profile, constants: CostConstants) -> Gap:
    """Geomean, over cells, of the time of the model's pick over the best measured time."""
    predicted = predictions(measurements, profile, constants)
    losses: list[tuple[float, CellKey]] = []
    for key, indices in by_cell(measurements).items():
        picked = min(indices, key=lambda index: predicted[index])
        best = min(measurements[index].us for index in indices)
        losses.append((measurements[picked].us / best, key))
    if not losses:
        return Gap(0, 1.0, 1.0, None)
    worst, worst_cell = max(losses)
    return Gap(len(losses), geometric_mean(x for x, _ in losses), worst, worst_cell)


def residuals(
    measurements: Sequence[GemmMeasurement],
    cells: Mapping[CellKey, Sequence[int]],
    profile: Profile,
    constants: CostConstants,
) -> np.ndarray[Any, Any]:
    """Differences within cells, then the weighted means of the cells."""
    measured = np.array([item.us for item in measurements])
    error = np.log(predictions(measurements, profile, constants) / measured)
    shared = np.empty(len(cells))
    for number, indices in enumerate(cells.values()):
        rows = np.fromiter(indices, dtype=np.intp)
        mean = error[rows].mean()
        error[rows] -= mean
        shared[number] = SHARED_WEIGHT * mean * np.sqrt(len(rows))
    return CLIP * np.tanh(np.concatenate([error, shared]) / CLIP)


def fit(
    measurements: Sequence[GemmMeasurement],
    profile: Profile,
    start: CostConstants = DEFAULTS,
    *,
    names: Sequence[str] = NAMES,
    iterations: int = 15,
) -> CostConstants:
    """The constants `names`, fitted; the others stay. Damped Gauss-Newton on their logarithms."""
    if not measurements:
        return start
    cells = by_cell(measurements)

    def constants_at(point: np.ndarray[Any, Any]) -> CostConstants:
        return replace(start, variants={}, **dict(zip(names, np.exp(point).tolist(), strict=True)))

    def residuals_at(point: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return residuals(measurements, cells, profile, constants_at(point))

    origin = point = np.log([getattr(start, name) for name in names])
    error, damping, delta = residuals_at(point), 1e-2, 1e-3
    for _ in range(iterations):
        steps = delta * np.eye(len(point))
        jacobian = np.stack([(residuals_at(point + step) - error) / delta for step in steps], 1)
        normal, slope = jacobian.T @ jacobian, jacobian.T @ error
        before = float(error @ error)
        while damping < 1e6:
            scale = np.diag(damping * (np.diag(normal) + 1e-3 * len(error)))
            # no constant moves by more than a factor of 4 from where it started
            moved = np.clip(
                point - np.linalg.lstsq(normal + scale, slope)[0], origin - 1.4, origin + 1.4
            )
            trial = residuals_at(moved)
            if float(trial @ trial) < before:
                break
            damping *= 4
        else:
            break
        point, error, damping = moved, trial, damping / 4
        if before - float(error @ error) < 1e-5 * before:
            break
    found = constants_at(point)
    return replace(found, variants=variants_of(measurements, profile, found))


def variants_of(
    measurements: Sequence[GemmMeasurement], profile: Profile, constants: CostConstants
) -> dict[str, tuple[float, float]]:
    """Logarithm of each variant's measured over modelled time: of whole loops, and of cut ones.

    Differences within cells count, averaged with `PRIOR`; variants that never are `AS_GOOD` as the
    best of a cell are left out, so that nothing chooses them.
    """
    flat = replace(constants, variants={})
    error = np.log([item.us for item in measurements] / predictions(measurements, profile, flat))
    cells = [np.fromiter(rows, dtype=np.intp) for rows in by_cell(measurements).values()]
    keys = {name: n for n, name in enumerate(dict.fromkeys(map(_variant, measurements)))}
    which = np.array([keys[_variant(item)] for item in measurements])
    cut = np.array([cut_share(item) for item in measurements])

    def sums(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.bincount(which, values)

    whole_sq, both, cut_sq = sums((1 - cut) ** 2), sums(cut * (1 - cut)), sums(cut**2)
    whole_sq, cut_sq = whole_sq + PRIOR, cut_sq + PRIOR
    whole, cuts = np.zeros(len(keys)), np.zeros(len(keys))
    for _ in range(20):  # the means of cells and the two numbers of each variant, by turns
        left = error - whole[which] * (1 - cut) - cuts[which] * cut
        for rows in cells:
            left[rows] = error[rows] - left[rows].mean()
        first, second = sums(left * (1 - cut)), sums(left * cut)
        scale = whole_sq * cut_sq - both**2
        whole = (first * cut_sq - second * both) / scale
        cuts = (second * whole_sq - first * both) / scale
    times = np.array([item.us for item in measurements])
    good = Counter(
        _variant(measurements[row])
        for rows in cells
        for row in rows[times[rows] <= AS_GOOD * times[rows].min()]
    )
    return {
        key: (float(whole[keys[key]]), float(cuts[keys[key]]))
        for key in sorted(good)
        if good[key] >= max(2, OFTEN * len(cells)) and key.split(":")[0] in FITTED
    }


def _variant(item: GemmMeasurement) -> str:
    return variant_key(item.config)


def cut_share(item: GemmMeasurement) -> float:
    """The share of a measurement's tiles whose K loops are cut."""
    if item.config.split != STREAM_K:
        return float(item.config.split > 1)
    tiles = num_tiles(item.problem, item.config)
    return streamed_tiles(tiles, num_ctas(item.config, item.budget)) / tiles


def unmeasured_picks(
    measurements: Sequence[GemmMeasurement], profile: Profile, constants: CostConstants
) -> int:
    """Cells where the model would now pick a configuration that was never measured there."""
    from smkern.tuning.select import rank

    count = 0
    for indices in by_cell(measurements).values():
        first = measurements[indices[0]]
        ranked = rank(first.problem, first.budget, profile, constants=constants, prune=True)
        count += ranked[0].config() not in {measurements[index].config for index in indices}
    return count


def save(path: Path, constants: CostConstants, meta: Mapping[str, Any]) -> None:
    """Write what `smkern.tuning.cost_constants.read_constants` reads."""
    numbers = {name: round(getattr(constants, name), 5) for name in NAMES}
    variants = {
        key: [round(value, 4) for value in pair] for key, pair in constants.variants.items()
    }
    lines = ",\n".join(f"  {json.dumps(key)}: {pair}" for key, pair in variants.items())
    head = json.dumps({"meta": dict(meta), "constants": numbers}, indent=1).removesuffix("\n}")
    write_whole(path, f'{head},\n "variants": {{\n{lines}\n }}\n}}\n')


@click.command("fit")
@click.argument("raw_paths", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), help="Constants file to write."
)
@click.option("--iterations", default=15, show_default=True)
@click.option("--check", is_flag=True, help="Also judge whole weights and budgets held out.")
@click.option(
    "--leave-out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder that gets the constants fitted without each of the bench's weights (NxK.json).",
)
def command(
    raw_paths: tuple[Path, ...],
    out: Path | None,
    iterations: int,
    check: bool,
    leave_out: Path | None,
) -> None:
    """Fit the cost model to measured candidates (JSON lines, .gz too) and say what its picks lose.

    What the shipped constants are fitted to is bench/results/<gpu>/gemm-candidates.jsonl.gz.
    """
    profile = load_profile()
    measurements = usable([item for path in raw_paths for item in raw.load(path)])
    names = [name for name in NAMES if name != FIXED]
    _report("defaults", gap(measurements, profile, DEFAULTS))
    fitted = fit(measurements, profile, names=names, iterations=iterations)
    _report("fitted", gap(measurements, profile, fitted))
    for name in NAMES:
        click.echo(f"  {name:20} {getattr(DEFAULTS, name):10.4f} -> {getattr(fitted, name):10.4f}")
    missing = unmeasured_picks(measurements, profile, fitted)
    if missing:
        click.echo(f"{missing} cells: the pick was not measured; run smkern autotune again")
    weights = ["x".join(map(str, shape)) for shape in sorted(set(map(_weights, measurements)))]
    meta = {
        "gpu": profile.info.name,
        "measurements": len(measurements),
        "weights": ",".join(weights),
    }
    if out is not None:
        save(out, fitted, meta)
        click.echo(f"written to {out}")
    if check:
        for what, value in (("weights", _weights), ("budgets", lambda item: item.budget.num_sms)):
            seen, unseen = held_out(measurements, value)
            found = fit(seen, profile, fitted, names=names, iterations=FEW)
            of_unseen = gap(unseen, profile, found)
            _report(f"fitted without every third of the {what}, judged on those", of_unseen)
    if leave_out is not None:
        for shape in SHAPES:
            kept = [item for item in measurements if _weights(item) != shape]
            without = fit(kept, profile, fitted, names=names, iterations=FEW)
            save(leave_out / f"{shape[0]}x{shape[1]}.json", without, meta | {"without": shape})


def _weights(item: GemmMeasurement) -> tuple[int, int]:
    return item.problem.n, item.problem.k


def held_out(
    measurements: Sequence[GemmMeasurement], value: Callable[[GemmMeasurement], Any]
) -> tuple[list[GemmMeasurement], list[GemmMeasurement]]:
    """Measurements split by `value`: two thirds to fit to, and a third held out."""
    third = set(sorted({value(item) for item in measurements})[::3])
    seen = [item for item in measurements if value(item) not in third]
    return seen, [item for item in measurements if value(item) in third]


def _report(what: str, result: Gap) -> None:
    click.echo(
        f"{what}: {result.cells} cells, picks {100 * (result.geomean - 1):.1f}% slower than the "
        f"best measured (geomean), worst {result.worst:.2f} ({result.worst_cell})"
    )


if __name__ == "__main__":
    command()
