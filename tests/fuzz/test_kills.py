"""Processes that are killed while they tune, compile, save and serve, in one cache and folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from smkern.bench.results import load_results
from smkern.latency.profile_file import read_profile
from smkern.profile import load_profile, profile_for
from smkern.runtime.timeline.timeline import Timeline
from smkern.tuning.select import GEMM_FAMILY

ROOT = Path(__file__).resolve().parents[2]
H200 = load_profile("h200")
WORKER = """
import json, sys
from pathlib import Path
from smkern.bench.results import Results
from smkern.kernels import cuda_source
from smkern.latency import Size
from smkern.latency.profile_file import Measured, ProfileFile
from smkern.latency.sample import Sample
from smkern.profile import load_profile, save_profile
from smkern.runtime.timeline.timeline import Timeline
from smkern.tuning.cells import PROVENANCE, user_path
from smkern.tuning.config import Budget, GemmConfig, GemmProblem
from smkern.tuning.select import GEMM_FAMILY
from smkern.tuning.table import Cell, CellKey
from tests.runtime.timeline.timelines import Script

worker, turns = map(int, sys.argv[1:])
h200 = load_profile("h200")
meta = dict.fromkeys(PROVENANCE, "x") | {"gpu": h200.info.name}
config = GemmConfig("tma", 64, 128, 64)
script = Script()
for at in range(50):
    script.ran("decode", 10.0 * at, 10.0 * at + 8, size=Size(batch=4, total_kv=64, num_layers=4))
table = GEMM_FAMILY.file(user_path(h200.info.name))
cuda_source._by_nvrtc = lambda name, defines, arch: defines[0].encode() * 50_000
steps = ProfileFile(f"{worker}.profile.jsonl")
steps.resume({"gpu": "NVIDIA H200", "model": "m", "kernels": "k", "gemms": None, "sizes": {
    "num_layers": 2, "hidden_size": 64, "intermediate_size": 64, "q_size": 64, "kv_size": 64,
    "qkv_size": 192, "head_dim": 64, "vocab_size": 64}})
for turn in range(turns):
    key = CellKey.of(GemmProblem(8 + turn % 40, 4096, 4096 + 64 * worker), Budget(32, "mask"))
    table.merge({key: Cell(config, 1.0, config, 1.0)}, meta)
    save_profile(h200)
    define = f"N={turn % 7}"
    assert cuda_source.compile_cuda("sample.cu", [define], "sm_90a") == define.encode() * 50_000
    for name in ("timeline.json", "timeline.json.gz"):
        script.timeline.save(name)
        Timeline.load(name)
    results = Results(meta)
    results.add({"op": "x", "provider": "y", "case": {"turn": turn, "words": "z" * 10_000}})
    results.save(Path("results.json"))
    steps.add([Measured("decode", Sample(Size(batch=1, total_kv=8, num_layers=2), 8, 5.0))])
    if turn == 0:
        print("began", flush=True)
"""


def work(worker: int, turns: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, str(worker), str(turns)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_what_killed_processes_leave_is_whole(cases, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for random in cases(1):
        doomed = set(random.sample(range(5), 2))
        workers = [work(at, 10**6 if at in doomed else 3) for at in range(5)]
        for at, each in enumerate(workers):
            assert each.stdout is not None
            assert each.stdout.readline() == "began\n", each.communicate()[1]
            if at in doomed:
                each.send_signal(signal.SIGKILL)
        for at, each in enumerate(workers):
            _, said = each.communicate()
            assert each.returncode == (-signal.SIGKILL if at in doomed else 0), said
        table = GEMM_FAMILY.load(H200).cells
        assert {4096 + 64 * at for at in range(5)} <= {key.k for key in table}
        assert profile_for(H200.info).source == "measured"
        for path in (tmp_path / "timeline.json", tmp_path / "timeline.json.gz"):
            assert len(Timeline.load(path).spans) == 50
        assert load_results(tmp_path / "results.json").cells
        assert all(read_profile(tmp_path / f"{at}.profile.jsonl").lines for at in range(5))
        last = work(0, 8)
        assert last.wait() == 0, last.communicate()[1]
