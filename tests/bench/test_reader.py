"""The reader's source compiles, fits its registers, and is found; no GPU needed."""

from __future__ import annotations

import re
import subprocess

import pytest

from smkern.bench.reader import (
    MIN_BUFFER_BYTES,
    SHAPES,
    SOURCE,
    ReaderShape,
    buffer_bytes,
    compile_reader,
    l2_reading,
)
from smkern.kernels.cuda_source import source_folder
from tests.kernels.cubins import needs_nvcc

pytestmark = pytest.mark.slow

REGISTERS_OF_AN_SM = 65_536


def test_the_source_is_found_and_includes_nothing():
    assert "#include" not in (source_folder() / SOURCE).read_text()


def test_the_buffer_outgrows_the_cache():
    assert buffer_bytes(60 << 20) == MIN_BUFFER_BYTES
    assert buffer_bytes(126 << 20) == 16 * 126 << 20
    assert buffer_bytes((100 << 20) + 3) % 16 == 0


@pytest.mark.parametrize("num_sms", [2, 16, 60, 132])
def test_what_is_read_from_l2_fits_and_is_whole_turns(num_sms):
    shape = SHAPES[-1]
    size, passes = l2_reading(shape, num_sms)
    turn = num_sms * 1024 * 12 * 16
    assert size % turn == 0
    assert turn <= size <= max(12 << 20, turn)
    assert 480 << 20 < size * passes <= 512 << 20


def test_the_first_shape_is_2048_threads_with_8_loads():
    shape = SHAPES[0]
    assert (shape.threads * shape.ctas_per_sm, shape.loads, shape.name) == (2048, 8, "2x1024x8")


@needs_nvcc
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_it_compiles_without_spills_and_all_ctas_fit_an_sm(shape: ReaderShape, tmp_path):
    done = subprocess.run(
        [
            "nvcc", "-arch=sm_90", "-cubin", "-Xptxas", "-v",
            *(f"-D{define}" for define in shape.defines), str(source_folder() / SOURCE),
            "-o", str(tmp_path / "reader.cubin"),
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
def test_it_is_compiled_into_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cubin = compile_reader(SHAPES[0], (9, 0))
    assert cubin.startswith(b"\x7fELF")
    (kept,) = tmp_path.glob("smkern/cubins/reader-*.cubin")
    assert kept.read_bytes().startswith(cubin)
