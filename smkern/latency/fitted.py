"""Latency models by name, fitted to the measured launches of a file or to those that ship."""

from __future__ import annotations

from pathlib import Path

from smkern.device import gpu_folder
from smkern.errors import ArgumentError
from smkern.latency.gemm_times import GemmTimes
from smkern.latency.models import MODELS, models_with
from smkern.latency.predictor import Predictor
from smkern.latency.profile_file import read_profile
from smkern.latency.sample import Sample, samples_of
from smkern.latency.sizes import ModelSizes
from smkern.latency.table import find_shipped, gemms_in, read_timings
from smkern.limits import as_path
from smkern.profile import DEFAULT, load_profile


def read_samples(path: Path | str) -> tuple[list[Sample], ModelSizes, str, GemmTimes | None]:
    """What models are fitted to: launches, sizes of their LLM, the GPU's name, times of GEMMs.

    Args:
        path: A profile that `smkern profile` wrote (.jsonl), whose held-out launches are left out,
            or a table of timings.

    Raises:
        TableError: no such file, or neither of both.
    """
    path = as_path("path", path)
    if path.suffix == ".jsonl":
        found = read_profile(path)
        return found.fitted, found.sizes, found.gpu, found.gemms
    cells, sizes = read_timings(path)
    samples = samples_of(cells.cells, sizes.num_layers)
    return samples, sizes, str(cells.meta.get("gpu", DEFAULT)), gemms_in(path, cells)


def read_model(name: str, path: Path | str) -> Predictor:
    """A latency model, fitted to a file's launches.

    Args:
        name: One of `MODELS`.
        path: A profile or a table of timings.

    Raises:
        ArgumentError: no model of that name.
        TableError: no such file, or it is invalid.
        ProfileError: no profile of that GPU.
        LatencyError: the launches do not determine the model.
    """
    if name not in MODELS:
        raise ArgumentError(f"no latency model {name!r}: there are {', '.join(MODELS)}")
    samples, sizes, gpu, gemms = read_samples(path)
    return models_with(gemms)[name](samples, sizes, load_profile(gpu_folder(gpu)))


def load_model(name: str, model: str = "qwen3-8b", gpu: str | None = None) -> Predictor:
    """A latency model, fitted to the launches of an LLM that smkern ships.

    Args:
        name: One of `MODELS`.
        model: The LLM, a preset's name.
        gpu: The GPU's name; None: the H200 that plans are made for without a GPU.

    Raises:
        ArgumentError: no model of that name.
        TableError: nothing of that LLM on that GPU ships.
        LatencyError: what ships does not determine the model.

    Example:
        >>> from smkern.latency import Size
        >>> step = Size(batch=64, total_kv=64 * 2048)
        >>> bullet = load_model("bullet", "qwen3-8b")
        >>> bullet.alone_us(step, 16) > 1.5 * bullet.alone_us(step, 132)
        True
    """
    return read_model(name, find_shipped(model, gpu or DEFAULT))
