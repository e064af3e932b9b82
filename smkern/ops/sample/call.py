"""What a call of `sample` was given, and what must hold of it on the host."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smkern.errors import ArgumentError
from smkern.ops import checks
from smkern.ops.operator import call_class
from smkern.ops.reference.sample import GREEDY_BELOW, Choice
from smkern.tuning.sample import MAX_ROWS, MAX_VOCAB, SampleProblem

_MAX_INT64 = 2**63 - 1


Sample = call_class(
    "Sample",
    "Tensor logits, *, float? temperature=None, Tensor? temperature_tensor=None, int? top_k=None, "
    "Tensor? top_k_tensor=None, float? top_p=None, Tensor? top_p_tensor=None, float? min_p=None, "
    "Tensor? min_p_tensor=None, int? seeds=None, Tensor? seeds_tensor=None, int? steps=None, "
    "Tensor? steps_tensor=None, Tensor(a!)? finished=None, Tensor(b!)? lengths=None, "
    "Tensor? max_lengths=None, Tensor? stop_tokens=None, int pad_token=0",
)
_PER_ROW = {
    "temperature": torch.float32, "top_k": torch.int32, "top_p": torch.float32,
    "min_p": torch.float32, "seeds": torch.int64, "steps": torch.int32, "lengths": torch.int32,
    "max_lengths": torch.int32,
}  # fmt: skip
_DEFAULTS = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seeds": 0, "steps": 0}


def check_sample(call: Any) -> None:
    """Raise ArgumentError for a call that cannot be served."""
    logits = call.logits
    checks.check_tensor("logits", logits, 2, "[batch, vocab]")
    checks.check_inner("logits", logits)
    batch, vocab = logits.shape
    if logits.dtype not in checks.FLOATS:
        raise ArgumentError(
            f"logits is {logits.dtype}: use torch.bfloat16, torch.float16 or torch.float32"
        )
    if not 1 <= vocab <= MAX_VOCAB:
        raise ArgumentError(
            f"logits has shape {list(logits.shape)}: a vocabulary has 1 to {MAX_VOCAB} tokens"
        )
    if batch > MAX_ROWS:
        raise ArgumentError(f"logits has {batch} rows: at most {MAX_ROWS} fit; split the batch")
    for name, dtype in _PER_ROW.items():
        x = getattr(call, name)
        if isinstance(x, Tensor):
            checks.check_vector(name, x, batch, dtype, "[batch]")
    _check_numbers(call)
    _check_state(call, batch)


def problem_of(call: Any, aligned: bool) -> SampleProblem | None:
    """What chooses a kernel for a checked call; None without rows.

    Args:
        aligned: Whether the first row begins at whole 16 bytes.
    """
    logits = call.logits
    batch, vocab = logits.shape
    if not batch:
        return None
    whole = vocab * logits.element_size() % 16 == 0
    whole = whole and (batch == 1 or row_bytes(logits) % 16 == 0)
    return SampleProblem(batch, vocab, checks.FLOATS[logits.dtype], aligned and whole)


def numbers_of(call: Any) -> tuple[Any, ...]:
    """What a launch takes behind the addresses (`smkern.kernels.sample.params_packer`)."""
    stop = call.stop_tokens
    step, count = 0, 0
    if stop is not None:
        step, count = stop.stride(0) if stop.dim() == 2 else 0, stop.shape[-1]
    all_rows = []
    for name, default in _DEFAULTS.items():
        x = getattr(call, name)
        all_rows.append(default if x is None or isinstance(x, Tensor) else x)
    return (row_bytes(call.logits), step, count, call.pad_token, *all_rows)


def choices_of(call: Any) -> list[Choice]:
    """How each row's token is chosen; for CPU tensors."""
    columns = []
    for name, default in _DEFAULTS.items():
        x = getattr(call, name)
        same = default if x is None else x
        columns.append(x.tolist() if isinstance(x, Tensor) else [same] * call.logits.shape[0])
    return [Choice(*row) for row in zip(*columns, strict=True)]


def row_bytes(logits: Tensor) -> int:
    """Bytes from one row to the next."""
    return logits.stride(0) * logits.element_size()


def _check_numbers(call: Any) -> None:
    temperature = call.temperature
    if _is_number(temperature) and checks.as_float("temperature", temperature) < 0:
        raise ArgumentError(
            f"temperature={temperature!r}: pass a number of at least 0 (below {GREEDY_BELOW} the "
            "best token is chosen)"
        )
    if _is_number(call.top_k):
        checks.as_int("top_k", call.top_k, 0)
    if _is_number(call.top_p) and not 0 < checks.as_float("top_p", call.top_p) <= 1:
        raise ArgumentError(f"top_p={call.top_p!r}: pass a number above 0 and at most 1 (1: all)")
    if _is_number(call.min_p) and not 0 <= checks.as_float("min_p", call.min_p) <= 1:
        raise ArgumentError(f"min_p={call.min_p!r}: pass a number of 0 (all) to 1")
    if _is_number(call.seeds):
        checks.as_int("seeds", call.seeds, -_MAX_INT64 - 1, _MAX_INT64)
    if _is_number(call.steps):
        checks.as_int("steps", call.steps, 0)
    checks.as_int("pad_token", call.pad_token, -(2**31))
    draws = isinstance(temperature, Tensor) or (temperature or 0.0) >= GREEDY_BELOW
    if draws and call.seeds is None:
        raise ArgumentError(
            "temperature is given without seeds: rows that draw need random numbers; pass seeds, "
            "int64 [batch], one a request (or one number, where all rows may draw alike)"
        )


def _check_state(call: Any, batch: int) -> None:
    finished, stop = call.finished, call.stop_tokens
    for name in ("lengths", "max_lengths"):
        if getattr(call, name) is not None:
            checks.check_tensor(name, getattr(call, name), 1, "[batch]")
    if finished is not None:
        checks.check_tensor("finished", finished, 1, "[batch]")
        kind = torch.uint8 if finished.dtype is torch.uint8 else torch.bool
        checks.check_vector("finished", finished, batch, kind, "[batch]")
    if call.max_lengths is not None and call.lengths is None:
        raise ArgumentError("max_lengths is given without lengths: pass lengths, int32 [batch]")
    if stop is not None:
        dims = 1 if isinstance(stop, Tensor) and stop.dim() == 1 else 2
        checks.check_tensor("stop_tokens", stop, dims, "[batch, n] or [n]")
        checks.check_inner("stop_tokens", stop)
        if stop.dtype is not torch.int32:
            raise ArgumentError(
                f"stop_tokens is {stop.dtype}, wanted torch.int32: convert it by .int()"
            )
        if dims == 2 and stop.shape[0] != batch:
            raise ArgumentError(
                f"stop_tokens has shape {list(stop.shape)} for {batch} rows: pass [batch, n], or "
                "[n] of all rows"
            )
    given = [name for name in ("max_lengths", "stop_tokens") if getattr(call, name) is not None]
    if given and finished is None:
        raise ArgumentError(
            f"{given[0]} is given without finished, where it would be told: pass finished, bool or "
            "uint8 [batch]"
        )


def _is_number(x: Any) -> bool:
    return x is not None and not isinstance(x, Tensor)
