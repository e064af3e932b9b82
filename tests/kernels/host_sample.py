"""csrc/sample.cu on the CPU: the kernel's own source, a fiber of one process for each thread."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from smkern.kernels.cuda_source import source_folder
from smkern.kernels.sample import SampleVariant, params_packer, shared_bytes
from smkern.tuning.sample import Grid, SampleProblem, workspace_bytes

HOST = Path(__file__).parent / "host" / "cuda.h"
_ENTRY = """
extern "C" int run(const SampleParams* p, int bytes, int ctas, char* room) {
  if (bytes != sizeof(SampleParams)) return sizeof(SampleParams);
  host_dynamic = room;
  host::run(ctas, [p] { sample(*p); });
  return 0;
}
"""


def has_compiler() -> bool:
    return shutil.which("g++") is not None


def host_source() -> str:
    """One C++ file of the kernel and what it includes."""
    folder, seen = source_folder(), {"sample_math.cuh"}

    def include(match: re.Match[str]) -> str:
        name = match[1]
        if name in seen:
            return ""
        seen.add(name)
        return read(name)

    def read(name: str) -> str:
        text = (folder / name).read_text().replace("#pragma once", "")
        return re.sub(r'#include "(\w+\.cuh)"', include, text)

    body = read("sample.cu").replace("extern __shared__ __align__(16) char dynamic[];",
                                     "char* const dynamic = host_dynamic;")  # fmt: skip
    return f'#include "{HOST}"\nstatic char* host_dynamic;\n{body}{_ENTRY}'


@cache
def host_kernel(folder: Path, dtype: str, aligned: bool, threads: int) -> ctypes.CDLL:
    """The kernel as a library, compiled once."""
    path = folder / f"sample-{dtype}-{aligned}-{threads}"
    path.with_suffix(".cpp").write_text(host_source())
    defines = SampleVariant(dtype, aligned, threads // 32, 90).defines
    command = ["g++", "-O1", "-g", "-std=c++17", "-shared", "-fPIC", "-w", "-ffp-contract=off",
               *(f"-D{define}" for define in defines), str(path.with_suffix(".cpp")),
               "-o", str(path.with_suffix(".so"))]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise AssertionError(done.stderr[-4000:])
    return ctypes.CDLL(str(path.with_suffix(".so")))


def sample_on_host(
    folder: Path, logits: Tensor, *, ctas: int, threads: int = 64, ctas_per_row: int = 0,
    state: Sequence[Tensor | None] = (None,) * 4, pad_token: int = 0, **options: Tensor | float,
) -> Tensor:  # fmt: skip
    """Tokens of a launch; counters are checked to be left at zero.

    Args:
        folder: For the compiled kernel.
        logits: [batch, vocab].
        ctas: The grid.
        threads: Of a CTA.
        ctas_per_row: CTAs that share a row, 0: ranges over all rows.
        state: finished, lengths, max_lengths, stop_tokens.
        pad_token: Of finished rows.
        **options: temperature, top_k, top_p, min_p, seeds, steps: tensors or numbers.
    """
    names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
    rows, vocab = logits.shape
    stride = logits.stride(0)
    dtype = names[logits.dtype]
    aligned = logits.data_ptr() % 16 == 0 and stride * logits.element_size() % 16 == 0
    problem = SampleProblem(rows, vocab, dtype, aligned)
    workspace = torch.full((workspace_bytes(problem),), 0xCD, dtype=torch.uint8)
    counters = workspace[: 4 * rows].zero_()
    out = torch.full((rows,), -7, dtype=torch.int32)
    room = torch.full((shared_bytes(problem) + 16,), 0xCD, dtype=torch.uint8)
    defaults = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seeds": 0, "steps": 0}
    given = [options.get(name, default) for name, default in defaults.items()]
    tensors = (logits, *given, *state, out, workspace)
    numbers = [
        default if isinstance(x, Tensor) else x
        for x, default in zip(given, defaults.values(), strict=True)
    ]
    stop = state[3]
    packed = params_packer(problem, Grid(ctas, ctas_per_row))(
        *(x.data_ptr() if isinstance(x, Tensor) else 0 for x in tensors),
        stride * logits.element_size(), 0 if stop is None else stop.stride(0),
        0 if stop is None else stop.shape[1], pad_token, *numbers,
    )  # fmt: skip
    kernel = host_kernel(folder, dtype, aligned, threads)
    wrong = kernel.run(ctypes.create_string_buffer(packed, len(packed)), len(packed), ctas,
                       ctypes.c_void_p(room.data_ptr() + -room.data_ptr() % 16))  # fmt: skip
    assert not wrong, f"the kernel's parameters are {wrong} bytes, ours {len(packed)}"
    assert not counters.any()
    return out
