"""Weights from safetensors files: memory-mapped, checked by name, copied into fused tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from smkern.device import torch_device
from smkern.errors import WeightsError
from smkern.models.architecture import dtypes
from smkern.models.config import ModelConfig
from smkern.models.hub import read_json
from smkern.models.layers import FP8
from smkern.models.names import (
    EMBED,
    HEAD,
    INPUT_SCALE,
    INVERSE,
    KV_SCALES,
    SCALE,
    fused_names,
    has_kv_scales,
    is_ignorable,
    name_of_scale,
    text_names,
)
from smkern.models.quantization import Quantization
from smkern.models.shard import WHOLE, Shard
from smkern.ops.warming import Bar

if TYPE_CHECKING:
    from smkern.models.weights import Weights

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
OTHER_FORMATS = ("bin", "pt", "pth", "gguf")
"""Endings of weights' files that are not read."""
SHOWN = 8
"""Names that an error lists; it counts the rest."""


Empty = Callable[..., "Weights"]
"""`Weights.empty`."""


def load(
    path: Path,
    empty: Empty,
    *,
    config: ModelConfig | None,
    device: torch.device | str,
    dtype: torch.dtype | None,
    shard: Shard,
    progress: bool,
) -> Weights:
    """See `Weights.load`; the files are copied into what `empty` makes."""
    if config is None:
        config = ModelConfig.from_hf(path)
    if dtype is not None:
        config = config.replace(dtype=dtype)
    files = find_files(path)
    with ExitStack() as opened, Bar(progress) as bar:
        handles = {name: _open(path / name, opened) for name in dict.fromkeys(files.values())}
        held = {name: set(handle.keys()) for name, handle in handles.items()}
        if files == {SINGLE: SINGLE}:
            files = {name: file for file, names in held.items() for name in names}
        _check_shards(files, held)

        def read(name: str) -> Tensor:
            return _read(handles[files[name]], name, path / files[name])

        return filled(
            empty, config, device, files, read, str(path), convert=dtype is not None, shard=shard,
            bar=bar,
        )  # fmt: skip


def find_files(path: Path) -> dict[str, str]:
    """The file of each tensor by the index; of a single file {its name: its name}.

    Raises:
        WeightsError: no such files, an invalid index, or a missing shard.
    """
    if (path / INDEX).is_file():
        index = read_json(path / INDEX, WeightsError).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise WeightsError(f"{path / INDEX} has no weight_map: download it again")
        for file in index.values():
            if not isinstance(file, str) or PurePosixPath(file).name != file:
                raise WeightsError(
                    f"{path / INDEX} names the file {file!r}, wanted one of its own folder: "
                    "download it again"
                )
        for file in dict.fromkeys(index.values()):
            if not (path / file).is_file():
                raise WeightsError(f"{path / file} is missing, {INDEX} names it: download it")
        return {str(name): file for name, file in index.items()}
    if (path / SINGLE).is_file():
        return {SINGLE: SINGLE}
    raise WeightsError(f"{path} has neither {SINGLE} nor {INDEX}{_remedy(path)}")


def _remedy(path: Path) -> str:
    """What a folder has in place of the files that are read, and what to do."""
    shards = sorted(x.name for x in path.glob("*.safetensors"))
    if shards:
        return f", but {_list(shards, 'file')}: download the index, too, or rename a single file"
    others = sorted(x.name for kind in OTHER_FORMATS for x in path.glob(f"*.{kind}"))
    if others:
        return (
            f", but {_list(others, 'file')}: make safetensors of them, by transformers' "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other_folder)"
        )
    return ": pass a folder with safetensors files"


def filled(
    empty: Empty,
    config: ModelConfig,
    device: torch.device | str,
    names: Collection[str],
    read: Callable[[str], Tensor],
    source: str,
    *,
    convert: bool,
    shard: Shard = WHOLE,
    bar: Bar | None = None,
) -> Weights:
    """Weights made on a device of named tensors, which are compared before memory is taken.

    Args:
        empty: Makes uninitialised weights.
        config: The whole model.
        device: Where they shall lie.
        names, read, source, convert, bar: As `fill` has them.
        shard: Which part of every tensor is copied; the whole is compared.

    Raises:
        ConfigError: sizes that so many ranks cannot share.
        WeightsError: as `fill`.
    """
    place, num_layers = torch_device(device), config.num_layers
    theirs = text_names(config.family, names)
    shard.config(config)
    if num_layers > len(names):  # found out before so many layers are described
        raise WeightsError(
            f"{source} has {len(names)} tensors, the configuration {num_layers} layers: use the "
            "config.json that belongs to it"
        )
    given = config.quantization
    scaled = (given is not None and given.kv_scales) or has_kv_scales(theirs)
    described = empty(config, "meta", WHOLE, kv_scales=scaled)
    fill(described, theirs, lambda x: _described(read(theirs[x])), source, convert=convert)
    weights = empty(config, place, shard, kv_scales=scaled)

    def part(name: str) -> Tensor:
        tensor = read(theirs[name])
        if tensor.dim() == 1 and tensor.numel() > 1 and _is_scale(name_of_scale(name)):
            tensor = tensor[:, None]  # scales of rows, to be cut as the rows are
        return shard.cut(name, tensor, config)

    fill(weights, theirs, part, source, convert=convert, bar=bar)
    return weights


def _described(tensor: Tensor) -> Tensor:
    return tensor.to("meta") if isinstance(tensor, Tensor) else tensor


def fill(
    weights: Weights,
    names: Collection[str],
    read: Callable[[str], Tensor],
    source: str,
    *,
    convert: bool,
    bar: Bar | None = None,
) -> None:
    """Copy named tensors into the weights, each exactly once.

    Args:
        weights: What to write into.
        names: All tensors of the source.
        read: Gives a tensor by name.
        source: Name of the source in errors.
        convert: Whether other floating dtypes are converted.
        bar: Shows progress.

    Raises:
        WeightsError: tensors that are missing, extra, mis-shaped or of a wrong dtype.
    """
    config, places = weights.config, weights.named()
    fused = fused_names(config.family, weights.layers)
    missing = set(places)
    extra: list[str] = []
    wanted: list[tuple[str, str, Tensor]] = []  # a name, our name, and where it belongs
    for name in names:
        known = name if name in places else name_of_scale(name)
        if name == HEAD and config.tied and EMBED not in names:
            known = EMBED
        if known in places and (known == name or known not in names):
            wanted.append((name, known, places[known]))
            missing.discard(known)
        elif name in fused:
            wanted.append((name, name, fused[name][0]))
            missing.difference_update(fused[name][1])
        elif not is_ignorable(name, config):
            extra.append(name)
    if missing:
        tied = " or set tie_word_embeddings in config.json" if HEAD in missing else ""
        raise WeightsError(
            f"{source} lacks {_list(sorted(missing))}: download the checkpoint again, use the "
            f"config.json that belongs to it{tied}"
        )
    if extra:
        raise WeightsError(
            f"{source} has {_list(sorted(extra))} that a {config.architecture} model of "
            f"{config.num_layers} layers does not: use the config.json that belongs to it"
        )
    if config.tied and HEAD in names and EMBED in names:
        _check_tied(read(HEAD), read(EMBED), source)
    told = (bar or Bar(False)).step("loading", len(wanted))
    with torch.no_grad():
        for done, (name, known, place) in enumerate(wanted):
            tensor = read(name)
            if not isinstance(tensor, Tensor):
                raise WeightsError(
                    f"{name} in {source} is a {type(tensor).__name__}: pass a tensor"
                )
            if _is_scale(known):
                _check_scale(name, tensor, place, source, config.quantization)
                _put_scale(known, tensor, place)
            else:
                _check(name, tensor, place, source, convert)
                _check_range(name, tensor, place, source)
                place.copy_(tensor)
            told(done + 1)


def _check_tied(head: Tensor, embed: Tensor, source: str) -> None:
    """Raise WeightsError where a checkpoint has a head of its own, whose configuration has none."""
    if not all(isinstance(x, Tensor) and x.device.type != "meta" for x in (head, embed)):
        return
    if head.shape != embed.shape or not torch.equal(head, embed.to(head)):
        raise WeightsError(
            f"{HEAD} in {source} is not {EMBED}, to which tie_word_embeddings ties it: set that to "
            "false in config.json to use it, or remove the tensor"
        )


def _check(name: str, tensor: Tensor, place: Tensor, source: str, convert: bool) -> None:
    if tensor.shape != place.shape:
        raise WeightsError(
            f"{name} in {source} has shape {list(tensor.shape)}, the configuration wants "
            f"{list(place.shape)}: use the config.json that belongs to it"
        )
    if place.dtype is FP8 and tensor.dtype is not FP8:
        raise WeightsError(
            f"{name} in {source} is {tensor.dtype}, quantization_config promises {FP8}: use the "
            "config.json that belongs to it, or take it unquantized and pass it to "
            "smkern.models.quantize"
        )
    if tensor.dtype not in (*dtypes(), place.dtype):
        raise WeightsError(
            f"{name} in {source} is {tensor.dtype}, there is {[str(x) for x in dtypes()]}: use a "
            "checkpoint that is not quantized, or whose quantization_config is served"
        )
    if tensor.dtype is not place.dtype and not convert:
        short = str(place.dtype).removeprefix("torch.")
        raise WeightsError(
            f"{name} in {source} is {tensor.dtype}, the configuration says {place.dtype} "
            f"(torch.bfloat16 where it says nothing): pass dtype={place.dtype} to convert (smkern "
            f"serve: --dtype {short}), or set dtype in config.json"
        )


def _check_range(name: str, tensor: Tensor, place: Tensor, source: str) -> None:
    """Raise WeightsError for values that a conversion to fp16 would make infinite."""
    if place.dtype is not torch.float16 or tensor.dtype is torch.float16:
        return
    if tensor.device.type == "meta" or not tensor.numel():
        return
    ends = torch.stack(tensor.aminmax())
    if bool(ends.to(torch.float16).isinf().any()):
        raise WeightsError(
            f"{name} in {source} holds values of {ends[0]:g} to {ends[1]:g}, torch.float16 ends at "
            f"{torch.finfo(torch.float16).max:g}: convert it to torch.bfloat16"
        )


def _is_scale(name: str) -> bool:
    return name.endswith((SCALE, INVERSE, INPUT_SCALE, *KV_SCALES))


def _check_scale(
    name: str, tensor: Tensor, place: Tensor, source: str, kind: Quantization | None
) -> None:
    """Raise WeightsError unless a tensor holds the scales that belong into a place.

    The scale of a whole projection may come alone, and scales of rows as a vector. Values are
    looked at unless the tensor is on `meta`.
    """
    if tensor.dtype not in dtypes():
        raise WeightsError(
            f"{name} in {source} is {tensor.dtype}, scales are served in "
            f"{[str(x) for x in dtypes()]}: convert it"
        )
    shapes = [list(place.shape)]
    if place.dim() == 2 and place.shape[1] == 1:
        shapes.append([place.shape[0]])
    if place.dim() == 1 or (kind is not None and kind.kind == "fp8-tensor"):
        shapes += [[], [1], [1, 1]]
    if list(tensor.shape) not in shapes:
        whose = "scales" if kind is None else f"{kind.kind} scales"
        raise WeightsError(
            f"{name} in {source} has shape {list(tensor.shape)}, {whose} of this tensor have "
            f"{shapes[0]}: use the config.json that belongs to it"
        )
    if tensor.device.type == "meta":
        return
    values = tensor.float()
    if not bool((torch.isfinite(values) & (values > 0)).all()):
        raise WeightsError(
            f"{name} in {source} holds a scale that is not finite or not above 0: download the "
            "checkpoint again"
        )


def _put_scale(name: str, tensor: Tensor, place: Tensor) -> None:
    """Copy scales; of inputs that several projections share the largest counts."""
    values = tensor.to(place.device, torch.float32)
    values = values.reshape(1) if values.numel() == 1 else values.reshape(place.shape)
    if name.endswith(INPUT_SCALE):
        torch.maximum(place, values, out=place)
    else:
        place.copy_(values)


def _list(names: Sequence[str], what: str = "tensor") -> str:
    shown = ", ".join(names[:SHOWN])
    rest = len(names) - SHOWN
    count = f"{len(names)} {what}{'s' if len(names) > 1 else ''}"
    return f"{count}: {shown}{f' and {rest} more' if rest > 0 else ''}"


def _open(file: Path, opened: ExitStack) -> Any:
    """A memory-mapped file; its header is checked against its size.

    Raises:
        WeightsError: truncated, corrupt, or not safetensors.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise WeightsError(
            "safetensors is not installed, checkpoints are read by it: pip install safetensors"
        ) from None
    try:
        return opened.enter_context(safe_open(file, framework="pt", device="cpu"))
    except (SafetensorError, OSError) as reason:
        raise WeightsError(
            f"{file} is truncated, corrupt or no safetensors file ({reason}): download it again"
        ) from None


def _read(handle: Any, name: str, file: Path) -> Tensor:
    from safetensors import SafetensorError

    try:
        return handle.get_tensor(name)
    except (SafetensorError, OSError) as reason:
        raise WeightsError(f"{name} cannot be read from {file} ({reason})") from None


def _check_shards(files: dict[str, str], held: dict[str, set[str]]) -> None:
    """Raise WeightsError where index and shards disagree."""
    absent = sorted(name for name, file in files.items() if name not in held[file])
    if absent:
        raise WeightsError(
            f"{INDEX} promises {_list(absent)} in files that do not hold them, the first in "
            f"{files[absent[0]]}: download index and shards of one version"
        )
    unlisted = sorted({name for names in held.values() for name in names} - set(files))
    if unlisted:
        raise WeightsError(
            f"shards hold {_list(unlisted)} that {INDEX} does not list: download index and shards "
            "of one version"
        )
