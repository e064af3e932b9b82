"""The entry of an operator: past torch's dispatcher wherever nothing needs it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from smkern.ops.checks import as_num_sms
from smkern.ops.operator import Operator
from smkern.ops.operator_check import check_kinds, check_operator
from smkern.ops.operator_eager import run_here, states_of
from smkern.ops.operator_library import is_static, through_library
from smkern.ops.operator_source import PLAIN, entry_function


def entry(op: Operator[Any]) -> Callable[..., Any]:
    """What runs a call, given its fields in order."""
    return entry_function(op, states_of(op), run)


def run(op: Operator[Any], call: Any) -> Any:
    """Directly where plain tensors meet no mode, else by torch's dispatcher."""
    if not torch.compiler.is_compiling():
        check_kinds(op, call)
        plain = all(getattr(call, name.partition(".")[0]).__class__ in PLAIN for name in op.tensors)
        if (
            (plain or op.parts)
            and not torch._C._len_torch_dispatch_stack()
            and torch._C._functorch.peek_interpreter_stack() is None
            and op.device_of(call).type in ("cuda", "cpu")
        ):
            return run_here(op, call)
        if is_static(op, call):
            check_operator(op, call)
        if call.num_sms is not None:
            as_num_sms(call.num_sms)
    return through_library(op, call)
