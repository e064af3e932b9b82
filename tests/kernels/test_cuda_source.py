"""CUDA sources become device code once: who compiles, where it is kept, what a failure says."""

from __future__ import annotations

import pytest

from smkern.errors import DeviceError
from smkern.kernels import cuda_source
from smkern.kernels.cuda_source import compile_cuda, source_folder


@pytest.fixture
def sources(monkeypatch, tmp_path):
    """A folder of two sources and a header, and a cache of its own."""
    folder = tmp_path / "csrc"
    folder.mkdir()
    for name in ("a.cu", "b.cu", "common.cuh"):
        (folder / name).write_text(name)
    monkeypatch.setattr(cuda_source, "source_folder", lambda: folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


@pytest.fixture
def compiled(monkeypatch):
    """What was compiled; its device code is its name and a count."""
    done: list[tuple[str, tuple[str, ...], str]] = []

    def compiler(name, defines, arch):
        done.append((name, tuple(defines), arch))
        return f"{name} {len(done)}".encode()

    compiler.__name__ = "_by_nvrtc"
    monkeypatch.setattr(cuda_source, "_by_nvrtc", compiler)
    return done


def test_it_is_compiled_once_until_what_decides_it_changes(sources, compiled):
    assert compile_cuda("a.cu", ["N=1"], "sm_90a") == b"a.cu 1"
    assert compile_cuda("a.cu", ["N=1"], "sm_90a") == b"a.cu 1"
    for name, defines, arch in (("a.cu", ["N=2"], "sm_90a"), ("a.cu", ["N=1"], "sm_80"),
                                ("b.cu", ["N=1"], "sm_90a")):  # fmt: skip
        assert compile_cuda(name, defines, arch) == f"{name} {len(compiled)}".encode()
    assert len(compiled) == 4
    (sources / "b.cu").write_text("other")
    assert compile_cuda("a.cu", ["N=1"], "sm_90a") == b"a.cu 1"
    (sources / "common.cuh").write_text("other")
    assert compile_cuda("a.cu", ["N=1"], "sm_90a") == b"a.cu 5"


def test_a_cache_that_cannot_be_written_is_no_error(sources, compiled, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert [compile_cuda("a.cu", [], "sm_90a") for _ in range(2)] == [b"a.cu 1", b"a.cu 2"]


def test_nvcc_stands_in_for_nvrtc(sources, monkeypatch):
    monkeypatch.setattr(cuda_source, "_by_nvrtc", _without)
    monkeypatch.setattr(cuda_source, "_by_nvcc", lambda *of: b"by nvcc")
    assert compile_cuda("a.cu", [], "sm_90a") == b"by nvcc"


def test_no_compiler_is_an_error_with_a_remedy(sources, monkeypatch):
    monkeypatch.setattr(cuda_source, "_by_nvrtc", _without)
    monkeypatch.setattr(cuda_source.shutil, "which", lambda name: None)
    with pytest.raises(DeviceError, match=r"a.cu for sm_90a.*no libnvrtc.*no nvcc.*nvidia-cuda-nv"):
        compile_cuda("a.cu", [], "sm_90a")


def _without(name, defines, arch):
    raise RuntimeError("no libnvrtc")


_without.__name__ = "_by_nvrtc"


def test_the_checkouts_sources_are_found():
    assert (source_folder() / "attention_plan.cu").is_file()
