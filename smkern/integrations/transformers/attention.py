"""The attention function that transformers calls, and the plans its layers share."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor

from smkern.errors import ArgumentError
from smkern.integrations.transformers.mask import StepMask, mask_request, pattern_of
from smkern.integrations.transformers.pages import Pages, as_pages, page_table
from smkern.integrations.transformers.step import MaskRequest, Pattern, Step, make_step
from smkern.ops.attention import Plan, paged_attention, plan_attention
from smkern.ops.checks import HEAD_DIMS
from smkern.partition import current_num_sms

_MAX_PLANS = 16
_SERVED = "padding, causal, bidirectional, causal with a sliding window"


class _Slot:
    """A plan, and the step that it was last made for."""

    __slots__ = ("owner", "plan")

    def __init__(self, plan: Plan, owner: Step) -> None:
        self.plan = plan
        self.owner = owner


class Attention:
    """Attention of transformers' layers by `smkern.paged_attention`.

    Its plans are kept from forward to forward and made anew in place, one for each stream, budget
    and set of host numbers, so a decode step allocates no plan.

    Args:
        fallback: What to do with a mask that no page table expresses: True calls transformers'
            sdpa, with a warning; False raises ArgumentError.
    """

    def __init__(self, *, fallback: bool = True) -> None:
        self.fallback = fallback
        self._slots: OrderedDict[Any, _Slot] = OrderedDict()

    def mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int | Tensor = 0,
        kv_offset: int = 0,
        mask_function: Any = None,
        attention_mask: Tensor | None = None,
        device: torch.device | str = "cpu",
        **options: Any,
    ) -> Tensor:
        """transformers' mask function: a `StepMask`, or the dense mask where there is no step."""
        from transformers.masking_utils import causal_mask_function, sdpa_mask

        mask_function = causal_mask_function if mask_function is None else mask_function
        device = torch.device(device)

        def make_dense() -> Tensor:
            mask: Tensor = sdpa_mask(
                batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
                kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask,
                allow_is_causal_skip=False, use_vmap=options.get("use_vmap", False), device=device,
            )  # fmt: skip
            return mask

        pattern = pattern_of(mask_function)
        if pattern is None or (attention_mask is not None and attention_mask.dim() != 2):
            return make_dense()
        request = mask_request(
            batch_size, q_length, kv_length, q_offset, kv_offset, pattern, attention_mask, device
        )
        step = make_step(request)
        return make_dense() if step is None else StepMask.of(step, make_dense)

    def attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """transformers' attention function.

        Args:
            module: The layer; its `training` counts, and `is_causal` where no mask says more.
            query: [batch, q_heads, q_length, head_dim].
            key: [batch, kv_heads, kv_length, head_dim], any strides.
            value: Likewise.
            attention_mask: From `mask`; None: causal where the layer is, from the first key on;
                any other mask goes to sdpa.
            dropout: 0.
            scaling: Factor of the scores. None: head_dim ** -0.5.
            is_causal: In place of the layer's.
            softcap: As in `paged_attention`.
            s_aux: [q_heads] sinks, any float dtype.
            options: What other implementations read; `sliding_window` is in the mask already.

        Returns:
            [batch, q_length, q_heads, head_dim], and None for the weights, which no one has.

        Raises:
            ArgumentError: dropout, gradients in training, attention weights, a position bias, a
                paged cache of transformers' own; a mask that cannot be served together with
                softcap or sinks, or with `fallback=False`; what `paged_attention` cannot take.
        """
        _refuse(module, (query, key, value), dropout, options)
        softcap = softcap or None
        mask = attention_mask
        if mask is None:
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            step = _step_without_mask(query, key, bool(causal))
            if step.request.kv_length < key.shape[2]:  # an empty static cache
                key, value = (x[:, :, : query.shape[2]] for x in (key, value))
        elif isinstance(mask, StepMask) and _shape_of(mask) == _shape(query, key):
            step = mask.step
        else:
            mask = mask.dense() if isinstance(mask, StepMask) else mask
            self._check_fallback(mask, softcap, s_aux)
            return _sdpa(
                module, query, key, value, mask, scaling=scaling, is_causal=is_causal, **options
            )
        out = self._run(step, query, key, value, scaling, softcap, s_aux)
        if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
            out = _NoBackward.apply(out, query, key, value)
        return out, None

    def _run(
        self,
        step: Step,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        batch, heads, q_length, dim = query.shape
        if value.shape[-1] != dim or dim not in HEAD_DIMS:
            raise ArgumentError(
                f"head_dim is {dim} and {value.shape[-1]} of values: smkern serves equal ones of "
                f"{list(HEAD_DIMS)}; build this model with attn_implementation='sdpa'"
            )
        with torch.no_grad():
            q = query.transpose(1, 2).reshape(batch * q_length, heads, dim)
            q = q if q.stride(-1) == 1 else q.contiguous()
            pages = as_pages(key, value, whole=_takes_whole_pages(step))
            out = paged_attention(
                q, pages.k, pages.v, page_table(step, pages), step.kv_lens,
                cu_q_lens=step.cu_q_lens, max_q_len=None if q_length == 1 else q_length,
                causal=step.causal, scale=scaling, window=step.window, softcap=softcap,
                sinks=None if sinks is None else sinks.float(),
                plan=self._plan(step, heads, pages),
            )  # fmt: skip
        return out.view(batch, q_length, heads, dim)

    def _plan(self, step: Step, heads: int, pages: Pages) -> Plan:
        """The plan of a step for layers of these sizes, made by the first of them."""
        _, page_size, kv_heads, dim = pages.k.shape
        device, stream, capturing = pages.k.device, 0, False
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device).cuda_stream
            capturing = torch.cuda.is_current_stream_capturing()
        mine = (heads, kv_heads, dim, page_size, stream, capturing)
        slot: _Slot | None = step.plans.get(mine)
        if slot is not None and slot.owner is step:
            return slot.plan
        numbers: dict[str, Any] = {
            "num_q_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim,
            "page_size": page_size, "max_q_len": step.request.q_length,
            "max_kv_len": _rounded_up(step.max_kv_len), "causal": step.causal,
            "window": step.window,
        }  # fmt: skip
        # what a graph's plan lies in is the graph's: no call outside of it may get it
        slot = _made(step, numbers) if capturing else self._slot(step, numbers, device, stream)
        step.plans[mine] = slot
        return slot.plan

    def _slot(
        self, step: Step, numbers: dict[str, Any], device: torch.device, stream: int
    ) -> _Slot:
        """A plan of these numbers that is kept from step to step, made anew for this one."""
        num_sms = current_num_sms(device.index) if device.type == "cuda" else 1
        key = (device, stream, num_sms, step.request.batch, *numbers.values())
        slot = self._slots.get(key)
        if slot is None:
            slot = self._slots[key] = _made(step, numbers)
            if len(self._slots) > _MAX_PLANS:
                self._slots.popitem(last=False)
        else:
            plan_attention(step.kv_lens, cu_q_lens=step.cu_q_lens, out=slot.plan, **numbers)
            slot.owner = step
        self._slots.move_to_end(key)
        return slot

    def _check_fallback(self, mask: Tensor, softcap: float | None, sinks: Tensor | None) -> None:
        """Warn that a mask goes to sdpa, or raise where it must not."""
        what = f"a mask {list(mask.shape)} that is none of: {_SERVED}"
        if softcap is not None or sinks is not None:
            name = "softcap" if sinks is None else "sinks"
            raise ArgumentError(
                f"{what}; with {name} there is no sdpa to fall back to: pass a 2-D attention_mask, "
                "or build this model with attn_implementation='eager'"
            )
        if not self.fallback:
            raise ArgumentError(
                f"{what}: pass a 2-D attention_mask, register(fallback=True), or build this model "
                "with attn_implementation='sdpa'"
            )
        warnings.warn(f"{what}: sdpa serves it, in each such call", RuntimeWarning, stacklevel=4)


def _made(step: Step, numbers: dict[str, Any]) -> _Slot:
    return _Slot(plan_attention(step.kv_lens, cu_q_lens=step.cu_q_lens, **numbers), step)


class _NoBackward(torch.autograd.Function):
    """Marks a result as one that has no backward, so that a loss does not lose its gradient."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, *inputs: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ArgumentError(
            "smkern attention has no backward: train with model.set_attn_implementation('sdpa')"
        )


def _refuse(module: Any, tensors: tuple[Tensor, ...], dropout: float, options: Any) -> None:
    """Raise ArgumentError for what other implementations do and this one does not."""
    if dropout:
        raise ArgumentError(
            f"dropout={dropout}, smkern attention has none: call model.eval(), or train with "
            "attn_implementation='sdpa'"
        )
    training = getattr(module, "training", False) and torch.is_grad_enabled()
    if training and any(x.requires_grad for x in tensors):
        raise ArgumentError(
            "a training forward needs a gradient, smkern attention has no backward: call "
            "model.eval() under torch.no_grad(), or train with attn_implementation='sdpa'"
        )
    if options.get("output_attentions"):
        raise ArgumentError(
            "output_attentions=True, and smkern never has the weights of attention: build this "
            "model with attn_implementation='eager'"
        )
    for name, remedy in (("position_bias", "sdpa"), ("cache", "paged|eager")):
        if options.get(name) is not None:
            raise ArgumentError(
                f"{name} is given, which smkern attention cannot serve: build this model with "
                f"attn_implementation={remedy!r}"
            )


def _step_without_mask(query: Tensor, key: Tensor, causal: bool) -> Step:
    """What sdpa does without a mask: causal from the first key on; one token sees all keys."""
    batch, _, q_length, _ = query.shape
    causal = causal and q_length > 1
    kv_length = min(q_length, key.shape[2]) if causal else key.shape[2]
    first = 0 if causal else kv_length - q_length
    request = MaskRequest(batch, q_length, kv_length, first, 0, Pattern(causal), None, query.device)
    step = make_step(request)
    if step is None:
        raise ArgumentError(
            f"{q_length} causal query tokens over {kv_length} keys without a mask: pass one"
        )
    return step


def _shape_of(mask: StepMask) -> tuple[int, int, int]:
    request = mask.step.request
    return request.batch, request.q_length, request.kv_length


def _shape(query: Tensor, key: Tensor) -> tuple[int, int, int]:
    return query.shape[0], query.shape[2], key.shape[2]


def _takes_whole_pages(step: Step) -> bool:
    """Whether pages of several tokens pay: for many query tokens, and for a cache of fixed size.

    A cache that grows token by token would have them in every 16th step alone, and need both
    kernels.
    """
    request = step.request
    if step.order is not None:
        return False
    return request.q_length >= 16 or isinstance(request.q_offset, Tensor)


def _rounded_up(length: int) -> int:
    """The bound of a growing length, so that plan and kernels stay the same for many steps."""
    return max(256, 1 << (length - 1).bit_length())


def _sdpa(*args: Any, **options: Any) -> tuple[Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    found: tuple[Tensor, None] = sdpa_attention_forward(*args, **options)
    return found


def register_attention(name: str, attention: Attention) -> None:
    """Register an attention function and its mask function under a name.

    Raises:
        ImportError: transformers is absent, or older than 5.17.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            f"{error}: smkern's attention needs transformers 5.17 or later; pip install "
            "'smkern[transformers]'"
        ) from error
    # what they make and keep between forwards is no part of a compiled graph
    AttentionInterface.register(name, torch.compiler.disable(attention.attend))
    AttentionMaskInterface.register(name, torch.compiler.disable(attention.mask))
