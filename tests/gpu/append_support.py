"""What the append tests on a GPU share: compilation ahead, the truth, comparisons."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

import smkern
from smkern.kernels.append_launch import variants_of
from smkern.ops.reference import append as reference
from tests.gpu.bits import twin
from tests.gpu.compiling import compile_ahead
from tests.gpu.gemm_support import capability
from tests.ops.append_cases import FP8, Case, Made, make, plain_options, problem


def precompile(cases: Iterable[Case]) -> None:
    """Compile side by side what tests of these cases launch."""
    made = [make(case) for case in cases]
    problems = [problem(each, plain=plain) for each in made for plain in (False, True)]
    compile_ahead(variant for x in problems for variant in variants_of(x, capability()))


def cloned(made: Made) -> Made:
    """The same call over memory of its own, strides kept."""
    args, options = made
    return tuple(twin(x) for x in args), {name: twin(x) for name, x in options.items()}


def on_host(made: Made) -> Made:
    args, options = made
    known = {name: x for name, x in options.items() if name not in ("num_sms", "check")}
    known = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in known.items()}
    return tuple(x.cpu() for x in args), known


def same_bits(x: Tensor, y: Tensor) -> bool:
    """NaNs are alike: host and device round one to different bits."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    kind = kinds[x.element_size()]
    same = x.contiguous().view(kind) == y.contiguous().view(kind)
    return bool((same | (x.float().isnan() & y.float().isnan())).all())


def close(got: Tensor, want: Tensor, name: str) -> None:
    """Equal up to a last place of the format, in at most 2% of the elements; NaN where NaN is."""
    x, y = got.cpu().double(), want.double()
    assert torch.equal(x.isnan(), y.isnan()), f"{name}: other elements than wanted were written"
    rtol, atol = (2**-3, 2**-9) if got.dtype is FP8 else (torch.finfo(got.dtype).eps, 4e-6)
    torch.testing.assert_close(x, y, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: name + m)
    written = ~y.isnan()
    share = float((x != y)[written].double().mean()) if written.any() else 0.0
    assert share < 0.02, f"{name}: {share:.1%} of the elements differ by a last place"


def check(before: Made, after: Made, out: Tensor) -> None:
    """Hold q's result and both caches against fp64, every byte of the caches included."""
    args, options = on_host(before)
    want = torch.full(args[0].shape, torch.nan, dtype=args[0].dtype)
    reference.qk_norm_rope_append(*args, **options, out=want, compute_dtype=torch.float64)
    close(out, want, "q")
    close(after[0][3], args[3], "k_cache")
    assert same_bits(after[0][4].cpu(), args[4]), "v_cache differs"
    for x, y, name in zip(after[0][:3], before[0][:3], "qkv", strict=True):
        assert same_bits(x, y), f"{name} was changed"


def run(case: Case, **options: Any) -> tuple[Made, Tensor]:
    """A case through the public operator on the GPU, checked."""
    made = make(case, "cuda")
    made = made[0], made[1] | options
    before = cloned(made)
    out = torch.full(made[0][0].shape, torch.nan, dtype=case.dtype, device="cuda")
    assert smkern.qk_norm_rope_append(*made[0], **made[1], out=out) is out
    torch.cuda.synchronize()
    check(before, made, out)
    return made, out


def run_plain(case: Case, **options: Any) -> Made:
    """A case through `append_kv` on the GPU: the reference's bits."""
    made = make(case, "cuda")
    made = made[0], plain_options(made[1]) | options
    args, known = on_host(cloned(made))
    assert smkern.append_kv(*made[0][1:], **made[1]) is None
    reference.append_kv(*args[1:], **known)
    for at, name in ((3, "k_cache"), (4, "v_cache")):
        assert same_bits(made[0][at].cpu(), args[at]), f"{name} differs"
    return made
