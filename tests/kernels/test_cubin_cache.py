"""The cache of cubins: what others spoiled, planted or left half done is never loaded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from smkern.errors import DeviceError
from smkern.kernels import cuda_source
from smkern.kernels.cuda_source import compile_cuda
from tests.docs.pages import ROOT

PLAN = "attention_plan.cu"


@pytest.fixture
def folder(monkeypatch, tmp_path) -> Path:
    """The folder of cubins in a cache of its own; the compiler gives the macros and a count."""
    count = iter(range(1000))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        cuda_source, "_by_nvrtc", lambda name, defines, arch: f"{defines} {next(count)}".encode()
    )
    return tmp_path / "smkern" / "cubins"


def compiled(*defines: str) -> str:
    return compile_cuda(PLAN, defines, "sm_90a").decode()


def only(folder: Path) -> Path:
    (kept,) = folder.iterdir()
    return kept


SPOILED = {
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "cut to its seal": lambda path: path.write_bytes(path.read_bytes()[-32:]),
    "without a seal": lambda path: path.write_bytes(path.read_bytes()[:-32]),
    "a byte": lambda path: path.write_bytes(b"!" + path.read_bytes()[1:]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "planted": lambda path: path.write_bytes(b"\x7fELF" + bytes(1000)),
    "writable by the group": lambda path: path.chmod(0o664),
    "writable by all": lambda path: path.chmod(0o646),
}  # fmt: skip


@pytest.mark.parametrize("how", SPOILED)
def test_a_spoiled_file_is_compiled_again_and_healed(folder, how):
    assert compiled() == compiled() == "() 0"
    SPOILED[how](only(folder))
    assert [compiled(), compiled()] == ["() 1", "() 1"]
    assert only(folder).stat().st_mode & 0o777 == 0o644


def test_a_cubin_under_another_ones_name_is_compiled_again(folder):
    assert compiled("A=1") == "('A=1',) 0"
    first = only(folder)
    planted = first.read_bytes()
    assert compiled("B=1") == "('B=1',) 1"
    (second,) = {*folder.iterdir()} - {first}
    second.write_bytes(planted)
    assert compiled("B=1") == "('B=1',) 2"


def test_another_users_file_is_compiled_again(folder, monkeypatch):
    assert compiled() == "() 0"
    own = os.geteuid()
    if own == 0:  # root's files are anyone's to read, so give it away
        os.chown(only(folder), 4242, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    assert compiled() == "() 1"


def test_a_pipe_or_a_folder_in_its_place_hangs_nobody(folder):
    assert compiled() == "() 0"
    path = only(folder)
    path.unlink()
    os.mkfifo(path)
    assert [compiled(), compiled()] == ["() 1", "() 1"]
    path.unlink()
    path.mkdir()
    assert [compiled(), compiled()] == ["() 2", "() 3"]
    assert list(folder.iterdir()) == [path]


def test_folders_are_the_users_alone_whatever_the_umask(folder):
    before = os.umask(0)
    try:
        compiled()
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (folder, folder.parent)} == {0o700}


def test_what_a_killed_writer_left_is_removed_later(folder):
    compiled("A=1")
    left = folder / f".{only(folder).name}.abc.part"
    for age_s in (60, 7200):
        left.write_bytes(b"half")
        os.utime(left, (time.time() - age_s,) * 2)
        compiled(f"AGE={age_s}")
        assert left.exists() == (age_s < 3600)


WRITER = """
import resource, signal, sys
from pathlib import Path
from smkern.kernels import cuda_source
limit, first, count = map(int, sys.argv[1:4])
if limit:  # files of more bytes fail as on a full disk
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
csrc = Path(sys.argv[4])  # that of its version
cuda_source.source_folder = lambda: csrc
cuda_source._by_nvrtc = lambda name, defines, arch: (csrc.name + defines[0]).encode() * 50_000
print("ready", flush=True)
for number in range(first, first + count):
    define = f"N={number % 5}"
    found = cuda_source.compile_cuda("attention_plan.cu", [define], "sm_90a")
    assert found == (csrc.name + define).encode() * 50_000
print("done")
"""


def writer(limit: int, first: int, count: int) -> subprocess.Popen[str]:
    """A process of one of three versions; compiles five variants over and over, and checks them."""
    csrc = Path(os.environ["XDG_CACHE_HOME"]) / f"v{first % 3}"
    csrc.mkdir(exist_ok=True)
    (csrc / PLAN).write_text(csrc.name)
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, *map(str, (limit, first, count, csrc))],
        stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


@pytest.mark.slow
def test_eight_processes_of_three_versions_share_a_cache_and_some_are_killed(folder):
    writers = [writer(0, first, 10 if first % 2 else 10**6) for first in range(8)]
    for each in writers:
        assert each.stdout.readline() == "ready\n"  # type: ignore[union-attr]
    for killed in writers[::2]:
        killed.send_signal(signal.SIGKILL)
    assert [each.communicate()[0] for each in writers[1::2]] == ["done\n"] * 4
    assert [each.wait() for each in writers[::2]] == [-signal.SIGKILL] * 4
    assert writer(0, 0, 5).wait() == 0
    for path in folder.glob("[!.]*"):
        assert cuda_source.kept_cubin(path) is not None, path


def test_a_full_disk_is_no_error_and_nothing_is_left(folder):
    assert writer(5000, 0, 5).communicate()[0] == "ready\ndone\n"
    assert not [path for path in folder.parent.rglob("*") if path.is_file()]


def test_a_compiler_that_hangs_is_named_and_killed_with_its_children(folder, monkeypatch, tmp_path):
    script, child = tmp_path / "nvcc", tmp_path / "child"
    script.write_text(
        f'#!/bin/sh\necho "$TMPDIR" > {tmp_path}/place\necho half > "$TMPDIR"/tmpxft\n'
        f"sleep 600 &\necho $! > {child}.new && mv {child}.new {child}\nwait\n"
    )
    script.chmod(0o755)

    def too_late(running, timeout):
        while not child.exists():
            time.sleep(0.01)
        raise subprocess.TimeoutExpired("nvcc", timeout)

    monkeypatch.setattr(subprocess.Popen, "communicate", too_late)
    monkeypatch.setattr(cuda_source, "_by_nvrtc", _absent)
    monkeypatch.setattr(cuda_source.shutil, "which", lambda name: str(script))
    with pytest.raises(DeviceError, match=r"nvcc did not end within 600 s and was killed.*by hand"):
        compiled()
    assert not Path((tmp_path / "place").read_text().strip()).exists()
    for _ in range(500):
        if is_over(int(child.read_text())):
            break
        time.sleep(0.01)
    else:
        pytest.fail("what nvcc had started still runs")
    assert not folder.exists()


def is_over(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return True
    return state.rpartition(")")[2].split()[0] == "Z"


def _absent(name, defines, arch):
    raise ImportError("no nvrtc")


_absent.__name__ = "_by_nvrtc"
