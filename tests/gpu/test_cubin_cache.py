"""The cache of cubins with a real compiler and a real driver: what was spoiled loads again."""

from __future__ import annotations

import pytest
import torch

from smkern.kernels import cuda_source
from smkern.kernels.attention.cuda import CudaVariant, PlanVariant
from smkern.kernels.driver import load_function


@pytest.mark.parametrize("spoiled", [b"", b"\x7fELF" + bytes(5000)], ids=["empty", "planted"])
def test_a_spoiled_cubin_is_compiled_again_and_loads(
    device, tmp_path, monkeypatch, spoiled
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    major, minor = torch.cuda.get_device_capability(device)
    torch.zeros(1, device="cuda")  # the primary context is current
    plan = PlanVariant(10 * major + minor)
    plan.compile()
    (kept,) = tmp_path.glob("smkern/cubins/*.cubin")
    kept.write_bytes(spoiled)
    load_function(plan.compile().cubin, "attention_plan", 1024)

    def absent(*of: object) -> bytes:
        pytest.fail("it was not kept")

    monkeypatch.setattr(cuda_source, "_compile", absent)
    load_function(plan.compile().cubin, "attention_plan", 1024)


def test_nvrtc_takes_every_attention_kernel() -> None:
    """Else nvcc stands in, or nothing where it is not."""
    for kernel in ("attention_decode", "attention_prefill"):
        variant = CudaVariant(
            kernel, 64, False, False, False, 1, 2, kernel != "attention_decode", 90
        )
        cubin = cuda_source._by_nvrtc(f"{kernel}.cu", variant.defines, "sm_90a")
        assert cubin.startswith(b"\x7fELF")
