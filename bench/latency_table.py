"""`smkern bench latency-table`: the predictor's tables, from profiles that were measured."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import click

from smkern.bench.results import FOLDER
from smkern.device import gpu_folder
from smkern.errors import TableError
from smkern.kernels.cute import compile as cute
from smkern.latency.model_gemms import gemm_times
from smkern.latency.profile_file import REMEDY, ProfileFile, read_profile
from smkern.latency.profile_table import timings_of
from smkern.latency.stamp import kernels_hash
from smkern.latency.table import latency_file
from smkern.models import preset
from smkern.profile import load_profile
from smkern.tuning.cells import PROVENANCE

KEPT = (*PROVENANCE, "model", "sizes", "kernels")
"""What a table says of where it is from."""


def write_table(path: Path, folder: Path) -> Path:
    """The table of a profile.

    Args:
        path: A profile that `smkern profile` wrote.
        folder: Where a GPU's folder of tables is, or shall be.

    Raises:
        TableError: no profile, or it lacks some of its provenance.
    """
    profile = read_profile(path)
    if lacking := [name for name in KEPT if name not in profile.meta]:
        raise TableError(f"{path} lacks {', '.join(lacking)} in its provenance; {REMEDY}")
    kept = {name: profile.meta[name] for name in KEPT}
    if profile.gemms is not None:
        kept["gemms"] = profile.gemms.to_json()
    table = folder / gpu_folder(profile.gpu) / f"{profile.meta['model']}.json"
    table.unlink(missing_ok=True)
    latency_file(table).merge(timings_of(profile.fitted), kept)
    Path(f"{table}.lock").unlink(missing_ok=True)
    return table


def renew(path: Path) -> None:
    """Give a profile today's stamp, and what today's tables and cost model say of its GEMMs.

    A predictor's times are factors over these, and `smkern serve` asks for those of today. For
    profiles whose kernels are still those that are chosen, or as fast: the others are measured
    again.

    Raises:
        TableError: no profile, or it was timed with CUTLASS's kernels and there are none here, or
            the other way round.
    """
    profile = read_profile(path)
    timed = bool(profile.meta.get("cutlass"))
    # any tile may be chosen: that some kernels are kept does not do
    here = not cute.absent() if timed else cute.is_there()
    if here != timed:
        raise TableError(
            f"{path} was timed {'with' if timed else 'without'} CUTLASS's kernels: renew it where "
            "the extra cutlass is as it was then"
        )
    gemms = gemm_times(preset(str(profile.meta["model"])), load_profile(gpu_folder(profile.gpu)))
    today = {
        "renewed": f"{datetime.now(UTC):%Y-%m-%d}",
        "kernels": kernels_hash(profile.gpu, profile.sizes),
        "gemms": gemms and gemms.to_json(),
    }
    ProfileFile(path).renew(today)


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
@click.option(
    "--renew",
    "renews",
    is_flag=True,
    help="Before, give PROFILES the stamp and the GEMM times of today's tables: for those whose "
    "kernels are still as fast.",
)
def command(profiles: tuple[Path, ...], out: Path, *, renews: bool) -> None:
    """Make the predictor's tables of PROFILES that `smkern profile` measured, a file a model.

    Without PROFILES, of those that the checkout has. The tables that smkern ships with lie in
    smkern/latency/tables. Held-out steps are left out; the times of the model's GEMMs are those
    that the profile noted.
    """
    files = list(profiles) or committed()
    if not files:
        raise click.UsageError(f"no profiles in {FOLDER}: name the files")
    for file in files:
        if renews:
            renew(file)
        click.echo(write_table(file, out))
