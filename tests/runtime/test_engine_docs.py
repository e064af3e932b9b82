"""What the runtime's documentation shows to engines runs, and loads no more than it needs."""

from __future__ import annotations

import doctest
import subprocess
import sys

import smkern.runtime


def test_the_engines_example_is_one():
    assert doctest.testmod(smkern.runtime).attempted > 5


def test_the_interleaver_on_a_simulation_loads_no_torch():
    code = (
        "import sys; from smkern.runtime import HostDevice, Interleaver, SimDevice, Work; "
        "Interleaver(SimDevice(132, (32,))); print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
