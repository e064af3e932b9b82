"""`check=True`: read the rows' parameters from the device and name the first that is wrong.

It waits for the device, so it is for debugging and tests, never for serving or a capture.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smkern.errors import ArgumentError
from smkern.ops.checks import check_uncaptured

_WANTED = {
    "temperature": "a number of at least 0",
    "top_k": "at least 0 (0: all)",
    "top_p": "above 0 and at most 1 (1: all)",
    "min_p": "of 0 (all) to 1",
    "steps": "at least 0",
    "lengths": "at least 0",
    "stop_tokens": "a token, or -1",
    "logits": "a row with a number above -inf, and no NaN",
}


def check_memory(call: Any) -> None:
    """Check what the tensors of a call hold, rows that are finished left out.

    Args:
        call: A call whose host side is in order.

    Raises:
        ArgumentError: naming the tensor, the row, its value, and what is wanted; or in a capture.
    """
    if call.logits.is_meta:
        raise ArgumentError("check=True reads memory, which meta tensors have none of")
    check_uncaptured(call.logits.is_cuda and torch.cuda.is_current_stream_capturing())
    live = torch.ones(call.logits.shape[0], dtype=torch.bool)
    if call.finished is not None:
        live = call.finished.cpu() == 0
    for name, wrong in _wrong(call).items():
        rows = (wrong & live).nonzero().flatten()
        if len(rows):
            row, x = int(rows[0]), getattr(call, name)
            value = "" if name == "logits" else f" is {x[row % len(x)].tolist()}"
            raise ArgumentError(f"{name}[{row}]{value}: wanted {_WANTED[name]}; correct it")


def _wrong(call: Any) -> dict[str, Tensor]:
    """Rows that are wrong, [batch] bool, by tensor."""
    vocab = call.logits.shape[1]
    top_p, min_p, stop = (_host(x) for x in (call.top_p, call.min_p, call.stop_tokens))
    found = {}
    for name in ("temperature", "top_k", "steps", "lengths"):
        x = _host(getattr(call, name))
        if x is not None:
            found[name] = ~(x >= 0)
    if top_p is not None:
        found["top_p"] = ~((top_p > 0) & (top_p <= 1))
    if min_p is not None:
        found["min_p"] = ~((min_p >= 0) & (min_p <= 1))
    if stop is not None:
        wrong = ((stop < -1) | (stop >= vocab)).any(-1)
        found["stop_tokens"] = wrong.expand(call.logits.shape[0])
    logits = call.logits
    found["logits"] = (logits.isnan().any(1) | (logits.amax(1) == -torch.inf)).cpu()
    return found


def _host(x: object) -> Tensor | None:
    return x.cpu() if isinstance(x, Tensor) else None
