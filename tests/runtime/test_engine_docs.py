"""What the runtime's documentation shows to engines runs, and loads no more than it needs."""

from __future__ import annotations

import doctest
import subprocess
import sys
from importlib import import_module

import pytest

import smkern.runtime


@pytest.mark.parametrize(
    "name", ["", ".interleaver", ".place", ".device", ".host_device", ".sim.device", ".serving"]
)
def test_examples_run(name):
    found = doctest.testmod(import_module(f"smkern.runtime{name}"))
    assert found.failed == 0


def test_the_engines_example_is_one():
    assert doctest.testmod(smkern.runtime).attempted > 5


@pytest.mark.parametrize("name", smkern.runtime.__all__)
def test_public_names_resolve(name):
    assert getattr(smkern.runtime, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Interleave'"):
        _ = smkern.runtime.Interleave


def test_the_interleaver_on_a_simulation_loads_no_torch():
    code = (
        "import sys; from smkern.runtime import HostDevice, Interleaver, SimDevice, Work; "
        "Interleaver(SimDevice(132, (32,))); print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "False"
