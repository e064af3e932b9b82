"""How long a model's launches take on a GPU: by its own latency table, else by the nearest."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence

from smkern.device import gpu_folder
from smkern.latency.model_gemms import gemm_times
from smkern.latency.sizes import ModelSizes
from smkern.latency.table import shipped_path
from smkern.latency.table_predictor import TablePredictor
from smkern.limits import check_fp8_capability
from smkern.models.config import ModelConfig
from smkern.models.presets import preset, presets
from smkern.profile import load_profile, nearest

USUAL = "qwen3-8b"
"""Whose table stands in for those of models that have none."""


def predictor_for(
    model: ModelConfig | str, gpu: str | None = None, *, sms: Sequence[int] | None = None
) -> TablePredictor:
    """What says how long a model's launches take: for a policy with a limit, or a simulation.

    By the model's own table where one ships; else by the table of a model of these sizes, on the
    GPU most like this one, or by Qwen3-8B's, over this model's rooflines and times of GEMMs and
    this GPU's ceilings. For weights in fp8 tables in fp8 come first. That was 5% off in the mean
    from an H200 to an H100, and from Qwen3-8B to 14B, 3.4 to Qwen2.5-7B, 3.5 to Mistral-Nemo; in
    fp8 5 to 6%.

    What serves, gives `sms`: then GEMMs are priced by the kernels and tables that are here. A table
    notes those of where it was timed. Without CUTLASS's (the extra `cutlass`), say, a decode step
    of 65 to 96 or of 129 to 200 requests takes 1.06 to 1.38 times as long on 16 to 48 SMs.

    Args:
        model: A configuration, or a preset's name.
        gpu: The GPU's name; None: the one that is here, else an H200.
        sms: Counts of SMs whose GEMMs are priced, such as `places_of` a ladder: 0.1 s each, up to 1
            s where nobody tuned them. None: those of the model's own table, else every even one;
            empty: what GEMMs take over their rooflines is the table's.

    Raises:
        ConfigError: no preset of that name.
        ProfileError: no profile of that GPU.
        DeviceError: weights in fp8, and a GPU without e4m3.

    Example:
        >>> import smkern
        >>> predictor = smkern.predictor_for("qwen3-8b", "NVIDIA H100 80GB HBM3")
        >>> policy = smkern.policies.Adaptive(predictor, tbt_slo_ms=20)
    """
    config = model if isinstance(model, ModelConfig) else preset(model)
    profile = load_profile(gpu and gpu_folder(gpu))
    if config.quantization is not None:
        check_fp8_capability(profile.info.sm)
    here = profile.info.name
    name, where = next(_there(config, [known.info.name for known in nearest(profile.info)]))
    table = TablePredictor.load(name, where)
    num_sms, theirs = profile.info.num_sms, table.profile.info.num_sms
    is_here = where == here and num_sms == theirs  # of a GPU's SMs a process may see fewer
    if is_here and table.sizes == ModelSizes.of(config) and not sms:
        return table
    if not is_here:
        warnings.warn(
            f"no latency table of {here!r} for this model on {num_sms} SMs: times are told from "
            f"{name}'s on an {where!r} of {theirs}, by this GPU's ceilings; measure them: "
            "smkern profile",
            stacklevel=2,
        )
    gemms = gemm_times(config, profile, sms) if sms is None or sms else None
    return table.for_model(config, profile, gemms)


def places_of(rungs: Iterable[int], num_sms: int) -> list[int]:
    """The SMs of all places of a ladder: the rungs, what each leaves, the whole device.

    Example:
        >>> from smkern.latency.nearest import places_of
        >>> places_of([16, 32], 132)
        [16, 32, 100, 116, 132]
    """
    given = [rung for rung in rungs if 0 < rung < num_sms]
    return sorted({num_sms, *given, *(num_sms - rung for rung in given)})


def _there(config: ModelConfig, gpus: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Models and GPUs with tables, those most like this model first, each on the first GPU.

    Other kernels run in e4m3: a table in the dtype of this model's weights says more of it than one
    of its own sizes, but for experts'.
    """
    in_fp8 = config.quantization is not None
    alike: dict[bool, list[str]] = {True: [], False: []}
    for name, other in presets().items():
        if _same(other, config):
            alike[(other.quantization is not None) == in_fp8].append(name)
    usual = [f"{USUAL}-fp8"] if in_fp8 and config.moe is None else []
    for models in (alike[True], usual, alike[False], [USUAL]):
        for where in gpus:
            yield from ((x, where) for x in models if shipped_path(x, where).exists())


def _same(one: ModelConfig, other: ModelConfig) -> bool:
    sizes = ("num_layers", "hidden_size", "num_q_heads", "num_kv_heads", "intermediate_size", "moe")
    return all(getattr(one, name) == getattr(other, name) for name in sizes)
