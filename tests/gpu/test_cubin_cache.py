"""The cache of cubins with a real compiler and a real driver: what was spoiled loads again."""

from __future__ import annotations

import pytest
import torch

from smkern.kernels import cuda_source
from smkern.kernels.attention.cuda import compile_plan
from smkern.kernels.driver import load_function


@pytest.mark.parametrize("spoiled", [b"", b"\x7fELF" + bytes(5000)], ids=["empty", "planted"])
def test_a_spoiled_cubin_is_compiled_again_and_loads(
    device, tmp_path, monkeypatch, spoiled
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    major, minor = torch.cuda.get_device_capability(device)
    torch.zeros(1, device="cuda")  # the primary context is current
    compile_plan(10 * major + minor)
    (kept,) = tmp_path.glob("smkern/cubins/*.cubin")
    kept.write_bytes(spoiled)
    load_function(compile_plan(10 * major + minor), "attention_plan", 1024)

    def absent(*of: object) -> bytes:
        pytest.fail("it was not kept")

    monkeypatch.setattr(cuda_source, "_compile", absent)
    load_function(compile_plan(10 * major + minor), "attention_plan", 1024)
