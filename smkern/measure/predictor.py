"""How long a model's launches take on a GPU, by the nearest latency table that there is."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

from smkern.device import gpu_folder
from smkern.latency import TablePredictor
from smkern.latency.sizes import ModelSizes
from smkern.latency.table import shipped_path
from smkern.measure.model_gemms import gemm_times
from smkern.models import ModelConfig
from smkern.models.presets import presets
from smkern.profile import DEFAULT, load_profile, nearest

USUAL = "qwen3-8b"
"""Whose table stands in for those of models that have none."""


def predictor_for(
    config: ModelConfig, gpu: str | None = None, *, sms: Sequence[int] | None = None
) -> TablePredictor:
    """The predictor of a model's own table; else of another's, over the model's rooflines and times
    of GEMMs, and over the GPU's ceilings.

    In turn: a table of a model of these sizes, on this GPU or on one like it; Qwen3-8B's.

    Args:
        config: The model.
        gpu: The GPU's name; None: the H200 that plans are made for without a GPU.
        sms: Counts of SMs whose GEMMs are priced, where the model or the GPU has no table: 0.1 s
            each. None: all; none: what GEMMs take over their rooflines is the table's.

    Raises:
        ProfileError: no profile of that GPU.
    """
    profile = load_profile(gpu_folder(gpu or DEFAULT))
    gpu = profile.info.name
    model, where = next(_there(config, [known.info.name for known in nearest(profile.info)]))
    table = TablePredictor.load(model, where)
    if where == gpu and table.sizes == ModelSizes.of(config):
        return table
    if where != gpu:
        warnings.warn(
            f"no latency table of {gpu!r} for this model: times are told from {model}'s on an "
            f"{where!r}, by this GPU's ceilings; measure them: smkern profile",
            stacklevel=2,
        )
    gemms = gemm_times(config, profile, sms) if sms is None or sms else None
    return table.for_model(config, profile, gemms)


def _there(config: ModelConfig, gpus: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Models and GPUs with tables, those most like this model first, each on the first GPU."""
    alike = [name for name, other in presets().items() if _same(other, config)]
    alike.sort(key=lambda name: presets()[name].quantization != config.quantization)
    for models in (alike, [USUAL]):
        for where in gpus:
            yield from ((x, where) for x in models if shipped_path(x, where).exists())


def _same(one: ModelConfig, other: ModelConfig) -> bool:
    sizes = ("num_layers", "hidden_size", "num_q_heads", "num_kv_heads", "intermediate_size", "moe")
    return all(getattr(one, name) == getattr(other, name) for name in sizes)
