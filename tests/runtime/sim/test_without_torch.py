"""A replay on the simulated device loads no torch: it takes 2 s and 350 MB to import."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

REPLAY = """
import sys
from types import SimpleNamespace
from smkern.kv import VirtualTokens
from smkern.latency import TablePredictor
from smkern.models import SamplingParams, preset, presets
from smkern.policies import StaticSplit
from smkern.replay import SimServer
from smkern.runtime import Multiplexer, SimDevice, SimExecutor, StepLog, Timeline

predictor = TablePredictor.load("qwen3-8b")
device, log = SimDevice(132, (32,), predictor), StepLog()
executor = SimExecutor(preset("qwen3-8b"), device, num_pages=64, checks=False)
policy = StaticSplit(32, predictor=predictor)
mux = Multiplexer(executor, policy=policy, log=log, timeline=Timeline.off(132))
mux.submit(VirtualTokens(900, (1,)), SamplingParams(max_new_tokens=9, ignore_eos=True))
assert [len(log.token_us(output.id)) for output in mux.run()] == [9]
assert callable(presets)
assert SimServer("qwen3-8b").kv_tokens == 700_000
assert "torch" not in sys.modules, sorted(name for name in sys.modules if "smkern" in name)
sys.modules["torch"] = SimpleNamespace(bfloat16="torch's", float16=None, float32=None)
assert preset("qwen3-8b").dtype == "torch's"
"""
COMMAND = """
import sys
from click.testing import CliRunner
from smkern.bench.replay.command import command

words = "--trace sharegpt-like --policy chunked,adaptive --rate 4 --seconds 2 --simulate"
ran = CliRunner().invoke(command, words.split(), catch_exceptions=False)
assert ran.exit_code == 0, ran.output
assert "torch" not in sys.modules, sorted(name for name in sys.modules if "smkern" in name)
"""


@pytest.mark.parametrize("program", [REPLAY, COMMAND])
def test_a_replay_loads_no_torch(program: str) -> None:
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
