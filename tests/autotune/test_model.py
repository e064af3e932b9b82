"""What of a model is measured, in which order, and how a run of all that ends and goes on."""

from __future__ import annotations

import json
import signal
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest

from smkern.autotune import ceilings, check, model, run
from smkern.autotune.check import Compared
from smkern.autotune.model import ModelCells, families, model_config, of_rank
from smkern.autotune.places import Sides, absent_sides
from smkern.errors import ConfigError
from smkern.tuning.cells import Tuned
from smkern.tuning.table import Cell
from tests.autotune.fakes import FakeDevice, place

pytestmark = pytest.mark.slow

FEW = Sides((place(16), place(64)), (place(116), place(68)), place(132))
ONE = Sides((place(16),), (place(116),), place(132))


@cache
def known_families(most):
    """All tables; candidates of a cell that another test has asked for are not listed again."""

    def remembered(family):
        known = {}

        def listed(problem, budget, profile, most):
            key = problem, budget, profile.info, most
            if key not in known:
                known[key] = family.listed(problem, budget, profile, most)
            return dict(known[key])

        return replace(family, listed=listed)

    return {name: remembered(family) for name, family in families(most).items()}


def jobs_of(config, profile, sides=ONE, vocab=0):
    return ModelCells(config, vocab or config.vocab_size, profile, known_families(6)).jobs(sides)


def gemms(jobs):
    """(N, K, epilogue) to the rows measured."""
    found = {}
    for job in jobs:
        if job.family.name == "gemm":
            p = job.problem
            found.setdefault((p.n, p.k, p.epilogue.key), set()).add(p.m)
    return found


def test_a_model_in_fp8_has_cells_of_e4m3_and_a_head_in_bf16(profile):
    jobs = jobs_of(model_config("qwen3-8b-fp8"), profile)
    scaled = {
        (job.problem.n, job.problem.k, job.problem.blocks)
        for job in jobs
        if job.family.name == "gemm_fp8"
    }
    shapes = (6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)
    assert scaled == {(*shape, True) for shape in shapes}
    assert gemms(jobs) == {(151936, 4096, "none"): set(model.DECODE_ROWS)}


def test_experts_in_fp8_have_no_cells(profile):
    names = {job.family.name for job in jobs_of(model_config("qwen3-30b-a3b-fp8"), profile)}
    assert "moe" in names
    assert "grouped_gemm" not in names


def test_a_dense_model_is_its_products_and_everything_around_them(profile):
    jobs = jobs_of(model_config("qwen3-8b"), profile)
    rows = {*model.DECODE_ROWS, *model.PREFILL_ROWS, *model.MIXED_ROWS}
    assert gemms(jobs) == {
        (6144, 4096, "none"): rows,
        (4096, 4096, "residual"): rows,
        (24576, 4096, "swiglu"): rows,
        (4096, 12288, "residual"): rows,
        (151936, 4096, "none"): set(model.DECODE_ROWS),
    }
    names = {job.family.name for job in jobs}
    assert names == {"gemm", "attention", "append", "sample"}
    heads = {job.problem.shape.num_q_heads for job in jobs if job.family.name == "attention"}
    assert heads == {32}
    appended = [job.problem for job in jobs if job.family.name == "append"]
    assert {(p.num_q_heads, p.num_kv_heads, p.norm, p.rotary_dim) for p in appended} == {
        (32, 8, True, 128)
    }


def test_a_model_without_norms_of_heads_appends_without(profile):
    jobs = jobs_of(model_config("llama-3.1-8b"), profile)
    appended = [job.problem for job in jobs if job.family.name == "append"]
    assert {(p.norm, p.rotary_dim) for p in appended} == {(False, 128)}


def test_a_product_with_a_bias_is_measured_with_it(profile):
    found = gemms(jobs_of(model_config("qwen2.5-7b"), profile))
    assert {epilogue for n, k, epilogue in found if (n, k) == (4608, 3584)} == {"bias"}


def test_a_mixture_of_experts_is_routed_and_grouped(profile):
    jobs = jobs_of(model_config("qwen3-30b-a3b"), profile)
    assert {(n, k) for n, k, _ in gemms(jobs)} == {
        (5120, 2048), (2048, 4096), (128, 2048), (151936, 2048),
    }  # fmt: skip
    ops = {job.case.op for job in jobs if job.family.name in ("moe", "grouped_gemm")}
    assert ops == {"topk_softmax", "moe_permute", "moe_unpermute", "gate_up", "down"}
    grouped = {
        (p.n, p.k) for p in (job.problem for job in jobs if job.family.name == "grouped_gemm")
    }
    assert grouped == {(768, 2048), (2048, 768)}


@pytest.fixture
def large(tmp_path):
    """A folder with nothing but the configuration of a 72B model."""
    values = {
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": 152_064, "hidden_size": 8192,
        "intermediate_size": 29_568, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 4096,
        "rope_theta": 1e6, "torch_dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path


def test_a_rank_has_its_share_of_a_folders_model(large, profile):
    whole = model_config(str(large))
    jobs = jobs_of(of_rank(whole, 4), profile, vocab=whole.vocab_size)
    assert {(n, k) for n, k, _ in gemms(jobs)} == {
        (16 * 128 + 2 * 2 * 128, 8192),
        (8192, 16 * 128),
        (2 * 7392, 8192),
        (8192, 7392),
        (38016, 8192),
    }
    assert {job.problem.vocab for job in jobs if job.family.name == "sample"} == {152_064}
    assert max(job.problem.m for job in jobs if job.family.name == "gemm") == 4096
    longest = {job.problem.shape.max_kv_len for job in jobs if job.family.name == "attention"}
    assert max(longest) == 4096


def test_fewer_kv_heads_than_ranks_are_one_each(large):
    rank = of_rank(model_config(str(large)), 16)
    assert (rank.num_q_heads, rank.num_kv_heads) == (4, 1)


@pytest.mark.parametrize(
    ("change", "tp", "message"),
    [
        ({}, 3, "num_q_heads=64 for --tp 3: give a --tp that divides it"),
        ({"intermediate_size": 29_570}, 4, "intermediate_size=29570 for --tp 4"),
        ({"vocab_size": 152_066}, 4, "vocab_size=152066 for --tp 4"),
    ],
)
def test_what_cannot_be_dealt_is_named(large, change, tp, message):
    with pytest.raises(ConfigError, match=message):
        of_rank(model_config(str(large)).replace(**change), tp)


def test_kv_heads_that_ranks_would_cut_are_named():
    config = model_config("qwen3-8b").replace(num_q_heads=48, num_kv_heads=12, vocab_size=151_936)
    with pytest.raises(ConfigError, match="num_kv_heads=12 for --tp 8"):
        of_rank(config, 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"torch_dtype": "float16"}, "tuned in torch.bfloat16"),
    ],
)
def test_models_that_are_not_served_are_named(large, change, message):
    path = large / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=message):
        model_config(str(large))


def test_an_empty_folder_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        model_config(str(tmp_path))


def test_each_side_has_its_own_rows(profile):
    for job in jobs_of(model_config("qwen3-8b"), profile, FEW):
        if job.family.name == "gemm" and job.place.budget.num_sms != 132:
            decode = job.place.budget.num_sms in (16, 64)
            assert (job.problem.m <= 256) == decode
            assert job.problem.m not in model.MIXED_ROWS


def test_the_first_cells_are_the_large_products_on_the_usual_splits(profile, monkeypatch):
    monkeypatch.setattr(model, "DECODE_ROWS", (8, 64))
    monkeypatch.setattr(model, "PREFILL_ROWS", (1024, 4096))
    monkeypatch.setattr(model, "MIXED_ROWS", ())
    jobs = jobs_of(model_config("qwen3-8b"), profile, absent_sides(profile.info))
    usual = {16, 32, 48, 84, 100, 116, 132}
    assert {job.place.budget.num_sms for job in jobs[:20]} == usual
    kinds = {job.family.name for job in jobs[:20]}
    assert kinds == {"gemm", "attention"}
    assert {job.problem.m <= 256 for job in jobs[:20] if job.family.name == "gemm"} == {True, False}
    at = {(j.case.name, j.place.budget.num_sms): n for n, j in enumerate(jobs)}
    gate_up = "gemm-64x24576x4096-swiglu"
    assert at[gate_up, 32] < at[gate_up, 56] < at[gate_up, 120]
    assert at[gate_up, 32] < at["gemm-64x4096x4096-residual", 32] < at["sample-8x151936", 32]
    budgets = {job.place.budget.num_sms for job in jobs}
    assert budgets == {*range(8, 125, 8), *range(12, 125, 8), 132}


class Bench:
    """A model's run on a device that is not there, with a few cells of each family."""

    def __init__(self, profile, folder, monkeypatch):
        self.device, self.folder = FakeDevice(profile).install(monkeypatch), folder
        self.families = {
            name: self.device.family(replace(family, most=3))
            for name, family in known_families(3).items()
        }
        gpu = SimpleNamespace(name=profile.info.name, num_sms=132)

        @contextmanager
        def sides():
            self.device.log.append(("ladder",))
            yield FEW

        monkeypatch.setattr(model, "DECODE_ROWS", (1, 64))
        monkeypatch.setattr(model, "PREFILL_ROWS", (1024,))
        monkeypatch.setattr(model, "MIXED_ROWS", ())
        monkeypatch.setattr(run, "families", lambda most: self.families)
        monkeypatch.setattr(run, "device_info", lambda: gpu)
        monkeypatch.setattr(run, "load_profile", lambda index: profile)
        monkeypatch.setattr(run, "ladder_sides", sides)
        monkeypatch.setattr(ceilings, "ensure", lambda stop: self.device.log.append(("ceilings",)))

    def tune(self, *, seconds=float("inf"), check=False, budgets=None, out=True, fresh=False):
        self.device.log.clear()
        out = self.folder / "tables" if out else None
        asked = run.Settings(budgets, fresh, False, out, 1, seconds, 3)
        run.tune_model(asked, model="qwen3-8b", tp=1, check=check)
        return self.device.cells()

    def saved(self):
        """Table to its cells."""
        return {
            name: family.tuned.file(self.folder / "tables" / f"{name}.json").load().cells
            for name, family in self.families.items()
        }


@pytest.fixture
def bench(profile, tmp_path, monkeypatch):
    return Bench(profile, tmp_path, monkeypatch)


def test_all_cells_land_in_their_tables_and_are_not_measured_again(bench, capsys):
    measured = bench.tune()
    saved = bench.saved()
    assert sum(map(len, saved.values())) == len(measured) > 50
    assert not saved["moe"]
    assert all(saved[x] for x in ("gemm", "attention", "append", "sample"))
    raw = bench.folder / "tables" / "gemm.raw.jsonl"
    assert json.loads(raw.read_text().splitlines()[0])["op"] == "gemm"
    assert [event[0] for event in bench.device.log[:2]] == ["ceilings", "ladder"]
    assert bench.tune() == []
    assert "0 cells to measure" in capsys.readouterr().out
    assert len(bench.tune(fresh=True)) == len(measured)


def test_the_time_is_kept_and_the_run_goes_on_from_there(bench, capsys):
    every = bench.tune(fresh=True)
    for path in (bench.folder / "tables").iterdir():
        path.unlink()
    first = bench.tune(seconds=20)
    assert len(first) == 20
    assert f"the time is up: {len(every) - 20} cells left" in capsys.readouterr().out
    assert sum(map(len, bench.saved().values())) == 20
    rest = bench.tune()
    assert len(rest) == len(every) - 20
    assert sum(map(len, bench.saved().values())) == len(every)


def test_kernels_of_the_next_chunk_compile_while_one_is_measured(bench):
    bench.tune()
    kinds = [event[0] for event in bench.device.log]
    first = kinds.index("cell")
    assert kinds[:first].count("compile") == 8 + 16
    assert kinds[first:].count("cell") > 16


def test_no_time_left_is_said_and_is_no_error(bench, capsys):
    assert bench.tune(seconds=0) == []
    assert "the time is up: " in capsys.readouterr().out


def test_a_signal_leaves_whole_tables(bench, capsys):
    def stop():
        if len(bench.device.cells()) == 12:
            signal.raise_signal(signal.SIGTERM)

    bench.device.after_cell = stop
    assert len(bench.tune()) == 12
    assert sum(map(len, bench.saved().values())) == 12
    assert "stopped by SIGTERM" in capsys.readouterr().out


def test_budgets_can_be_chosen(bench):
    assert set(bench.tune(budgets=(16, 116))) == {16, 116, 132}


def test_what_was_shipped_counts_as_measured(bench, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with_shipped = bench.tune(out=False)
    assert 0 < len(with_shipped) < len(bench.tune())


def test_the_check_times_both_picks_of_cells_where_they_differ(bench, capsys):
    bench.tune()
    for name, family in bench.families.items():
        path = bench.folder / "tables" / f"{name}.json"
        cells = family.tuned.file(path).load().cells
        same = next(iter(cells), None)
        if same is None:
            continue
        job = next(
            x
            for x in ModelCells(
                model_config("qwen3-8b"), 151_936, bench.device.profile, bench.families
            ).jobs(FEW)
            if x.family.name == name and family.tuned.key_of(x.problem, x.place.budget) == same
        )
        first = next(iter(job.wanted(bench.device.profile)))
        us = {"config": first, "us": 1.0}
        cell = Cell(**us, own=first, own_us=1.0) if name == "gemm" else Tuned(**us)
        file = family.tuned.file(path)
        file.merge({same: cell}, file.load().meta)
    total = sum(map(len, bench.saved().values()))
    measured = bench.tune(check=True)
    assert 0 < len(measured) < total
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("tuned over untuned (time; below 1 the table is faster)")
    tables = {line.split(":")[0]: line for line in lines[at + 1 :]}
    assert tables.keys() == {"gemm", "attention", "append", "sample"}
    counted = sum(int(line.split(": ")[1].split()[0]) for line in tables.values())
    assert counted == total


def test_the_check_of_nothing_says_what_to_do(bench, capsys):
    assert bench.tune(check=True) == []
    assert "run the command without --check first" in capsys.readouterr().out


def test_the_checks_arithmetic(capsys):
    check.report(
        [Compared("gemm", "a", 0.5), Compared("gemm", "b", 2.0), Compared("gemm", "c", 1.0),
         Compared("sample", "d", 0.9)]
    )  # fmt: skip
    lines = capsys.readouterr().out.splitlines()[1:]
    assert lines == [
        "gemm: 3 cells, geomean 1.000, worst 2.000 (b)",
        "sample: 1 cells, geomean 0.900, worst 0.900 (d)",
    ]
