"""What a mask of transformers says, kept as numbers and short vectors instead of [q, kv] booleans.

transformers hands a mask function the pattern as a closure. The ones that attention serves are
recognised by where they were made; any other is made into the dense mask that sdpa takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from smkern.integrations.transformers.step import MaskRequest, Pattern, Step

_MODULE = "transformers.masking_utils"


def pattern_of(mask_function: Any) -> Pattern | None:
    """The pattern that a mask function of transformers is, None where it is another.

    Example:
        >>> from transformers.masking_utils import sliding_window_causal_mask_function
        >>> pattern_of(sliding_window_causal_mask_function(4))
        Pattern(causal=True, window=4)
    """
    name = _name(mask_function)
    if name == "causal_mask_function":
        return Pattern(causal=True)
    if name == "bidirectional_mask_function":
        return Pattern(causal=False)
    if name != "and_masks.<locals>.and_mask":
        return None
    pattern = Pattern(causal=False)
    for part in _held(mask_function)["mask_functions"]:
        if _name(part) == "sliding_window_overlay.<locals>.inner_mask":
            window = int(_held(part)["sliding_window"])
            pattern = replace(pattern, window=min(window, pattern.window or window))
        else:
            inner = pattern_of(part)
            if inner is None or inner.window:
                return None
            pattern = replace(pattern, causal=pattern.causal or inner.causal)
    # the kernels' window ends at the query itself only where the mask is causal
    return None if pattern.window is not None and not pattern.causal else pattern


def _name(function: Any) -> str | None:
    """Where a function of `transformers.masking_utils` was made; None for any other."""
    mine = getattr(function, "__module__", None) == _MODULE
    return getattr(function, "__qualname__", None) if mine else None


def _held(function: Any) -> dict[str, Any]:
    """What a closure holds, by name."""
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    return dict(zip(function.__code__.co_freevars, cells, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """What a `StepMask` stands for: the numbers that attention reads, and how to make it dense."""

    step: Step
    make_dense: Callable[[], Tensor]


_METADATA = frozenset(
    {
        "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_cpu",
        "is_meta", "is_sparse", "is_nested", "grad_fn", "is_leaf", "grad", "names", "size", "dim",
        "numel", "__len__", "__hash__", "get_device", "is_floating_point", "stride",
        "storage_offset", "is_contiguous", "element_size", "nelement", "ndimension",
    }
)  # fmt: skip


class StepMask(Tensor):
    """A boolean mask [batch, 1, q_length, kv_length] that was not written out.

    transformers passes it from its mask function to every layer. Attention takes `step` from it;
    whatever else computes with it gets the dense mask, made then. It owns one byte.

    Attributes:
        step: What attention reads; the layers of a forward share it.
    """

    _kept: _Kept

    @staticmethod
    def of(step: Step, make_dense: Callable[[], Tensor]) -> StepMask:
        r = step.request
        shape = (r.batch, 1, r.q_length, r.kv_length)
        seed = torch.empty(1, dtype=torch.bool, device=r.device).expand(shape)
        mask: StepMask = torch.Tensor._make_subclass(StepMask, seed)
        mask._kept = _Kept(step, make_dense)
        return mask

    @property
    def step(self) -> Step:
        return self._kept.step

    def __repr__(self) -> str:  # type: ignore[override]
        return f"StepMask({list(self.shape)}, {self.step.request.pattern})"

    def dense(self) -> Tensor:
        """The mask written out: True where a query sees a key."""
        return self._kept.make_dense()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.__name__
        if name in ("__get__", "__set__"):  # a property of Tensor
            name = func.__self__.__name__
        if name in _METADATA or (name.startswith("_") and not name.startswith("__")):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if name in ("contiguous", "detach", "requires_grad_") or _stays(name, args, kwargs):
            return args[0]
        given: Any = torch.utils._pytree.tree_map_only(cls, cls.dense, (args, kwargs or {}))
        return func(*given[0], **given[1])


def _stays(name: str, args: tuple[Any, ...], kwargs: Any) -> bool:
    """Whether `.to(...)` asks for the device that a mask is on, as hooks that place inputs do."""
    if name != "to" or set(kwargs or {}) - {"device", "non_blocking"}:
        return False
    asked = (*args[1:], (kwargs or {}).get("device"))
    places = [torch.device(x) for x in asked if isinstance(x, (str, int, torch.device))]
    return len(places) == 1 and places[0] == args[0].device


def mask_request(
    batch: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor,
    kv_offset: int,
    pattern: Pattern,
    attention_mask: Tensor | None,
    device: torch.device,
) -> MaskRequest:
    """The numbers of a mask, with the padding of the keys that there are: [batch, kv_length]."""
    padding = attention_mask
    if padding is not None:
        end = kv_offset + kv_length
        if padding.shape[-1] < end:  # a static cache, longer than what was seen
            padding = torch.nn.functional.pad(padding, (0, end - padding.shape[-1]))
        padding = padding[:, kv_offset:end].to(torch.bool)
    return MaskRequest(batch, q_length, kv_length, q_offset, kv_offset, pattern, padding, device)
