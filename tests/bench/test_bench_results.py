from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from smkern.bench.results import (
    COMMITTED,
    FOLDER,
    SUMMARIES,
    Results,
    ResultsError,
    cell_key,
    command,
    load_results,
    open_results,
)
from smkern.kernels.cute.compile import VERSION
from smkern.measure.provenance import chip, collect_meta
from tests.bench.synthetic import cell

META = {"gpu": "NVIDIA H200", "date": "2026-11-21T00:00:00Z", "command": "x", "smkern_commit": "a"}


def filled(*cells, meta=META) -> Results:
    results = Results(meta=dict(meta))
    for one in cells:
        results.add(one)
    return results


def test_a_file_round_trips_with_a_cell_a_line(tmp_path):
    path = tmp_path / "new" / "gemm.json"
    results = filled(cell(), cell("cublas"))
    results.summary = {"rows": 2}
    results.save(path)
    data = json.loads(path.read_text())
    assert set(data) == {"meta", "cells", "summary"}
    assert data["cells"] == results.cells
    lines = path.read_text().splitlines()
    assert sum(line.startswith('{"op"') for line in lines) == 2
    loaded = load_results(path)
    assert (loaded.meta, loaded.cells, loaded.summary) == (META, results.cells, {"rows": 2})
    assert [p.name for p in path.parent.iterdir()] == ["gemm.json"]


def test_no_cells_is_still_json(tmp_path):
    Results().save(tmp_path / "x.json")
    assert load_results(tmp_path / "x.json").cells == []


def test_a_cell_measured_again_replaces_the_old_one():
    results = filled(cell(us=100.0), cell("cublas"), cell(us=90.0))
    assert [c["us"] for c in results.cells] == [90.0, 100.0]


def test_placement_group_and_case_tell_cells_apart():
    variants = [
        cell("cublas"),
        cell("cublas", placement="default"),
        cell("cublas", group_sms=72),
        cell("cublas", m=1),
    ]
    assert len({cell_key(one) for one in variants}) == 4
    host = {"op": "gemm_host", "case": {"name": "eager"}, "provider": "smkern", "value": 9.0}
    assert cell_key(host) != cell_key({**host, "case": {"name": "switch"}})


def test_merge_keeps_both_runs_provenance_and_the_later_cell():
    first = filled(cell(us=100.0), cell(m=1), meta={**META, "flashinfer": "0.7.1"})
    second = filled(cell(us=80.0), meta={**META, "date": "later", "flashinfer": "0.7.2"})
    first.merge(second)
    assert [c["us"] for c in first.cells] == [80.0, 100.0]
    assert first.meta["date"] == "later"
    assert [run["date"] for run in first.meta["runs"]] == [META["date"], "later"]
    assert [run["flashinfer"] for run in first.meta["runs"]] == ["0.7.1", "0.7.2"]
    first.merge(filled(meta={**META, "date": "latest"}))
    assert len(first.meta["runs"]) == 3


def test_what_was_simulated_leaves_the_name_of_the_gpu():
    measured = filled(cell(), meta={**META, "gpu": "NVIDIA H200", "driver": "580"})
    measured.merge(filled(cell(m=1), meta={**META, "gpu": None, "driver": None, "date": "later"}))
    seen = [measured.meta[name] for name in ("gpu", "driver", "date")]
    assert seen == ["NVIDIA H200", "580", "later"]


def test_resume_keeps_cells_and_a_fresh_run_does_not(tmp_path):
    path = tmp_path / "gemm.json"
    results = filled(cell())
    results.summary = {"rows": 1}
    results.save(path)
    resumed = open_results(path, resume=True, meta={"date": "b"})
    assert (len(resumed.cells), resumed.summary) == (1, {"rows": 1})
    resumed.add(cell(m=1))
    assert resumed.summary == {}
    assert open_results(path, resume=False, meta={}).cells == []
    assert open_results(tmp_path / "none.json", resume=True, meta={}).cells == []


def test_a_file_that_cannot_be_written_is_said_before_anything_is_measured(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ResultsError, match=r"x\.json cannot be written.*is no folder.*--out"):
        open_results(tmp_path / "file" / "x.json", resume=False, meta={})


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"meta": {}, "cells": [',
        "[]",
        '{"meta": {}, "cells": {}, "summary": {}}',
        '{"meta": {}, "cells": [1], "summary": {}}',
        '{"meta": {}, "cells": [{"op": "gemm"}], "summary": {}}',
    ],
)
def test_a_corrupt_file_is_named_with_a_remedy(tmp_path, text):
    path = tmp_path / "gemm.json"
    path.write_text(text)
    with pytest.raises(ResultsError, match=r"gemm\.json.*--out"):
        load_results(path)


def test_a_failed_write_leaves_the_old_file(tmp_path):
    path = tmp_path / "gemm.json"
    filled(cell()).save(path)
    before = path.read_text()
    with pytest.raises(ValueError, match="JSON"):
        filled(cell(us=float("nan"))).save(path)
    assert path.read_text() == before
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("program", "command"),
    [
        ("/root/x/smkern/__main__.py", "python -m smkern --out gemm.json"),
        ("/venv/bin/smkern", "smkern --out gemm.json"),
    ],
)
def test_meta_names_what_the_format_wants_and_no_path_of_the_machine(monkeypatch, program, command):
    monkeypatch.setattr("sys.argv", [program, "--out", "/tmp/x/gemm.json"])
    meta = collect_meta()
    assert meta["command"] == command
    wanted = {"gpu", "driver", "torch", "triton", "smkern_commit", "date", "command"}
    assert wanted <= set(meta)


@pytest.mark.parametrize(
    ("absent", "is_there", "said"),
    [("", True, VERSION), ("install it", True, "kept kernels"), ("install it", False, None)],
)
def test_meta_says_whether_cutlasss_kernels_were_there(absent, is_there, said, monkeypatch):
    monkeypatch.setattr("smkern.measure.provenance.absent", lambda: absent)
    monkeypatch.setattr("smkern.measure.provenance.is_there", lambda: is_there)
    assert collect_meta()["cutlass"] == said


def test_a_chip_is_told_by_the_beginning_of_its_uuid(monkeypatch):
    monkeypatch.setattr("smkern.measure.provenance.has_gpu", lambda: False)
    assert chip() == {}
    about = SimpleNamespace(uuid="384ecabe-c89f-34a3-9aed-6455b3c0df49")
    monkeypatch.setattr("smkern.measure.provenance.has_gpu", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", {1: about}.__getitem__)
    assert chip() == {"chip": "384ecabe"}


def test_files_of_different_suites_are_refused():
    """By the commands that measured, however they were given; a test's says nothing."""
    gemm, fp8, again, tested = (
        filled(cell(), meta={**META, "command": f"python -m {command}"})
        for command in ("smkern bench gemm", "smkern.bench.fp8 -x", "smkern.bench.gemm", "pytest")
    )
    with pytest.raises(ResultsError, match=r"'gemm' and of 'fp8' are no one file's.* each suite"):
        gemm.merge(fp8)
    gemm.merge(again)
    gemm.merge(tested)
    with pytest.raises(ResultsError, match="each suite"):
        gemm.merge(fp8)


def test_merge_command(tmp_path):
    meta = META | {"command": "python -m smkern bench gemm"}
    for name, m in (("a", 64), ("b", 128)):
        part = filled(cell(m=m, vs_cublas=1.2), cell("cublas", m=m), meta=meta)
        part.summary = {"failed": {f"m={m + 1}": "no memory"}}
        part.save(tmp_path / f"{name}.json")
    out = tmp_path / "out.json"
    parts = [str(tmp_path / f"{name}.json") for name in "ab"]
    ran = CliRunner().invoke(command, [*parts, "--out", str(out)])
    assert ran.exit_code == 0, ran.output
    merged = load_results(out)
    assert len(merged.cells) == 4
    assert merged.summary["geomean_vs_cublas"]["smkern"]["value"] == pytest.approx(1.2)
    assert merged.summary["failed"] == {"m=65": "no memory", "m=129": "no memory"}


@pytest.mark.parametrize("suite", SUMMARIES)
def test_a_committed_file_has_the_rows_of_its_cells(tmp_path, suite):
    path, out = FOLDER / COMMITTED / f"{suite}.json", tmp_path / "out.json"
    ran = CliRunner().invoke(command, [str(path), "--out", str(out)])
    assert ran.exit_code == 0, ran.output
    assert load_results(out).summary == load_results(path).summary
