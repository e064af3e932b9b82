"""Launches that never overlap: what programmatic dependent launch gains is the difference."""

from __future__ import annotations

import sys
from typing import Any

from smkern.kernels import driver


def forbid_overlap() -> None:
    """From now on no launch that is bound in this process overlaps the kernel before it.

    Launches are bound once and kept, so this stands at the start of a process that measures
    nothing else; there is no way back.
    """
    original = driver.launcher

    def serial(*args: Any, overlap: bool, **options: Any) -> Any:
        return original(*args, overlap=False, **options)

    for module in list(sys.modules.values()):
        if getattr(module, "launcher", None) is original:
            module.launcher = serial  # type: ignore[attr-defined]
