"""Engines that stand on one GPU beside each other and measure by turns.

They start together, which for several takes as long as for one, and see the same chip at the same
temperatures. What an engine does to the GPU it does while it holds a lock.
"""

from __future__ import annotations

import fcntl
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from smkern.bench.engines.cases import Cell

PAUSE_S = 0.05
"""Between looks, and between turns: who gives the lock away would have it again at once."""


@dataclass(frozen=True, slots=True)
class Turns:
    """One engine among those that measure by turns.

    Attributes:
        folder: Has a file for each that still starts, and the lock.
        name: The engine's.
    """

    folder: Path
    name: str

    def wait(self) -> None:
        """This engine is up; return when all are."""
        starting(self.folder, self.name).unlink(missing_ok=True)
        while any(self.folder.glob(starting(self.folder, "*").name)):
            time.sleep(PAUSE_S)

    def each(self, cells: Iterator[Cell]) -> Iterator[Cell]:
        """The cells, each made in a turn of its own."""
        while True:
            with self._turn():
                cell = next(cells, None)
            if cell is None:
                return
            yield cell
            time.sleep(PAUSE_S)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with (self.folder / "turn").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def starting(folder: Path, name: str) -> Path:
    """The file that is there for as long as an engine starts."""
    return folder / f"{name}.starts"


def run_by_turns(commands: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Run the command of each engine beside the others'; their exit codes.

    Args:
        commands: By engine; "--turns" and a folder are put behind each.
    """
    codes: dict[str, int] = {}
    with TemporaryDirectory() as made:
        folder = Path(made)
        for name in commands:
            starting(folder, name).touch()
        started = {
            name: subprocess.Popen([*command, "--turns", made])
            for name, command in commands.items()
        }
        while started:
            for name, process in [*started.items()]:
                code = process.poll()
                if code is not None:
                    del started[name]
                    codes[name] = code
                    starting(folder, name).unlink(missing_ok=True)  # nobody waits for it
            time.sleep(PAUSE_S)
    return codes
