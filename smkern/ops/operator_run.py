"""The entry of a small operator: past torch's dispatcher wherever nothing needs it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from smkern.ops.operator import Operator
from smkern.ops.operator_check import check_operator
from smkern.ops.operator_eager import PLAIN, eager_operator, run_on_cpu
from smkern.ops.operator_library import through_library

_is_compiling = torch.compiler.is_compiling
_num_modes = torch._C._len_torch_dispatch_stack
_transform = torch._C._functorch.peek_interpreter_stack


def run(op: Operator[Any], call: Any) -> Any:
    """Directly where plain tensors meet no mode, else by torch's dispatcher."""
    if not (_is_compiling() or _num_modes() or _transform() is not None):
        for at in op.places:
            if call[at].__class__ not in PLAIN:
                break
        else:
            first = call[0]
            if not isinstance(first, Tensor):
                check_operator(op, call)  # which refuses it
            if first.is_cuda:
                return eager_operator(op, first.get_device())(call)
            if first.device.type == "cpu":
                return run_on_cpu(op, call)
    return through_library(op, call)
