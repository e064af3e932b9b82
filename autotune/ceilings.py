"""The ceilings of a GPU that has none: measured before the first model is tuned on it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import click

from smkern.autotune.stop import Stop
from smkern.device import device_info
from smkern.profile import load_profile


def are_missing() -> bool:
    """Whether nobody measured exactly this GPU: neither its user nor whoever shipped profiles."""
    return load_profile().source == "scaled"


def ensure(stop: Stop) -> None:
    """Measure the ceilings where there are none, in half a minute; without them goes on as well.

    In a process of its own: every dispatcher here reads its profile once.
    """
    if not are_missing():
        return
    click.echo(f"no ceilings of {device_info().name} yet: measuring them first")
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
