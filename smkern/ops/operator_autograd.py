"""What torch's autograd finds of an operator: that there is no backward, said by name.

Without a kernel of its own torch lets a result require a gradient and hands back zeros, or None.
So a functional operator's result has a backward that raises, traced by torch.compile as an operator
that raises when it runs; one that writes into its arguments, or is called inside `torch.func.grad`
and `jvp`, raises at once. Calls of plain tensors that skip torch's dispatcher have no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from smkern.errors import ArgumentError
from smkern.ops.checks import check_writable

_AFTER = torch._C._after_autograd_keyset
_requires_grad = torch._C._any_requires_grad
_transform = torch._C._functorch.peek_interpreter_stack


def _refuse(name: str) -> ArgumentError:
    return ArgumentError(
        f"{name} has no backward, and an argument requires a gradient: call it under "
        "torch.no_grad(), or pass x.detach()"
    )


class _NoBackward(torch.autograd.Function):
    """A result whose gradient is asked for in vain."""

    @staticmethod
    def forward(ctx: Any, name: str, run: Callable[[], Any], *inputs: Tensor) -> Any:
        ctx.name = name
        ctx.save_for_backward(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return run()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        given = [x for x in gradients if x is not None]
        found = torch.ops.smkern.no_backward(list(ctx.saved_tensors), given, ctx.name)
        return None, None, *found


def autograd_kernel(op: Any) -> Callable[..., Any]:
    """What runs an overload of an operator at torch's autograd keys; gets the key set first."""
    name, arguments = str(op._schema.name).replace("::", "."), op._schema.arguments
    places = [at for at, x in enumerate(arguments) if x.alias_info and x.alias_info.is_write]

    def writes(args: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """Check what is written; whether that could have a gradient, not being whole numbers."""
        found = False
        for at in places:
            x = args[at] if at < len(args) else options.get(arguments[at].name)
            if x is not None:
                check_writable(arguments[at].name, x)
                found = found or x.is_floating_point()
        return found

    def run(keys: Any, *args: Any, **options: Any) -> Any:
        numbers = writes(args, options) if places else False
        if torch.is_grad_enabled() and _requires_grad(*args, **options):
            if numbers or _transform() is not None:
                raise _refuse(name)
            given = [x for x in (*args, *options.values()) if isinstance(x, Tensor)]
            inputs = [x for x in given if x.requires_grad]
            return _NoBackward.apply(
                name, lambda: op.redispatch(keys & _AFTER, *args, **options), *inputs
            )
        if forward_ad._current_level >= 0:
            given = [x for x in (*args, *options.values()) if isinstance(x, Tensor)]
            if any(forward_ad.unpack_dual(x).tangent is not None for x in given):
                raise _refuse(name)
        return op.redispatch(keys & _AFTER, *args, **options)

    return run


def _no_backward(inputs: list[Tensor], gradients: list[Tensor], name: str) -> list[Tensor]:
    """Takes the gradients, so that a compiled function's forward does not run it already."""
    raise _refuse(name)


def _fake_backward(inputs: list[Tensor], gradients: list[Tensor], name: str) -> list[Tensor]:
    return [torch.empty_like(x) for x in inputs]


LIBRARY = torch.library.Library("smkern", "FRAGMENT")
LIBRARY.define("no_backward(Tensor[] inputs, Tensor[] gradients, str name) -> Tensor[]")
LIBRARY.impl("no_backward", _no_backward, "CPU")
LIBRARY.impl("no_backward", _no_backward, "CUDA")
torch.library.register_fake("smkern::no_backward", _fake_backward, lib=LIBRARY)
