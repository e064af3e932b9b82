"""Engines that measure by turns: none in another's turn, nobody waits for one that ended."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

from smkern.bench.engines import suite
from smkern.bench.engines.cases import FP8, FP8_LINEAR, VLLM, Cell, EngineLoad
from smkern.bench.engines.tasks import VllmTasks
from smkern.bench.engines.turns import Turns, run_by_turns, starting
from smkern.bench.results import Results, load_results
from tests.bench.test_engines import Engine

WAITS = """
import sys, time
from pathlib import Path
folder = Path(sys.argv[2])
(folder / "kept.starts").unlink()
while any(folder.glob("*.starts")):
    time.sleep(0.01)
sys.exit(0 if sys.argv[1] == "--turns" else 9)
"""


def test_a_cell_is_made_in_a_turn_that_no_other_engine_has(tmp_path: Path) -> None:
    busy, seen = threading.Lock(), list[str]()

    def cells(name: str) -> Iterator[Cell]:
        for number in range(4):
            assert busy.acquire(blocking=False), "two at once"
            seen.append(name)
            busy.release()
            yield {"value": number}

    def measure(name: str) -> None:
        turns = Turns(tmp_path, name)
        turns.wait()
        found[name] = [cell["value"] for cell in turns.each(cells(name))]

    names, found = ("one", "other"), dict[str, list[int]]()
    for name in names:
        starting(tmp_path, name).touch()
    threads = [threading.Thread(target=measure, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {name: [0, 1, 2, 3] for name in names}
    assert sorted(seen) == ["one"] * 4 + ["other"] * 4


def test_who_is_up_waits_for_all_that_start(tmp_path: Path) -> None:
    for name in ("one", "other"):
        starting(tmp_path, name).touch()
    went_on = threading.Event()

    def wait() -> None:
        Turns(tmp_path, "one").wait()
        assert not starting(tmp_path, "other").exists()
        went_on.set()

    thread = threading.Thread(target=wait)
    thread.start()
    while starting(tmp_path, "one").exists():
        pass
    assert not went_on.is_set()
    Turns(tmp_path, "other").wait()
    thread.join()
    assert went_on.is_set()


def test_an_engine_that_ends_while_it_starts_is_not_waited_for() -> None:
    kept, failed = [sys.executable, "-c", WAITS], [sys.executable, "-c", "raise SystemExit(3)"]
    assert run_by_turns({"kept": kept, "failed": failed}) == {"kept": 0, "failed": 3}


def test_what_engines_write_by_turns_is_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "engines.json"
    old = Results({"command": "bench engines"})
    for provider in (VLLM, FP8, FP8_LINEAR):
        old.add(EngineLoad().cell("decode_alone", provider, 10.0, "ms"))
    old.save(out)
    given: dict[str, Sequence[str]] = {}

    def run(commands: dict[str, Sequence[str]]) -> dict[str, int]:
        given.update(commands)
        for name, command in commands.items():
            part = Path(command[command.index("--out") + 1])
            results = load_results(part)
            assert [cell["provider"] for cell in results.cells] == [name]
            results.add(EngineLoad().cell("decode_alone", name, 8.0, "ms"))
            results.save(part)
        return {FP8: 0, FP8_LINEAR: 2}

    monkeypatch.setattr(suite, "run_by_turns", run)
    monkeypatch.setattr(suite, "device_info", lambda: None)
    words = ["--engines", f"{FP8},{FP8_LINEAR}", "--by-turns", "--out", str(out)]
    ran = CliRunner().invoke(suite.command, [*words, "--limits", "20", "--time-limit-s", "90"])
    assert ran.exit_code == 0, ran.output
    assert f"{FP8_LINEAR}: its process ended with 2" in ran.output
    assert [*tmp_path.iterdir()] == [out]
    found = {cell["provider"]: cell["value"] for cell in load_results(out).cells}
    assert found == {VLLM: 10.0, FP8: 8.0, FP8_LINEAR: 8.0}
    for name, command in given.items():
        assert command[command.index("--engines") + 1] == name
        assert {"--resume", "--limits", "--time-limit-s"} <= {*command}


def test_an_engine_starts_before_its_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load, begun = EngineLoad(limits_ms=(15,)), list[str]()
    starting(tmp_path, VLLM).touch()

    def engine() -> Engine:
        if not begun:
            assert starting(tmp_path, VLLM).exists()
        begun.append("up")
        return Engine()

    def tasks(load: EngineLoad, provider: str, results: Results, steps: int) -> VllmTasks:
        return VllmTasks(load, provider, engine, results, steps)

    monkeypatch.setattr(suite, "vllm_tasks", tasks)
    results, output = Results({}), suite.Output(tmp_path / "engines.json")
    turns = Turns(tmp_path, VLLM)
    assert suite.measure_engine(VLLM, load, results, output, 200, turns=turns) == 0
    assert not starting(tmp_path, VLLM).exists()
    measured = len(begun)
    assert suite.measure_engine(VLLM, load, results, output, 200, turns=turns) == 0
    assert len(begun) == measured, "nothing is left, and nothing starts"
