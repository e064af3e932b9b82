"""`smkern profile`: time a model's launches on this GPU, for the latency models."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from smkern.errors import DeviceError
from smkern.latency.model_gemms import gemm_times
from smkern.latency.profile_file import Measured, ProfileFile, read_profile
from smkern.latency.sizes import ModelSizes
from smkern.latency.stamp import kernels_hash
from smkern.measure.options import Positive
from smkern.measure.profile_plan import Room, all_rungs, plan

if TYPE_CHECKING:
    from smkern.latency.gemm_times import GemmTimes
    from smkern.measure.launches import ModelLaunches
    from smkern.measure.profiler import BudgetOf
    from smkern.models import ModelConfig
    from smkern.partition import Ladder
    from smkern.profile import Profile

PAGE_SIZE = 16
POOL_TOKENS = 640_000
"""Tokens of the pool, at most."""
LEFT_BYTES = 14 << 30
"""Memory that is left to activations, graphs, plans and partitions."""


@contextmanager
def open_launches(config: ModelConfig, rungs: list[int]) -> Iterator[tuple[ModelLaunches, Ladder]]:
    """A model of random weights on this GPU, with the splits of these rungs.

    Raises:
        DeviceError: no GPU.
        OutOfPagesError: it has not the memory.
    """
    from smkern.kv import KvPool
    from smkern.kv.storage import pages_in_free_memory
    from smkern.measure.launches import ModelLaunches
    from smkern.models import Decoder, Weights
    from smkern.partition import ladder
    from smkern.runtime.cuda_device import CudaDevice
    from smkern.runtime.loading import kv_sizes

    with ladder(rungs) as splits:
        device = CudaDevice(splits)
        decoder = Decoder(config, Weights.random(config, device="cuda"))
        kv = kv_sizes(config, PAGE_SIZE, None)
        pages = pages_in_free_memory(kv, decoder.device, 1.0, LEFT_BYTES)
        pool = KvPool(kv, num_pages=min(pages, POOL_TOKENS // PAGE_SIZE), reuse=False)
        launches = ModelLaunches(decoder, pool, device)
        try:
            yield launches, splits
        finally:
            launches.close()


def room_of(launches: ModelLaunches, device: Room) -> Room:
    """What a model's launches have room for on a device."""
    return replace(
        device,
        max_running=launches.max_running,
        max_prefill=launches.max_prefill,
        max_tokens=launches.max_tokens,
        max_context=launches.max_context,
        pool_tokens=launches.pool_tokens,
    )


def provenance(model: str, config: ModelConfig, seed: int) -> dict[str, Any]:
    """What a profile says of where it is from."""
    from smkern.measure.provenance import collect_meta

    meta = collect_meta()
    sizes = ModelSizes.of(config)
    kernels = kernels_hash(str(meta["gpu"]), sizes)
    return meta | {"model": model, "sizes": sizes.to_json(), "kernels": kernels, "seed": seed}


@click.command("profile")
@click.option("--model", required=True, help="A preset's name, such as qwen3-8b.")
@click.option(
    "--gpu-minutes",
    default=7.0,
    show_default=True,
    type=Positive(),
    help="Minutes of measuring; what compiles and loads before is not counted.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The profile's file; by default MODEL.profile.jsonl here.",
)
@click.option("--resume", is_flag=True, help="Go on with a file that is there.")
@click.option("--seed", default=0, show_default=True, help="Seed of the steps that are drawn.")
def command(model: str, gpu_minutes: float, out: Path | None, resume: bool, seed: int) -> None:
    """Time a model's decode steps, prompts and mixed forwards, alone and beside each other.

    Weights are random, all layers run. A line is written as it is measured, coarse sizes before
    fine ones, so an early end leaves a file that predictors can be fitted to; --resume goes on
    with it. Some steps are drawn at random and held out: predictors are judged by them.
    """
    import torch

    from smkern.models import preset

    if not torch.cuda.is_available():
        raise DeviceError(
            "no GPU is visible: smkern profile times launches on one. Shipped tables and "
            "scaled rooflines serve without"
        )
    config = preset(model)
    path = out or Path(f"{model}.profile.jsonl")
    file = ProfileFile(path)
    there = path.exists() and path.stat().st_size > 0
    if there and not resume:
        raise click.UsageError(f"{path} is there: pass --resume to go on with it, or delete it")
    began = time.monotonic()
    room = _device_room()
    wanted = plan(room, seed=seed)
    meta = provenance(model, config, seed)
    # of another GPU or model: refused before minutes of compiling
    known = file.resume(meta) if there else None
    with open_launches(config, all_rungs(wanted)) as (launches, splits):
        room = room_of(launches, room)
        _measure(launches, splits, room, file, meta, known, began, gpu_minutes)


def _measure(
    launches: ModelLaunches,
    splits: Ladder,
    room: Room,
    file: ProfileFile,
    meta: dict[str, Any],
    known: list[Measured] | None,
    began: float,
    minutes: float,
) -> None:
    import torch

    from smkern.measure.profiler import Profiler, compile_cells
    from smkern.measure.sm_clock import clock_on
    from smkern.profile import load_profile

    cells = plan(room, seed=meta["seed"])
    done = {line.cell for line in known or ()}
    left = [cell for cell in cells if cell.name not in done]
    profiler = Profiler(launches, file, clock_on(torch.device("cuda")))
    budgets = _budgets(splits, launches.device.num_sms)
    begins = known is None
    beside = times_beside(launches.config, load_profile()) if begins else nullcontext(lambda: None)
    with beside as gemms:
        count = compile_cells(launches.config, left, launches.max_running, budgets)
        profiler.warm(left)
        click.echo(f"warm after {time.monotonic() - began:.0f} s: {count} GEMMs compiled", err=True)
        if begins:
            # a latency table takes these: tables that are tuned later were not profiled
            times = gemms()
            file.begin(meta | {"gemms": times and times.to_json()})
    with _progress(len(left), 60 * minutes) as told:
        timed = len(done) + profiler.run(left, 60 * minutes, told)
    for name, why in profiler.skipped.items():
        click.echo(f"skipped {name:.80}: {why}", err=True)
    click.echo(f"{timed} of {len(cells)} cells in {file.path}, {time.monotonic() - began:.0f} s")
    click.echo(errors_of(file.path))


@contextmanager
def times_beside(config: ModelConfig, profile: Profile) -> Iterator[Callable[[], GemmTimes | None]]:
    """`gemm_times` in a process of its own, beside what goes on; yields what waits for it."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool.submit(gemm_times, config, profile).result


def errors_of(path: Path) -> str:
    """Errors of our predictor on a profile's held-out steps, and how to have all models'.

    Raises:
        TableError: no profile.
    """
    from smkern.latency import read_model
    from smkern.latency.accuracy import error_table, format_table

    held_out = read_profile(path).held_out
    table = format_table(error_table({"table": read_model("table", path)}, held_out))
    return (
        f"Mean and worst errors on {len(held_out)} held-out launches, %; of all models and over "
        f"the number of samples: smkern bench latency-errors\n{table}"
    )


def _device_room() -> Room:
    from smkern.device import device_info

    info = device_info()
    return Room(info.num_sms, sm_granularity=info.sm_granularity)


def _budgets(splits: Ladder, total: int) -> BudgetOf:
    """The budget of a place of a ladder; the whole device's has all SMs."""
    from smkern.device import Budget
    from smkern.runtime.place import Place

    whole = Budget(total, "mask", clusters=True)

    def budget(place: Place) -> Budget:
        if place.side == "whole":
            return whole
        return getattr(splits.split(decode=place.rung), place.side).budget

    return budget


@contextmanager
def _progress(cells: int, seconds: float) -> Iterator[Callable[[int, float], None]]:
    """A bar on a terminal, else a line now and then."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda count, spent: _say(count, cells, spent, seconds)
        return
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("cells", total=seconds)
        yield lambda count, spent: bar.update(
            task, completed=spent, description=f"{count}/{cells} cells"
        )


def _say(count: int, cells: int, spent: float, seconds: float) -> None:
    if count % 50 == 0:
        click.echo(f"{count} of {cells} cells, {spent:.0f} of {seconds:.0f} s", err=True)
