"""The ceilings of a GPU that has none: measured before the first model is tuned on it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import click

from smkern.autotune.stop import Stop
from smkern.device import SHIPPED, DeviceInfo, cache_file, device_info
from smkern.tuning.cells import gpu_folder


def are_missing(info: DeviceInfo) -> bool:
    """Whether nobody measured exactly this GPU: neither its user nor whoever shipped profiles.

    To become `load_profile().source == "scaled"` once profiles say where they come from.
    """
    shipped = SHIPPED / f"{gpu_folder(info.name)}.json"
    return not (cache_file(info).exists() or shipped.exists())


def ensure(stop: Stop) -> None:
    """Measure the ceilings where there are none, in half a minute; without them goes on as well.

    In a process of its own: every dispatcher here reads its profile once.
    """
    info = device_info()
    if not are_missing(info):
        return
    click.echo(f"no ceilings of {info.name} yet: measuring them first")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "ceilings.json"
        words = ["-m", "smkern", "bench", "ceilings", "--quick", "--save", "--out", str(out)]
        with subprocess.Popen([sys.executable, *words]) as process:
            while process.poll() is None and stop.why is None:
                try:
                    process.wait(0.2)
                except subprocess.TimeoutExpired:
                    continue
            if process.poll() is None:
                process.terminate()
    if process.returncode and stop.why is None:
        click.echo(
            f"the ceilings could not be measured (exit status {process.returncode}): candidates "
            "are ranked by another GPU's; try smkern bench ceilings --save",
            err=True,
        )
