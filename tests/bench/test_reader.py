"""The reader's source compiles, fits its registers, and is found; no GPU needed."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from smkern.bench.reader import (
    MIN_BUFFER_BYTES,
    SHAPES,
    ReaderShape,
    buffer_bytes,
    compile_reader,
    source_path,
)
from smkern.errors import DeviceError

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on the PATH")
REGISTERS_OF_AN_SM = 65_536


def test_the_source_is_found_and_includes_nothing():
    assert "#include" not in source_path().read_text()


def test_the_buffer_outgrows_the_cache():
    assert buffer_bytes(60 << 20) == MIN_BUFFER_BYTES
    assert buffer_bytes(126 << 20) == 16 * 126 << 20
    assert buffer_bytes((100 << 20) + 3) % 16 == 0


def test_the_first_shape_is_2048_threads_with_8_loads():
    shape = SHAPES[0]
    assert (shape.threads * shape.ctas_per_sm, shape.loads, shape.name) == (2048, 8, "2x1024x8")


@needs_nvcc
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_it_compiles_without_spills_and_all_ctas_fit_an_sm(shape: ReaderShape, tmp_path):
    done = subprocess.run(
        [
            "nvcc", "-arch=sm_90", "-cubin", "-Xptxas", "-v", *shape.defines,
            str(source_path()), "-o", str(tmp_path / "reader.cubin"),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )  # fmt: skip
    report = done.stdout + done.stderr
    assert set(re.findall(r"(\d+) bytes spill", report)) == {"0"}
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", report))
    assert registers * shape.threads * shape.ctas_per_sm <= REGISTERS_OF_AN_SM


@needs_nvcc
def test_either_compiler_gives_a_cubin():
    assert compile_reader(SHAPES[0], (9, 0)).startswith(b"\x7fELF")


def test_no_compiler_is_an_error_with_a_remedy(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)

    def no_nvrtc(defines, arch):
        raise RuntimeError("no libnvrtc")

    no_nvrtc.__name__ = "_by_nvrtc"
    monkeypatch.setattr("smkern.bench.reader._by_nvrtc", no_nvrtc)
    with pytest.raises(DeviceError, match=r"sm_90.*no libnvrtc.*no nvcc.*nvidia-cuda-nvrtc"):
        compile_reader(SHAPES[0], (9, 0))
