"""Where a measurement comes from: the GPU, the software, the commit and the command."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from smkern.device import device_info, has_gpu
from smkern.errors import DeviceError
from smkern.kernels.cute.compile import VERSION, absent, is_there

JsonDict = dict[str, Any]


def collect_meta() -> JsonDict:
    """Provenance of this run: gpu, driver, torch, triton, smkern_commit, date, command, and whether
    CUTLASS's kernels can be compiled (its version) or were (kept kernels)."""
    return {
        **_software(),
        **_gpu(),
        "smkern_commit": _commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": _command_line(sys.argv),
    }


def chip() -> JsonDict:
    """Which chip is here, for cells of what chips of one kind differ in by some percent: the
    beginning of its UUID; nothing without a GPU."""
    if not has_gpu():
        return {}
    import torch

    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    return {"chip": str(uuid)[:8]}


def _software() -> JsonDict:
    found: JsonDict = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in ("torch", "triton"):
        try:
            found[name] = str(__import__(name).__version__)
        except ImportError:
            found[name] = None
    found["cutlass"] = VERSION if not absent() else "kept kernels" if is_there() else None
    return found


def _gpu() -> JsonDict:
    try:
        info = device_info()
    except DeviceError:
        return {"gpu": None, "driver": None}
    return {"gpu": info.name, "driver": info.driver, "num_sms": info.num_sms}


def _commit() -> str:
    """The checkout's commit, from git or, in a copy without it, from SMKERN_COMMIT."""
    root, told = Path(__file__).resolve().parents[2], os.environ.get("SMKERN_COMMIT", "unknown")
    if not (root / ".git").exists():  # git would describe whose folders this was installed into
        return told
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=root,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return told
    return found.stdout.strip()


def _command_line(argv: Iterable[str]) -> str:
    """The command as a reader would type it: no interpreter, no paths of this machine."""
    program, *rest = argv
    path = Path(program)
    name = path.name
    if name == "__main__.py":
        name = f"python -m {path.parent.name}"
    return " ".join([name, *(Path(x).name if x.startswith("/") else x for x in rest)])
