"""What must hold of operators under torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def check_compiled_once(call: Callable[[int], Any]) -> None:
    """A new budget must not compile `call(num_sms)` anew: it is symbolic under dynamic shapes."""
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(call, backend=counter, dynamic=True)
    for num_sms in (8, 16, 24, 100):
        compiled(num_sms)
    assert counter.frame_count == 1
