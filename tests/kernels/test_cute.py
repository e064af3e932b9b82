"""CUTLASS's kernels without CUTLASS: the process that compiles, the cache, what is refused."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from dataclasses import asdict, replace
from importlib import metadata
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest

from smkern.errors import DeviceError
from smkern.kernels.cute import compile as cute
from smkern.kernels.cute.worker import main
from smkern.kernels.fp8.gemm_compile import variant_of as scaled_variant_of
from smkern.kernels.gemm_compile import compile_variant
from smkern.kernels.gemm_variants import variant_of
from smkern.tuning.config import Epilogue, GemmConfig, GemmProblem
from smkern.tuning.fp8 import ScaledProblem

CONFIG = GemmConfig("cutlass", 80, 128, 64, 4, 8, swap=True)
PROBLEM = GemmProblem(77, 776, 520)
VARIANT = variant_of(PROBLEM, CONFIG, 90)


class Worker:
    """Stands in for the process: writes a cubin for each variant, fails for one, or hangs."""

    def __init__(self, broken: str = "", hangs: bool = False) -> None:
        self.calls: list[list[dict]] = []
        self.broken, self.hangs = broken, hangs

    def __call__(self, command, *, input, env, timeout, **options):
        asked = json.loads(input)
        self.calls.append(asked)
        assert env["CUTE_DSL_ARCH"] == "sm_90a"
        if self.hangs and not self.broken:
            raise subprocess.TimeoutExpired(command, timeout)
        for i, (_, values) in enumerate(asked):
            if values["activation"] == self.broken:
                if self.hangs:
                    raise subprocess.TimeoutExpired(command, timeout)
                return SimpleNamespace(returncode=-6, stderr="LLVM ERROR: no such layout")
            columns = values.get("block_y") or values["block_n"]
            cubin = f"\x7fELF .text.kernel_{columns}\0 {len(self.calls)}"
            (Path(command[-1]) / f"{i}.out").write_bytes(cubin.encode())
        return SimpleNamespace(returncode=0, stderr="")


@pytest.fixture
def worker(monkeypatch, tmp_path) -> Worker:
    """A cache of its own, the package installed, and a process that answers at once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cute, "absent", lambda: "")
    made = Worker()
    monkeypatch.setattr(cute.subprocess, "run", made)
    return made


def remove(monkeypatch) -> None:
    monkeypatch.setattr(cute, "absent", lambda: "it is not installed; pip install it")


def test_a_cubin_is_compiled_once_and_says_how_it_is_launched(worker):
    first, second = compile_variant(VARIANT), compile_variant(VARIANT)
    assert first == second
    assert len(worker.calls) == 1
    assert first.name == "kernel_80"
    assert (first.num_threads, first.swizzles) == (384, (3, 3))
    # 8 stages of 128 + 80 rows of 64 elements of two bytes, after the barriers
    assert first.shared_bytes == 1024 + 8 * (128 + 80) * 128
    assert first.boxes == ((128, 64), (80, 64))


def test_weights_with_swiglu_are_copied_in_pairs_of_gate_and_up_rows(worker):
    problem = GemmProblem(77, 1536, 520, epilogue=Epilogue(swiglu=True))
    swapped = compile_variant(variant_of(problem, CONFIG, 90))
    assert swapped.boxes == ((8, 2, 8, 64), (80, 64))
    plain = compile_variant(variant_of(problem, GemmConfig("cutlass", 64, 96, 64, 4, 8), 90))
    assert plain.boxes == ((64, 64), (6, 2, 8, 64))


@pytest.mark.parametrize("scales", ["block", "row"])
def test_a_kernel_of_e4m3_copies_pairs_and_keeps_scales_before_its_stages(worker, scales):
    problem = ScaledProblem(64, 6144, 4096, scales=scales)
    config = GemmConfig("cutlass", 64, 96, 64, 4, 5, ctas_per_sm=2)
    made = scaled_variant_of(problem, config, 90).compile()
    assert (made.name, made.num_threads, made.swizzles) == ("kernel_96", 256, (3, 3))
    assert made.boxes == ((64, 64), (96, 64))
    assert made.shared_bytes == 1024 + 4096 + 5 * (64 + 96) * 128
    assert [each[0] for each in worker.calls[0]] == ["ScaledVariant"]
    assert cute.serves((9, 0), problem, config)
    other = ScaledProblem(64, 6144, 4096, scales="row" if scales == "block" else "block")
    kept = scaled_variant_of(other, config, 90)
    assert cute.kept_cubin(cute._path(kept)) is None


def test_without_the_package_what_was_compiled_serves_and_nothing_else(worker, monkeypatch):
    kept = compile_variant(VARIANT)
    remove(monkeypatch)
    assert compile_variant(VARIANT) == kept
    assert cute.serves((9, 0), PROBLEM, CONFIG)
    other = replace(CONFIG, block_m=88)
    assert not cute.serves((9, 0), PROBLEM, other)
    with pytest.raises(DeviceError, match="is not compiled, and cannot be: it is not installed"):
        compile_variant(variant_of(PROBLEM, other, 90))


@pytest.mark.parametrize("change", ["writable by others", "cut"])
def test_what_is_kept_and_cannot_be_read_does_not_serve(worker, monkeypatch, change) -> None:
    """What dispatch takes must load: files that were carried often belong to a group."""
    compile_variant(VARIANT)
    (path,) = cute.cubin_path("cute", "").parent.glob("cute-*.cubin")
    if change == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.chmod(0o664)
    remove(monkeypatch)
    with pytest.warns(RuntimeWarning, match="are kept and not used: .*chmod go-w"):
        assert not cute.serves((9, 0), PROBLEM, CONFIG)


def test_another_source_is_compiled_again(worker, monkeypatch):
    compile_variant(VARIANT)
    monkeypatch.setattr(cute, "_source", lambda name: b"another")
    cute._digest.cache_clear()
    remove(monkeypatch)
    assert not cute.serves((9, 0), PROBLEM, CONFIG)


def test_a_process_compiles_many_and_only_what_is_not_kept(worker):
    compile_variant(VARIANT)
    problems = [replace(PROBLEM, dtype=dtype) for dtype in ("bf16", "fp16")]
    wanted = [
        variant_of(problem, replace(CONFIG, block_m=columns), 90)
        for columns in range(24, 24 + 8 * 12, 8) for problem in problems
    ]  # fmt: skip
    told: list[tuple[int, int]] = []
    done = cute.compile_many(wanted, workers=1, done=lambda *count: told.append(count))
    assert done == 23
    assert [len(call) for call in worker.calls] == [1, 16, 7]
    assert told == [(16, 23), (23, 23)]


def test_what_aborts_is_named_and_what_came_before_is_kept(worker, monkeypatch):
    broken = variant_of(replace(PROBLEM, epilogue=Epilogue(activation="gelu")), CONFIG, 90)
    worker.broken = "gelu"
    with pytest.raises(DeviceError, match=r"does not compile .*gelu.*exit status -6.*no such lay"):
        cute._compile([VARIANT, broken])
    remove(monkeypatch)
    assert cute.serves((9, 0), PROBLEM, CONFIG)


def test_a_full_disk_leaves_no_part_of_a_cubin_to_be_kept(monkeypatch, tmp_path):
    """The worker itself, its compiler a stand-in, where files can have 64 KiB."""
    cubins = iter([b"whole", bytes(1 << 20)])
    made = SimpleNamespace(
        compile=lambda *_: SimpleNamespace(artifacts=SimpleNamespace(CUBIN=next(cubins)))
    )
    gemm = SimpleNamespace(dtype=None, host=None)
    runtime = dict.fromkeys(("make_fake_stream", "make_fake_tensor"), lambda *_, **__: None)
    for name, module in {
        "cutlass": SimpleNamespace(Int32=int, Int64=int, cute=made),
        "cutlass.cute": made,
        "cutlass.cute.runtime": SimpleNamespace(**runtime),
        "smkern.kernels.cute.gemm": SimpleNamespace(Gemm=lambda variant: gemm),
        "smkern.kernels.cute.fp8_gemm": SimpleNamespace(ScaledGemm=lambda variant: gemm),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    asked = [("Variant", asdict(VARIANT))] * 2
    monkeypatch.setattr(sys, "stdin", StringIO(json.dumps(asked)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            main(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [(path.name, path.read_bytes()) for path in tmp_path.glob("*.out")] == [
        ("0.out", b"whole")
    ]


def test_what_a_compiler_says_need_not_be_text(monkeypatch, tmp_path):
    said = tmp_path / "python"
    said.write_text("#!/bin/sh\nprintf 'LLVM ERROR: \\377' >&2\nexit 6\n")
    said.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cute, "absent", lambda: "")
    monkeypatch.setattr(sys, "executable", str(said))
    with pytest.raises(DeviceError, match=r"does not compile .*exit status 6.*LLVM ERROR"):
        compile_variant(VARIANT)


def test_what_hangs_is_named_and_killed(worker):
    worker.hangs = True
    with pytest.raises(DeviceError, match=r"did not compile .* within 120 s and was killed"):
        compile_variant(VARIANT)


def test_what_hangs_among_others_is_the_one_named_and_what_came_before_is_kept(worker, monkeypatch):
    hanging = variant_of(replace(PROBLEM, epilogue=Epilogue(activation="gelu")), CONFIG, 90)
    worker.hangs, worker.broken = True, "gelu"
    with pytest.raises(DeviceError, match=r"did not compile .*gelu.* within 240 s and was killed"):
        cute._compile([VARIANT, hanging])
    remove(monkeypatch)
    assert cute.serves((9, 0), PROBLEM, CONFIG)


def test_more_shared_memory_than_a_cta_has_is_refused_before_compiling(worker):
    deep = variant_of(PROBLEM, replace(CONFIG, num_stages=9), 90)
    with pytest.raises(DeviceError, match="the limit is 232448"):
        compile_variant(deep)
    assert not worker.calls


@pytest.mark.parametrize(
    ("config", "problem", "capability"),
    [
        (CONFIG, PROBLEM, (8, 0)),
        (CONFIG, PROBLEM, (10, 0)),
        (CONFIG, replace(PROBLEM, aligned=False), (9, 0)),
        (CONFIG, replace(PROBLEM, dtype="fp32"), (9, 0)),
        (replace(CONFIG, split=2), PROBLEM, (9, 0)),
        (replace(CONFIG, num_warps=8), PROBLEM, (9, 0)),
        (replace(CONFIG, block_k=128, num_stages=4), PROBLEM, (9, 0)),
        (replace(CONFIG, block_m=84), PROBLEM, (9, 0)),
        (replace(CONFIG, block_m=192, num_stages=4), PROBLEM, (9, 0)),
        (GemmConfig("ws", 128, 128, 64, 8, 4), PROBLEM, (9, 0)),
    ],
)
def test_what_the_kernels_cannot_do_is_not_served(worker, config, problem, capability):
    assert cute.serves((9, 0), PROBLEM, CONFIG)
    assert not cute.serves(capability, problem, config)


def test_the_right_version_is_wanted(monkeypatch):
    def told(found: str | None) -> str:
        def version(name: str) -> str:
            if found is None:
                raise metadata.PackageNotFoundError(name)
            return found

        monkeypatch.setattr(cute.metadata, "version", version)
        return cute.absent.__wrapped__()

    assert told(cute.VERSION) == ""
    assert "is not installed; pip install 'smkern[cutlass]'" in told(None)
    assert f"is 4.0.0, not {cute.VERSION}" in told("4.0.0")
