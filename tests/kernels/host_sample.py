"""csrc/sample.cu on the CPU: the kernel's own source, a fiber of one process for each thread.

Around it all is the ordinary path: checks, choice, variants, grid, packed parameters, workspace.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from smkern.kernels import aot
from smkern.kernels import sample as kernels
from smkern.kernels.compile import Artifact
from smkern.kernels.cuda_source import source_folder
from smkern.kernels.sample import SampleKernels, SampleVariant
from smkern.ops.operator_dispatch import OperatorDispatcher
from smkern.ops.operator_eager import EagerOperator
from smkern.ops.sample.call import Sample
from smkern.ops.sample.operators import SAMPLE
from smkern.ops.workspace import Workspaces
from smkern.tuning.constraints import COUNTER_BYTES
from smkern.tuning.sample import SAMPLE_FAMILY, Budget, SampleConfig, SampleProblem
from tests.ops.conftest import FakeProfile, streams_of

THREADS = 64
"""Of a CTA here, whatever the configuration: tokens do not depend on it."""
_HOST = Path(__file__).parent / "host" / "cuda.h"
_ENTRY = """
extern "C" int run(const SampleParams* p, int ctas, int shared_bytes) {
  host_dynamic = (char*)aligned_alloc(16, shared_bytes + 16);
  memset(host_dynamic, 0xcd, shared_bytes);
  memset(host_dynamic + shared_bytes, 0x5a, 16);
  host::run(ctas, [p] { sample(*p); });
  int whole = 1;
  for (int i = 0; i < 16; ++i) whole &= host_dynamic[shared_bytes + i] == 0x5a;
  free(host_dynamic);
  return whole;
}
extern "C" long long loaded() {
  const long long bytes = host::loaded;
  host::loaded = 0;
  return bytes;
}
extern "C" int params_bytes() { return sizeof(SampleParams); }
"""

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on the PATH")


def host_source() -> str:
    """One C++ file of the kernel and what it includes; its PTX is the host's functions."""
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

    dynamic = "extern __shared__ __align__(16) char dynamic[];"
    body = read("sample.cu")
    assert body.count(dynamic) == 1
    body = body.replace(dynamic, "char* const dynamic = host_dynamic;")
    return f'#include "{_HOST}"\nstatic char* host_dynamic;\n{body}{_ENTRY}'


@cache
def host_kernel(folder: Path, dtype: str, aligned: bool, threads: int) -> ctypes.CDLL:
    """The kernel as a library in `folder`, compiled once."""
    path = folder / f"sample-{dtype}-{aligned}-{threads}"
    path.with_suffix(".cpp").write_text(host_source())
    defines = SampleVariant(dtype, aligned, threads // 32, 90).defines
    command = ["g++", "-Og", "-std=c++17", "-shared", "-fPIC", "-w", "-ffp-contract=off",
               "-U_FORTIFY_SOURCE",  # it takes a jump to another stack for an error
               *(f"-D{define}" for define in defines), str(path.with_suffix(".cpp")),
               "-o", str(path.with_suffix(".so"))]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    library = ctypes.CDLL(str(path.with_suffix(".so")))
    library.loaded.restype = ctypes.c_longlong
    assert library.params_bytes() == kernels._PARAMS.size
    return library


def _words(variant: SampleVariant) -> Artifact:
    return Artifact("sample", f"{variant.dtype} {variant.aligned}".encode(), 0, 0, (), ())


@dataclass(slots=True)
class HostDevice:
    """A device whose kernels are the host's: streams, budgets, what was launched.

    `config`: instead of the model's choice. A stream 7 has the whole device, others what `budgets`
    says. `launches`: (CTAs, threads, overlap) each. `loaded`: bytes of logits that the last one
    read, where rows are whole 16 bytes.
    """

    folder: Path
    threads: int = THREADS
    config: SampleConfig | None = None
    stream: int = 7
    is_capturing: bool = False
    budgets: dict[int, Budget] = field(default_factory=lambda: {7: Budget(132, "mask", True)})
    launches: list[tuple[int, int, bool]] = field(default_factory=list)
    loaded: int = 0
    kernels: SampleKernels = field(default_factory=lambda: SampleKernels(90))
    eager: EagerOperator[SampleProblem] = field(init=False)
    workspaces: Workspaces = field(init=False)

    def __post_init__(self) -> None:
        streams = streams_of(self)
        self.workspaces = Workspaces(torch.device("cpu"), streams.capturing, lambda raw: 0)
        profile: Any = FakeProfile()
        dispatcher = OperatorDispatcher(profile, lambda: self.kernels, self._select)
        self.eager = EagerOperator(SAMPLE, -1, dispatcher, streams, self.workspaces)

    def __call__(self, logits: Tensor, **options: Any) -> Tensor:
        """A launch; counters must be left at zero."""
        tokens: Tensor = self.eager(Sample(logits, **options))
        for buffer in self.workspaces._of_streams.values():
            assert not buffer.tensor[:COUNTER_BYTES].any()
        return tokens

    def load(self, cubin: bytes, name: str, shared_bytes: int) -> ctypes.CDLL:
        """What loads a function, of a cubin that is a variant's words."""
        dtype, aligned = cubin.decode().split()
        return host_kernel(self.folder, dtype, aligned == "True", self.threads)

    def launcher(
        self, function: Any, num_ctas: int, threads: int, shared_bytes: int, *, overlap: bool
    ) -> Callable[[int, Any], int]:
        def run(stream: int, params: Any) -> int:
            self.launches.append((num_ctas, threads, overlap))
            whole = function.run(ctypes.c_void_p(params[0]), num_ctas, shared_bytes)
            assert whole, "wrote behind its shared memory"
            self.loaded = function.loaded()
            return 0

        return run

    def patch(self, patch: pytest.MonkeyPatch) -> HostDevice:
        """In the place of the driver and of CUDA's compiler."""
        patch.setattr(aot, "load_function", self.load)
        patch.setattr(kernels, "launcher", self.launcher)
        patch.setattr(SampleVariant, "compile", _words)
        return self

    def _select(self, problem: SampleProblem, budget: Budget) -> SampleConfig:

        profile: Any = FakeProfile()
        return self.config or SAMPLE_FAMILY.choose(problem, budget, profile)
