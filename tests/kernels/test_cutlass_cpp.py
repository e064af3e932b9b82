"""CUTLASS's C++ GEMMs without nvcc, headers or a GPU: building, the cache, what is refused."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
from pathlib import Path

import pytest

from smkern.errors import ArgumentError, BudgetError, DeviceError
from smkern.kernels.cute import cpp_build
from smkern.kernels.cute.cpp import Call, CutlassGemm, load

NVCC = """#!/bin/sh
if [ "$1" = --version ]; then echo "Cuda compilation tools, release 13.0, V{release}"; exit 0; fi
echo "$@" >> "{log}"
while [ "$1" != -o ]; do shift; done
{does}
"""
KILLED = "echo \"nvcc error   : 'cicc' died due to signal 9 (Kill signal)\" >&2; exit 9"


class Nvcc:
    """An nvcc on the PATH that copies a library of the system, or does what it is told."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "log"
        self.acts()

    def acts(self, does: str = 'printf library > "$2"', release: str = "13.0.88") -> None:
        path = self.folder / "nvcc"
        path.write_text(NVCC.format(log=self.log, does=does, release=release))
        path.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def nvcc(monkeypatch, tmp_path) -> Nvcc:
    """A cache of its own, headers, and a compiler that answers at once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(cpp_build, "headers", lambda: tmp_path / "include")
    return Nvcc(tmp_path / "bin")


def test_it_is_built_once_for_a_source_headers_and_an_nvcc(nvcc, monkeypatch, tmp_path):
    assert cpp_build.built() is None
    first = cpp_build.build()
    assert (cpp_build.build(), cpp_build.built(), len(nvcc.calls)) == (first, first, 1)
    assert "-arch=sm_90a" in nvcc.calls[0]
    assert f"-I{tmp_path / 'include'}" in nvcc.calls[0]
    nvcc.acts(release="13.0.100")
    newer = cpp_build.build()
    assert cpp_build.built() == newer != first
    monkeypatch.setattr(cpp_build, "HEADERS_VERSION", "4.3.0.0")
    assert cpp_build.built() is None
    cpp_build.build()
    assert len(nvcc.calls) == 3


def test_another_source_is_another_library(nvcc, monkeypatch, tmp_path):
    cpp_build.build()
    (tmp_path / cpp_build.SOURCE).write_text("other")
    monkeypatch.setattr(cpp_build, "source_folder", lambda: tmp_path)
    assert cpp_build.built() is None


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_bytes(path.read_bytes() + b"!"),
        lambda path: path.write_bytes(b"library"),
        lambda path: path.chmod(0o666),
    ],
)
def test_what_another_may_have_written_is_not_loaded_but_built_again(nvcc, spoil):
    path = cpp_build.build()
    spoil(path)
    assert cpp_build.built() is None
    with pytest.raises(DeviceError, match=r"was not built; run `smkern build --cpp`"):
        load()
    assert cpp_build.build() == cpp_build.built() == path
    assert len(nvcc.calls) == 2


def test_a_library_is_loaded_with_the_seal_behind_it(nvcc):
    nvcc.acts(f'cp "{_system_library()}" "$2"')
    cpp_build.build()
    cos = cpp_build.load_library().cos
    cos.restype, cos.argtypes = ctypes.c_double, (ctypes.c_double,)
    assert cos(0.0) == 1.0


def test_what_does_not_load_is_named(nvcc):
    cpp_build.build()
    with pytest.raises(DeviceError, match=r"nvcc13\.0\.88\.so does not load: .*build again"):
        load()


@pytest.mark.parametrize(
    ("does", "message"),
    [
        ("echo 'no such template' >&2; exit 2", r"exit status 2\): no such template"),
        ("exit 0", "exit status 0"),
        (KILLED, r"was killed while it compiled cutlass_gemm\.cu: that takes 6\.5 GB"),
        ("kill -9 $$", r"was killed while it compiled"),
    ],
)
def test_what_fails_is_named_and_nothing_is_kept(nvcc, does, message):
    nvcc.acts(does)
    with pytest.raises(DeviceError, match=message):
        cpp_build.build()
    assert cpp_build.built() is None


def test_an_nvcc_that_hangs_is_killed(nvcc, monkeypatch):
    monkeypatch.setattr(cpp_build, "COMPILE_S", 0.2)
    nvcc.acts("sleep 60")
    with pytest.raises(DeviceError, match=r"did not end within 0\.2 s and was killed"):
        cpp_build.build()


def test_a_cache_that_cannot_be_written_is_named(nvcc, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DeviceError, match="cannot be written"):
        cpp_build.build()


def test_without_nvcc_or_headers_it_says_what_to_install(nvcc, monkeypatch, tmp_path):
    assert cpp_build.absent() == ""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "no nvcc on the PATH; install the CUDA toolkit" in cpp_build.absent()
    monkeypatch.undo()
    monkeypatch.setattr(cpp_build, "lacking", lambda *of: f"{of[0]} is not installed; pip install")
    assert cpp_build.absent().startswith("nvidia-cutlass is not installed")


def test_an_nvcc_that_says_no_release_is_named(nvcc):
    nvcc.acts(release="")
    assert "names no release" in cpp_build.absent()


class Function:
    """A function of a library, in Python: converts as ctypes does, by what was declared."""

    def __init__(self, does) -> None:
        self.does, self.restype, self.argtypes = does, None, None

    def __call__(self, *given):
        assert len(given) == len(self.argtypes)
        return self.does(*given)


class Library:
    """Two variants: clusters of two, of which `fit` fit, and none."""

    def __init__(self, fit: int = 8, status: int = 0, workspace: int = 0) -> None:
        self.fit, self.status, self.workspace = fit, status, workspace
        self.ran: list[tuple[int, dict]] = []
        names = [b"128x256x64:cooperative:2x1", b"128x64x64:pingpong:1x1:swap"]
        for name, does in {
            "count": lambda: 2,
            "name": names.__getitem__,
            "cluster_size": (2, 1).__getitem__,
            "clusters": self.clusters,
            "ctas": lambda which, call: call.max_active_clusters * (2, 1)[which],
            "workspace_bytes": lambda which, call: self.workspace,
            "run": self.run,
            "error": lambda status: b"out of memory" if status == -2 else b"Error Internal",
        }.items():
            setattr(self, f"smkern_cutlass_{name}", Function(does))

    def clusters(self, which, stream, found) -> int:
        found._obj.value = (self.fit, 2 * self.fit)[which]
        return 0

    def run(self, which, call) -> int:
        self.ran.append((which, {name: getattr(call, name) for name, _ in Call._fields_}))
        return self.status


ADDRESSES, SIZES, STRIDES = (0x1000, 0x2000, 0x3000), (77, 776, 520), (520, 528, 784)


def prepared(library: Library, which: int = 0, **changes):
    given = {
        "addresses": ADDRESSES, "sizes": SIZES, "strides": STRIDES, "num_sms": 24, "stream": 7,
    } | changes  # fmt: skip
    gemm = CutlassGemm(library)
    return gemm.prepare(gemm.variants[which], **given)


def test_a_call_says_what_was_asked():
    library = Library()
    launch = prepared(library, swizzle=4)
    launch()
    assert launch.num_ctas == 16
    assert library.ran == [(0, {
        "a": 0x1000, "w": 0x2000, "out": 0x3000, "m": 77, "n": 776, "k": 520,
        "a_stride": 520, "w_stride": 528, "out_stride": 784, "sm_count": 24,
        "max_active_clusters": 8, "swizzle": 4, "workspace": None, "stream": 7,
    })]  # fmt: skip


def test_variants_are_the_librarys():
    first, second = CutlassGemm(Library()).variants
    assert (first.index, first.cluster_size, first.rows) == (0, 2, 128)
    assert (second.index, second.cluster_size, second.rows) == (1, 1, 64)


@pytest.mark.parametrize(("num_sms", "ctas"), [(24, 16), (16, 16), (7, 6), (2, 2)])
def test_no_more_clusters_than_the_budget_holds_are_launched(num_sms, ctas):
    assert prepared(Library(), num_sms=num_sms).num_ctas == ctas


def test_clusters_that_do_not_fit_are_refused_by_name():
    message = "no cluster of 2 of 128x256x64:cooperative:2x1 fits 24 SMs .*128x64x64:pingpong:1x1"
    with pytest.raises(BudgetError, match=message):
        prepared(Library(fit=0))
    assert prepared(Library(fit=8), which=1).num_ctas == 16
    for num_sms in (1, 0, -3):
        with pytest.raises(BudgetError, match=f"{num_sms}"):
            prepared(Library(), num_sms=num_sms)
    with pytest.raises(BudgetError, match="num_sms is 0"):
        prepared(Library(), which=1, num_sms=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes": (0, 776, 520)}, "m is 0; give 1 to"),
        ({"sizes": (2**31, 776, 520)}, "m is 2147483648"),
        ({"sizes": (77, 770, 520)}, "n is 770, no multiple of 8"),
        ({"sizes": (77, 776, 519)}, "k is 519, no multiple of 8"),
        ({"strides": (524, 528, 784)}, "a_stride is 524, no multiple of 8"),
        ({"strides": (520, 512, 784)}, "w's rows are 512 apart and hold 520 elements"),
        ({"strides": (520, 528, 768)}, "out's rows are 768 apart and hold 776"),
        ({"addresses": (0x1000, 0x2008, 0x3000)}, "w lies at 0x2008, no multiple of 16"),
        ({"addresses": (0, 0x2000, 0x3000)}, "a lies at 0x0"),
        ({"swizzle": 3}, r"swizzle is 3; give one of \(1, 2, 4, 8\)"),
    ],
)
def test_what_the_kernels_cannot_read_is_refused_before_a_launch(changes, message):
    library = Library()
    with pytest.raises(ArgumentError, match=message):
        prepared(library, **changes)
    assert not library.ran


@pytest.mark.parametrize(("status", "text"), [(-2, "out of memory"), (7, "Error Internal")])
def test_a_status_is_an_error_with_its_text(status, text):
    launch = prepared(Library(status=status))
    with pytest.raises(DeviceError, match=f"2x1 failed with {status}: {text}"):
        launch()


def test_a_kernel_that_wants_a_workspace_is_refused():
    with pytest.raises(DeviceError, match="a workspace of 64 bytes"):
        prepared(Library(workspace=64))


def _system_library() -> str:
    """The path of the maths library, which ctypes finds by name alone."""
    name = ctypes.util.find_library("m")
    assert name is not None
    ctypes.CDLL(name)
    with open("/proc/self/maps") as maps:
        return next(line.split()[-1] for line in maps if name.split(".so")[0] in line)
