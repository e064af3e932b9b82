"""`smkern bench latency-table`: the predictor's tables, from profiles that were measured."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click

from smkern.bench.results import FOLDER
from smkern.device import Budget, gpu_folder
from smkern.errors import SmkernError
from smkern.latency.gemm_times import GemmTimes
from smkern.latency.profile_file import read_profile
from smkern.latency.profile_table import timings_of
from smkern.latency.table import latency_file
from smkern.measure.forwards import problems_of
from smkern.models import ModelConfig, preset
from smkern.ops.gemm.dispatch import offline_dispatcher
from smkern.profile import Profile, load_profile
from smkern.tuning.cells import PROVENANCE
from smkern.tuning.select import GEMM_FAMILY

KEPT = (*PROVENANCE, "model", "sizes", "kernels")
"""What a table says of where it is from."""


def gemm_times(
    config: ModelConfig, profile: Profile, sms: Iterable[int] | None = None
) -> GemmTimes:
    """What the tuned tables and the cost model say of a model's GEMMs.

    Args:
        config: A dense model.
        profile: The device.
        sms: Counts of SMs; None: every even one from 8 on, which takes some 20 s.
    """
    total = profile.info.num_sms
    dispatcher = offline_dispatcher(profile, GEMM_FAMILY.load(profile))

    def us(rows: int, num_sms: int) -> tuple[float, float]:
        budget = Budget(num_sms, "mask", clusters=2 * num_sms > total)
        qkv, o, head, *mlp = [
            dispatcher.select(problem, budget).predicted_us
            for problem in problems_of(config, rows, min(rows, 256))
        ]
        return qkv + o + sum(mlp), head

    return GemmTimes.of([*range(8, total - 6, 2), total] if sms is None else list(sms), us)


def write_table(path: Path, folder: Path) -> Path:
    """The table of a profile.

    Args:
        path: A profile that `smkern profile` wrote.
        folder: Where a GPU's folder of tables is, or shall be.

    Raises:
        TableError: no profile.
        ProfileError: no ceilings of its GPU.
        ConfigError: a model that is no preset.
    """
    meta, lines, _ = read_profile(path)
    profile, config = load_profile(gpu_folder(meta["gpu"])), preset(meta["model"])
    kept = {name: meta[name] for name in KEPT if name in meta}
    if config.moe is None:
        kept["gemms"] = gemm_times(config, profile).to_json()
    table = folder / gpu_folder(meta["gpu"]) / f"{meta['model']}.json"
    table.unlink(missing_ok=True)
    cells = timings_of(line.sample for line in lines if not line.held_out)
    latency_file(table).merge(cells, kept)
    Path(f"{table}.lock").unlink(missing_ok=True)
    return table


def committed() -> list[Path]:
    """The profiles that the checkout has."""
    return sorted(FOLDER.glob("*/*.profile.jsonl"))


@click.command("latency-table")
@click.argument("profiles", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of tables; a folder a GPU is made in it.",
)
def command(profiles: tuple[Path, ...], out: Path) -> None:
    """Make the predictor's tables of PROFILES that `smkern profile` measured, a file a model.

    Without PROFILES, of those that the checkout has. The tables that smkern ships with lie in
    smkern/latency/tables. Held-out steps are left out; what the tuned tables and the cost model say
    of the model's GEMMs goes with them.
    """
    files = list(profiles) or committed()
    if not files:
        raise click.UsageError(f"no profiles in {FOLDER}: name the files")
    try:
        for file in files:
            click.echo(write_table(file, out))
    except SmkernError as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    command()
