"""A profile's timing on CPU tensors and on a virtual clock, and its file."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from click.testing import CliRunner, Result

from smkern.cli import cli
from smkern.errors import ArgumentError, DeviceError, TableError
from smkern.latency import Chunk, Size
from smkern.latency.gemm_times import GemmTimes
from smkern.latency.profile_file import Measured, ProfileFile, read_profile
from smkern.latency.sample import Sample
from smkern.latency.sizes import ModelSizes
from smkern.latency.stamp import kernels_hash
from smkern.measure import profiler
from smkern.measure.busy import Turns, measure
from smkern.measure.launches import ModelLaunches
from smkern.measure.profile_command import errors_of, provenance
from smkern.measure.profile_plan import Cell, Room
from smkern.measure.profiler import Profiler, _forwards
from smkern.models.architecture import MoeConfig
from smkern.runtime.device import Device, Work
from smkern.runtime.place import Lane, Place
from tests.docs.pages import ROOT
from tests.measure.tiny_launches import tiny_launches
from tests.models.generation import tiny

pytestmark = pytest.mark.slow

SIZES = ModelSizes.of(tiny())
META = {"gpu": "a", "model": "tiny", "kernels": "1", "sizes": SIZES.to_json(), "gemms": None}


@pytest.fixture(scope="module")
def launches() -> Iterator[ModelLaunches]:
    with tiny_launches(64, max_running=8, max_prefill=4, max_tokens=64) as made:
        yield made


CELLS = {
    "decode": Cell(32, (17, 40, 3)),
    "prefill": Cell(32, (), (Chunk(20), Chunk(7, 40))),
    "pair": Cell(32, (9,) * 5, (Chunk(33),), held_out=True),
    "mixed": Cell(None, (30, 5), (Chunk(12, 16),), mixed=True),
}


@pytest.mark.parametrize("kind", CELLS)
def test_a_cell_on_cpu_tensors(kind, launches, monkeypatch) -> None:
    monkeypatch.setattr(profiler, "WHOLE_US", inf)  # however slow this host is
    cell = CELLS[kind]
    lines = Profiler(launches, ProfileFile("unused"), patience=0).cell(cell)
    layers = launches.config.num_layers
    step = Size(num_layers=layers, batch=len(cell.lengths), total_kv=sum(cell.lengths))
    prompts = Size(cell.chunks, layers, layers, True)
    wanted = {
        "decode": [(step, 32, None, 0)],
        "prefill": [(prompts, 100, None, 0)],
        "pair": [(step, 32, prompts, 100), (prompts, 100, step, 32)],
        "mixed": [(Size(cell.chunks, layers, layers, True, 2, 35), 132, None, 0)],
    }[kind]
    found = [(x.sample.size, x.sample.num_sms, x.sample.beside, x.sample.beside_sms) for x in lines]
    assert found == wanted
    assert all(x.held_out is cell.held_out and x.sample.us > 0 for x in lines)
    assert all(x.about["worst_us"] >= x.sample.us and x.about["turns"] >= 2 for x in lines)


def test_long_prompts_are_timed_by_some_of_their_layers(launches, monkeypatch) -> None:
    monkeypatch.setattr(profiler, "WHOLE_US", 0.0)
    (line,) = Profiler(launches, ProfileFile("unused"), patience=0).cell(CELLS["prefill"])
    assert not line.sample.size.head


def test_prompts_that_a_host_may_bind_are_one_graph(launches: ModelLaunches, monkeypatch) -> None:
    monkeypatch.setattr(profiler, "BY_HOST", inf)
    lanes, sizes, _ = Profiler(launches, ProfileFile("unused"), patience=0)._lanes(CELLS["pair"])
    (work,) = lanes[1].works
    assert work.size == sizes[1]
    assert sizes[1].head
    ran = []
    draw = launches._draw
    monkeypatch.setattr(launches, "_draw", lambda *given: ran.append(draw(*given)))
    launches.device.launch("prefill", lanes[1].place, work)
    assert len(ran) == 1


def test_a_run_stops_in_time_and_is_resumed_in_another_order(
    launches: ModelLaunches, tmp_path: Path
) -> None:
    file = ProfileFile(tmp_path / "p.jsonl")
    cells = list(CELLS.values())
    profiler = Profiler(launches, file, patience=0)
    file.resume(META)
    assert profiler.run(cells, -1.0) == 0
    assert profiler.run(cells[:2], 60.0) == 2
    with file.path.open("a") as text:
        text.write('{"cell": "cut sh')
    done = {line.cell for line in file.resume(META)}
    assert profiler.run([x for x in cells[::-1] if x.name not in done], 60.0) == 2
    found = read_profile(file.path)
    assert [line.cell for line in found.lines] == [cells[i].name for i in (0, 1, 3, 2, 2)]
    assert (found.meta["model"], found.sizes, found.gemms) == ("tiny", SIZES, None)


def test_what_there_is_no_room_for_is_skipped(launches: ModelLaunches, tmp_path: Path) -> None:
    file = ProfileFile(tmp_path / "p.jsonl")
    file.resume(META)
    profiler = Profiler(launches, file, patience=0)
    assert profiler.run([Cell(None, (256,) * 8), CELLS["decode"]], 60.0) == 1
    (why,) = profiler.skipped.values()
    assert "128 pages, the pool has 64" in why


def test_a_cell_without_memory_is_timed_without_the_graphs_before(launches, tmp_path) -> None:
    file = ProfileFile(tmp_path / "p.jsonl")
    file.resume(META)
    profiler = Profiler(launches, file, patience=0)
    capture, made = launches.graphs.capture, []

    def refuses(places, batches, contexts) -> int:
        """There is room for one graph; what is refused once is remembered."""
        key = launches.graphs.key(places[0], batches[0], contexts[0])
        if made:
            launches.graphs.refused[key] = "out of memory"
            return 0
        made.append(key)
        return capture(places, batches, contexts)

    destroy = launches.graphs.close
    with (
        patch.object(launches.graphs, "capture", refuses),
        patch.object(launches.graphs, "close", lambda: (destroy(), made.clear())),
    ):
        cells = [CELLS["decode"], Cell(32, (5, 6)), CELLS["pair"]]
        assert profiler.run(cells, 60.0) == 3
        assert not profiler.skipped
        with patch.object(launches.graphs, "close", destroy):  # whose memory does not come back
            assert profiler.run([CELLS["decode"]], 60.0) == 0
    assert list(profiler.skipped.values()) == ["OutOfMemoryError: out of memory"]
    assert profiler.run([CELLS["decode"]], 60.0) == 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda made: made.decode([10] * 9), "9 requests of at most 10 keys"),
        (lambda made: made.prompts([Chunk(65)]), "65 new tokens"),
        (lambda made: made.mixed([Chunk(8, 300)], [4]), "at most 308 keys"),
    ],
)
def test_launches_that_do_not_fit(call, words, launches) -> None:
    with pytest.raises(ArgumentError, match=words):
        call(launches)


def test_tokens_choose_experts_evenly() -> None:
    """Of a prompt as of rows that decode: by the third layer as many experts as by chance."""
    moe = MoeConfig(num_experts=64, top_k=4, intermediate_size=32)
    config = tiny(
        "qwen3-30b-a3b", num_layers=3, hidden_size=256, vocab_size=2048, moe=moe,
        initializer_range=0.05,
    )  # fmt: skip
    place = Place.whole(132)
    with tiny_launches(64, config, max_running=8, max_prefill=1, max_tokens=64) as made:
        (prompts,) = made.prompts([Chunk(64)], 2)
        made.device.launch("prefill", place, prompts)
        decode = made.decode([40] * 8)
        for _ in range(5):
            made.device.launch("decode", place, decode)
        rows = made._state.inputs(made._state.first_slot, 8)
        assert len(rows.token_ids.unique()) > 4
        moe_rows = made._prompts.activations.buffers(64, 1).moe
        assert moe_rows is not None
        met = len(moe_rows.experts.unique())
    assert met >= 0.93 * 64 * (1 - (1 - 4 / 64) ** 64)


def test_gemms_to_compile() -> None:
    """Rows of a decode step are its graph's, of a mixed forward all."""

    class At:
        def __init__(self, place: Place) -> None:
            self.num_sms, self.place = place.num_sms or 132, place

    found = [(sizes[0], at[0].place.num_sms) for sizes, at in _forwards(CELLS.values(), 8, At)]
    assert found == [((4, 4), 32), ((27, 2), 100), ((8, 8), 32), ((33, 1), 100), ((14, 3), 132)]


@dataclass
class Over:
    device: VirtualDevice
    begin: float
    end: float

    def query(self) -> bool:
        return self.device.now >= self.end

    def times_us(self) -> tuple[float, float]:
        return self.begin, self.end


class VirtualDevice(Device):
    """Works take what their name says, us, twice as long while they begin before `hot_us`."""

    def __init__(self, hot_us: float = 0.0) -> None:
        self.num_sms, self.rungs, self.now, self.hot_us = 132, (32,), 0.0, hot_us
        self.free = {"decode": 0.0, "prefill": 0.0}
        self.queued: list[Over] = []

    def now_us(self) -> float:
        return self.now

    def launch(self, lane: Lane, place: Place, work: Work) -> Over:
        begin = max(self.now, self.free[lane])
        end = begin + float(work.name) * (2 if begin < self.hot_us else 1)
        self.free[lane] = end
        return Over(self, begin, end)

    def wait(self, events: Sequence[Any], until_us: float | None = None) -> None:
        self.now = max(self.now, min(event.end for event in events))


def turns(lane: Lane, *us: float) -> Turns:
    return Turns(lane, Place.of(lane, 32, 132), [Work(str(x), lambda place: None) for x in us])


def test_turns_are_timed_from_end_to_end() -> None:
    step, prompt = measure(
        VirtualDevice(), [turns("decode", 100), turns("prefill", 200, 300)],
        settle_s=0.001, seconds=0.002, turns=4,
    )  # fmt: skip
    assert (step.us, step.worst_us) == (100, 100)
    assert (prompt.us, prompt.worst_us, prompt.turns) == (500, 500, 4)
    assert step.turns >= 19


def test_what_is_hot_at_first_does_not_count() -> None:
    device = VirtualDevice(hot_us=900)
    looked: list[float] = []
    (step,) = measure(
        device, [turns("decode", 100)], settle_s=0.0015, seconds=0.0, turns=3,
        while_busy=lambda: looked.append(device.now),
    )  # fmt: skip
    assert (step.us, step.worst_us) == (100, 100)
    assert len(looked) == 1
    assert looked[0] > 1500


STEP = Sample(Size(num_layers=2, batch=3, total_kv=60), 32, 12.5)
LINES = [
    Measured("a", STEP, about={"mhz": 1980.0}),
    Measured("b", Sample(Size((Chunk(5, 2),), 1, 2), 100, 7.0, STEP.size, 32), True),
]


def test_lines_come_back(tmp_path: Path) -> None:
    file = ProfileFile(tmp_path / "p.jsonl")
    file.resume(META)
    file.add(LINES)
    assert file.load() == (META, LINES)


def broken(change: Callable[[list[str]], list[str]], path: Path) -> Path:
    file = ProfileFile(path)
    file.begin(META)
    file.add(LINES)
    path.write_text("".join(f"{line}\n" for line in change(path.read_text().split("\n")[:-1])))
    return path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda lines: ["{}", *lines[1:]], "its format is not"),
        (lambda lines: [lines[0].replace('"version": 1', '"version": 9')], "version 9"),
        (lambda lines: [lines[0], lines[1], "{}"], "line 3 is no launch"),
        (lambda lines: [*lines, lines[1].replace("12.5", "-1")], "line 4 is no launch"),
        (lambda lines: lines[:1], "holds no launch"),
        (lambda lines: [json.dumps({"format": "smkern-profile", "version": 1, "meta": {}}),
                        *lines[1:]], "lacks the sizes"),
        (lambda lines: [lines[0].replace(', "gemms": null', ""), *lines[1:]], "lacks the times"),
        (lambda lines: [lines[0].replace('"gemms": null', '"gemms": {"sms": [8]}'), *lines[1:]],
         "lacks the times of GEMMs"),
    ],
)  # fmt: skip
def test_files_that_are_no_profile(change, words, tmp_path) -> None:
    with pytest.raises(TableError, match=words):
        read_profile(broken(change, tmp_path / "p.jsonl"))


def profiled(
    launches: ModelLaunches, path: Path, cells: list[Cell], times: GemmTimes | None, *options: str
) -> tuple[Result, int]:
    """`smkern profile` as it goes on a GPU, and how often it read its file."""
    meta = {name: value for name, value in META.items() if name != "gemms"} | {"seed": 0}
    fakes: dict[str, Any] = {
        "torch.cuda.is_available": lambda: True,
        "smkern.measure.profile_command._device_room": lambda: Room(132),
        "smkern.measure.profile_command.provenance": lambda *_: meta,
        "smkern.measure.profile_command.plan": lambda *_, **__: cells,
        "smkern.measure.profile_command.open_launches": lambda *_: nullcontext((launches, None)),
        "smkern.measure.profile_command.errors_of": lambda path: "",
        "smkern.measure.profile_command.times_beside": lambda *_: nullcontext(lambda: times),
        "smkern.measure.profiler.Profiler": partial(Profiler, patience=0),
        "smkern.measure.profiler.compile_cells": lambda *_: 0,
        "smkern.measure.sm_clock.clock_on": lambda device: None,
        "smkern.profile.load_profile": lambda: None,
    }
    with ExitStack() as stack:
        for name, fake in fakes.items():
            stack.enter_context(patch(name, fake))
        load = stack.enter_context(
            patch.object(ProfileFile, "load", autospec=True, side_effect=ProfileFile.load)
        )
        words = ["profile", "--model", "qwen3-8b", "--out", str(path), *options]
        return CliRunner().invoke(cli, words, catch_exceptions=False), load.call_count


def test_the_command_notes_times_of_gemms_once_and_reads_its_file_once(launches, tmp_path) -> None:
    times = GemmTimes.of([8, 16], lambda rows, num_sms: (float(rows + num_sms), 1.0))
    retuned = GemmTimes.of([8], lambda rows, num_sms: (9.0, 9.0))
    path, cells = tmp_path / "p.jsonl", list(CELLS.values())
    path.touch()  # as mktemp leaves it
    result, reads = profiled(launches, path, cells[:2], times)
    assert (result.exit_code, reads) == (0, 0), result.output
    again, _ = profiled(launches, path, cells, retuned)
    assert "pass --resume" in again.output
    result, reads = profiled(launches, path, cells, retuned, "--resume")
    assert (result.exit_code, reads) == (0, 1), result.output
    assert "4 of 4 cells" in result.output
    found = read_profile(path)
    assert found.gemms == times
    assert [line.cell for line in found.lines] == [cells[i].name for i in (0, 1, 2, 2, 3)]


@pytest.mark.parametrize("cut", [1, 9])
def test_of_a_pair_that_was_cut_short_nothing_stays(cut: int, tmp_path: Path) -> None:
    pair = [Measured("c", LINES[1].sample)] * 2
    file = ProfileFile(tmp_path / "p.jsonl")
    for before in ([], LINES[:1]):
        file.begin(META)
        file.add([*before, *pair])
        assert file.resume(META) == [*before, *pair]
        lines = file.path.read_text().splitlines(keepends=True)
        file.path.write_text("".join(lines[:-1]) + lines[-1][: cut - 1])
        assert file.resume(META) == before
        assert file.load() == (META, before)


def test_what_is_no_profile_is_not_written_over(launches: ModelLaunches, tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text('{"cells": []}')
    with pytest.raises(TableError, match="does not begin with its provenance"):
        profiled(launches, path, list(CELLS.values()), None, "--resume")
    assert path.read_text() == '{"cells": []}'


@pytest.mark.parametrize("name", ["gpu", "model", "kernels"])
def test_a_profile_of_something_else_is_not_gone_on_with(name: str, tmp_path: Path) -> None:
    file = ProfileFile(tmp_path / "p.jsonl")
    file.begin(META)
    with pytest.raises(TableError, match=f"{name}='?{META[name]}.* not 'other'"):
        file.resume(META | {name: "other"})


def test_a_profile_is_stamped_with_what_its_model_launches(monkeypatch) -> None:
    monkeypatch.setattr("smkern.measure.provenance.collect_meta", lambda: {"gpu": "NVIDIA H200"})
    meta = provenance("tiny", tiny(), 0)
    assert meta["sizes"] == SIZES.to_json()
    assert meta["kernels"] == kernels_hash("h200", SIZES)


def test_errors_of_a_profile() -> None:
    path = ROOT / "bench/results/h200/qwen3-32b.profile.jsonl"
    text = errors_of(path)
    assert f"on {len(read_profile(path).held_out)} held-out launches" in text
    assert text.splitlines()[-1].startswith("table")


def test_the_command_wants_a_gpu(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = CliRunner().invoke(
        cli, ["profile", "--model", "qwen3-8b", "--out", str(tmp_path / "x")]
    )
    assert isinstance(result.exception, DeviceError)
