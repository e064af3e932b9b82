"""`smkern.merge_states`: attention over a union of keys from attention over its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from smkern.errors import ArgumentError, WarmupError
from smkern.ops import checks
from smkern.ops.attention.aliasing import check_overlap
from smkern.ops.attention.host import host_budget
from smkern.ops.bounded_cache import keep
from smkern.ops.checks import writable
from smkern.ops.operator_library import NAMESPACE
from smkern.ops.reference import attention as reference
from smkern.ops.streams import Streams, runtime_streams

if TYPE_CHECKING:
    from smkern.kernels.attention.merge_triton import MergeVariant

MAX_HEAD_DIM = 1024
SCHEMA = (
    "merge_states(Tensor outs, Tensor lses, *, SymInt? num_sms=None) -> (Tensor out, Tensor lse)"
)
OUT_SCHEMA = (
    "merge_states_out(Tensor outs, Tensor lses, Tensor(a!) out, Tensor(b!) lse, *, "
    "SymInt? num_sms=None) -> ()"
)
_PLAIN = frozenset({Tensor, Parameter})
_is_compiling = torch.compiler.is_compiling
_num_modes = torch._C._len_torch_dispatch_stack


def merge_states(
    outs: Tensor | Sequence[Tensor],
    lses: Tensor | Sequence[Tensor],
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    num_sms: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over a union of keys from attention over its parts, as in cascades.

    lse = log sum_i exp(lses_i), out = sum_i exp(lses_i - lse) outs_i, in fp32, in the order of the
    parts. A part that saw no key (lse -inf) counts for nothing, whatever its out holds. Sinks are a
    part's keys too: give them to one part only.

    Args:
        outs: [n, tokens, heads, head_dim], bf16, fp16 or fp32, inner stride 1; or n tensors, which
            torch stacks first (a copy, which a budget below the stream's does not confine).
        lses: [n, tokens, heads] fp32, contiguous; or n tensors. Natural logarithm.
        out: [tokens, heads, head_dim] to write into; overlaps nothing.
        lse: [tokens, heads] fp32, contiguous, to write into.
        num_sms: SMs to use at most. None: all that the current stream's partition has.

    Returns:
        (out, lse); 0 and -inf where no part saw a key.

    Raises:
        BudgetError: `num_sms` below 1, above the device or above the stream's partition.
        ArgumentError: shapes, dtypes, strides, devices or overlaps that cannot be served.
        DeviceError: the GPU is older than sm_80.
        WarmupError: a graph capture met a kernel that is not loaded.

    Source: FlashInfer (arXiv 2501.01005) section 2.2, attention states and their composition.

    Example:
        >>> import torch, smkern
        >>> outs = torch.stack([torch.zeros(1, 1, 64), torch.ones(1, 1, 64)])
        >>> smkern.merge_states(outs, torch.zeros(2, 1, 1))[0].unique().tolist()
        [0.5]
    """
    states, sums = _stacked("outs", outs), _stacked("lses", lses)
    if _is_compiling() or states.__class__ not in _PLAIN or _num_modes():
        return _through_library(states, sums, out, lse, num_sms)
    return run(states, sums, out, lse, num_sms)


def _through_library(
    outs: Tensor, lses: Tensor, out: Tensor | None, lse: Tensor | None, num_sms: Any
) -> tuple[Tensor, Tensor]:
    if out is None and lse is None:
        merged, total = torch.ops.smkern.merge_states(outs, lses, num_sms=num_sms)
        return merged, total
    out = outs.new_empty(outs.shape[1:]) if out is None else out
    lse = lses.new_empty(lses.shape[1:]) if lse is None else lse
    torch.ops.smkern.merge_states_out(outs, lses, out, lse, num_sms=num_sms)
    return out, lse


def run(
    outs: Tensor, lses: Tensor, out: Tensor | None, lse: Tensor | None, num_sms: Any
) -> tuple[Tensor, Tensor]:
    """Check stacked states and merge them: the kernel on a GPU, the reference elsewhere."""
    check_states(outs, lses, out, lse)
    check_overlap({"out": out, "lse": lse}, {"outs": outs, "lses": lses})
    if outs.is_cuda:
        return eager_merge(outs.get_device())(outs, lses, out, lse, num_sms)
    host_budget(num_sms)
    with torch.no_grad():
        return reference.merge_states(outs, lses, out=out, lse=lse)


def _stacked(name: str, x: Any) -> Tensor:
    if isinstance(x, Tensor):
        return x
    parts = list(x) if isinstance(x, (list, tuple)) else []
    if not parts or not all(isinstance(part, Tensor) for part in parts):
        raise ArgumentError(
            f"{name} is {type(x).__name__}: pass a stacked tensor, or a list of at least one"
        )
    if any(part.shape != parts[0].shape or part.dtype is not parts[0].dtype for part in parts):
        raise ArgumentError(f"{name} holds tensors of several shapes or dtypes: they must agree")
    return torch.stack(parts)


def check_states(outs: Tensor, lses: Tensor, out: Any, lse: Any) -> None:
    """Raise ArgumentError unless these are states and places for their merge."""
    checks.check_tensor("outs", outs, 4, "[n, tokens, heads, head_dim]")
    checks.check_inner("outs", outs)
    checks.dtype_name(outs.dtype)
    if outs.shape[0] < 1 or not 1 <= outs.shape[3] <= MAX_HEAD_DIM:
        raise ArgumentError(
            f"outs has shape {list(outs.shape)}: there must be a state, and a head_dim of 1 to "
            f"{MAX_HEAD_DIM}"
        )
    _check_sums("lses", lses, outs.shape[:3], outs.device)
    if lse is not None:
        _check_sums("lse", lse, outs.shape[1:3], outs.device)
    if out is not None:
        checks.check_tensor("out", out, 3, "[tokens, heads, head_dim]")
        checks.check_inner("out", out)
        checks.check_device("out", out, outs.device, "outs")
        if out.shape != outs.shape[1:] or out.dtype is not outs.dtype or not writable(out):
            raise ArgumentError(
                f"out is {list(out.shape)} {out.dtype} with strides {out.stride()}: wanted "
                f"{list(outs.shape[1:])} {outs.dtype}, no two elements at an address"
            )


def _check_sums(name: str, x: Any, shape: torch.Size, device: torch.device) -> None:
    checks.check_tensor(name, x, len(shape), "fp32, outs' shape without head_dim")
    checks.check_device(name, x, device, "outs")
    if x.shape != shape or x.dtype is not torch.float32 or not x.is_contiguous():
        raise ArgumentError(
            f"{name} is {list(x.shape)} {x.dtype} with strides {x.stride()}: wanted {list(shape)} "
            "torch.float32, contiguous"
        )


class EagerMerge:
    """Launches merges on one device.

    Args:
        index: The device's index.
        capability: (major, minor) of it.
        num_sms: Its SMs.
        streams: The current stream and its budget.
    """

    def __init__(
        self, index: int, capability: tuple[int, int], num_sms: int, streams: Streams
    ) -> None:
        self.index = index
        self.capability = capability
        self.num_sms = num_sms
        self.streams = streams
        self._loaded: dict[Any, Any] = {}
        self._launches: dict[Any, Callable[..., None]] = {}

    def variant(self, head_dim: int, dtype: torch.dtype, aligned: bool) -> MergeVariant:
        """The kernel that merges such states."""
        from smkern.kernels.attention.merge_triton import MergeVariant

        capability = 10 * self.capability[0] + self.capability[1]
        return MergeVariant(head_dim, checks.dtype_name(dtype), aligned, capability)

    def is_loaded(self, variant: MergeVariant) -> bool:
        """Whether such a merge would compile and load nothing."""
        return variant in self._loaded

    def __call__(
        self, outs: Tensor, lses: Tensor, out: Tensor | None, lse: Tensor | None, num_sms: Any
    ) -> tuple[Tensor, Tensor]:
        if self.streams.current_device() != self.index:
            with torch.cuda.device(self.index):
                return self(outs, lses, out, lse, num_sms)
        from smkern.kernels.attention.merge_triton import MergeArguments

        stream = self.streams.current_stream(self.index)
        budget = checks.resolve_budget(
            num_sms, self.streams.budget(stream, self.index), self.num_sms
        )
        _, tokens, heads, _ = outs.shape
        state_stride, token_stride, head_stride, _ = outs.stride()
        out = outs.new_empty(outs.shape[1:]) if out is None else out
        lse = lses.new_empty(lses.shape[1:]) if lse is None else lse
        if out.numel():
            arguments = MergeArguments(
                outs.data_ptr(), lses.data_ptr(), out.data_ptr(), lse.data_ptr(),
                (state_stride, token_stride, head_stride), (out.stride(0), out.stride(1)),
                tokens, heads,
            )  # fmt: skip
            self._launch(outs, out, budget)(arguments, stream)
        return out, lse

    def _launch(self, outs: Tensor, out: Tensor, budget: Any) -> Callable[..., None]:
        """The launch of these states; in a capture only if it is loaded."""
        from smkern.kernels.attention.merge_triton import prepare_merge

        unit = 16 // outs.element_size()
        strides = (*outs.stride()[:3], *out.stride()[:2])
        aligned = not ((outs.data_ptr() | out.data_ptr()) % 16 or any(x % unit for x in strides))
        variant = self.variant(outs.shape[3], outs.dtype, aligned)
        dtype = variant.dtype
        if not self.is_loaded(variant):
            if self.streams.capturing():
                raise WarmupError(
                    f"merging states of head_dim {outs.shape[3]} in {dtype} (16-byte aligned: "
                    f"{aligned}) needs a kernel that is not loaded, and a graph capture cannot "
                    "load one: call smkern.warmup(attention=[...]), or smkern.merge_states once, "
                    "before"
                )
            if self.capability < checks.MIN_CAPABILITY:
                checks.check_capability(outs.device, self.capability)
        key = (outs.shape[0], outs.shape[3], dtype, budget)
        launch = self._launches.get(key)
        if launch is None:
            launch = prepare_merge(
                outs.shape[0], outs.shape[3], dtype, budget, variant.capability, self._loaded
            )
            keep(self._launches, key, launch)
        return launch


@cache
def eager_merge(index: int) -> EagerMerge:
    """The merges of a device, made at its first and kept for the process."""
    from smkern.device import device_info

    info = device_info(index)
    return EagerMerge(index, info.capability, info.num_sms, runtime_streams())


def _run(outs, lses, *, num_sms=None):
    return run(outs, lses, None, None, num_sms)


def _run_out(outs, lses, out, lse, *, num_sms=None):
    run(outs, lses, out, lse, num_sms)


def _check_fake(outs: Tensor, lses: Tensor) -> None:
    torch._check(outs.dim() == 4, lambda: f"outs {outs.shape} is not [n, tokens, heads, head_dim]")
    torch._check(lses.dim() == 3, lambda: f"lses {lses.shape} is not [n, tokens, heads]")
    for at in range(3):
        torch._check(outs.shape[at] == lses.shape[at], lambda: f"{outs.shape}, {lses.shape}")


def _fake(outs, lses, *, num_sms=None):
    _check_fake(outs, lses)
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])


def _fake_out(outs, lses, out, lse, *, num_sms=None):
    _check_fake(outs, lses)


def register() -> torch.library.Library:
    """Define both operators with their CPU, CUDA and fake implementations.

    Returns:
        The registration, which lasts as long as the object does.
    """
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
    for schema in (SCHEMA, OUT_SCHEMA):
        library.define(schema, tags=tags)
    for key in ("CPU", "CUDA"):
        library.impl("merge_states", _run, key)
        library.impl("merge_states_out", _run_out, key)
    torch.library.register_fake(f"{NAMESPACE}::merge_states", _fake, lib=library)
    torch.library.register_fake(f"{NAMESPACE}::merge_states_out", _fake_out, lib=library)
    return library


LIBRARY = register()
