"""The append kernel interpreted, against the plain-torch reference, over the option grid."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from smkern.kernels.append_launch import variant_of
from smkern.kernels.append_triton import append_rows
from smkern.ops.append.call import Call, numbers_of, problem_of
from smkern.ops.append.operators import APPEND
from smkern.ops.operator_warmup import aligned
from smkern.ops.reference import append as reference
from smkern.rope import Rope
from smkern.tuning.append import AppendConfig, Budget, num_ctas
from tests.ops.append_cases import FP8, NAMES, Case, make

WORDS = {FP8: torch.uint8, torch.int64: torch.int32}
"""What a kernel reads these as."""
CONFIG, THREE = AppendConfig(4), Budget(3, "grid")
RAGGED = ((3, 40), (0, 5), (1, 1), (9, 9), (2, 33), (0, 0), (1, 16))
PLAIN = Case(RAGGED, q_heads=0, gap=8)
BASE = Case(RAGGED, rope=Rope(64), norm=True, gap=8, options={"eps": 1e-3})
DECODE = ((1, 40), (1, 1), (1, 17))
WHERE = torch.randint(-3, 80, (BASE.tokens,), generator=torch.Generator().manual_seed(0))
GRID = {
    "plain": PLAIN,
    "plain-decode": replace(PLAIN, requests=DECODE),
    "all": BASE,
    "decode": replace(BASE, requests=DECODE),
    "rope": replace(BASE, norm=False),
    "norm": replace(BASE, rope=None),
    "neither": replace(BASE, rope=None, norm=False),
    "partial": replace(BASE, rope=Rope(32)),
    "odd-partial": replace(BASE, rope=Rope(20)),
    "interleaved": replace(BASE, rope=Rope(64, interleaved=True)),
    "interleaved-partial": replace(BASE, rope=Rope(16, interleaved=True)),
    "96": replace(BASE, head_dim=96, rope=Rope(96)),
    "96-interleaved": replace(BASE, head_dim=96, rope=Rope(96, interleaved=True)),
    "96-partial": replace(BASE, head_dim=96, rope=Rope(48)),
    "128": replace(BASE, head_dim=128, rope=Rope(128), q_heads=3, kv_heads=1),
    "256": replace(BASE, head_dim=256, rope=Rope(64), q_heads=2, kv_heads=2),
    "odd-heads": replace(BASE, q_heads=9, kv_heads=3),
    "many-heads": replace(BASE, q_heads=40, kv_heads=40),
    "flat": replace(BASE, flat=True),
    "flat-plain": replace(PLAIN, flat=True, page_size=1),
    "unaligned": replace(BASE, gap=3),
    "heads-first": replace(BASE, heads_first=True),
    "positions": replace(BASE, options=BASE.options | {"positions": WHERE.int()}),
    "long-positions": replace(BASE, options=BASE.options | {"positions": WHERE}),
    "padding": replace(BASE, padding=5),
    "fp8": replace(BASE, cache_dtype=FP8),
    "fp8-scales": replace(
        BASE,
        cache_dtype=FP8,
        options=BASE.options | {"k_scale": 0.03, "v_scale": torch.tensor([0.7])},
    ),
    "fp8-plain": replace(PLAIN, cache_dtype=FP8, options={"k_scale": torch.tensor([0.001])}),
}


def inputs(case: Case) -> dict[str, Any]:
    """Keyword arguments of the reference, always the same; poison behind the table's lengths."""
    torch.manual_seed(0)
    args, options = make(case)
    given = dict(zip(NAMES, args, strict=True)) | options
    if not case.q_heads:
        del given["q"]
    if not case.flat:
        table = given["page_table"]
        table[table < 0] = 1 << 30
        table[:, -1] = -5
    return given


def launch(given: dict[str, Any], config: AppendConfig, budget: Budget) -> None:
    call = Call(**given)
    problem = problem_of(call, aligned(APPEND, call))
    assert problem is not None
    tensors = (getattr(call, name) for name in APPEND.arguments[1:])
    present = (x if isinstance(x, Tensor) else call.k for x in tensors)
    append_rows[(num_ctas(problem, config, budget),)](
        *(x.view(WORDS.get(x.dtype, x.dtype)) for x in present),
        *(+x for x in numbers_of(call)),  # the interpreter takes no bool
        **variant_of(problem, config, 80).constants,
    )


def check(case: Case, config: AppendConfig = CONFIG, budget: Budget = THREE) -> None:
    """The kernel's q, k and v against the reference's; what is not appended stays NaN."""
    given, same = inputs(case), inputs(case)
    if case.q_heads:
        given["out"] = torch.full(same["q"].shape, torch.nan).half()
        want = torch.full_like(given["out"], torch.nan)
        reference.qk_norm_rope_append(**same, out=want)
    else:
        reference.append_kv(**same)
    launch(given, config, budget)
    turned = case.rope is not None or case.norm
    rtol, atol = (0.13, 2e-3) if case.cache_dtype is FP8 else (2e-3, 2e-3)
    close(given["k_cache"], same["k_cache"], rtol=rtol if turned else 0, atol=atol if turned else 0)
    close(given["v_cache"], same["v_cache"], rtol=0, atol=0)
    if case.q_heads:
        close(given["out"], want, rtol=2e-3, atol=2e-3)


def close(found: Tensor, want: Tensor, *, rtol: float, atol: float) -> None:
    torch.testing.assert_close(found.float(), want.float(), rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("case", GRID.values(), ids=GRID)
def test_values(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("budget", [Budget(1, "grid"), Budget(2, "mask"), Budget(64, "mask")])
@pytest.mark.parametrize("config", [AppendConfig(4, 3), AppendConfig(8), AppendConfig(16)])
def test_any_budget_and_shape_of_a_cta(config: AppendConfig, budget: Budget) -> None:
    check(BASE, config, budget)


def test_q_may_be_written_in_place() -> None:
    given, same = inputs(BASE), inputs(BASE)
    want = reference.qk_norm_rope_append(**same)
    launch(given | {"out": given["q"]}, CONFIG, Budget(2, "grid"))
    torch.testing.assert_close(given["q"], want, rtol=2e-3, atol=2e-3)
    assert torch.equal(given["k"], same["k"])


@pytest.mark.parametrize("flat", [False, True])
def test_bad_lengths_and_pages_write_nothing(flat: bool) -> None:
    """The reference skips them too; nothing else may change."""
    case = replace(BASE, flat=flat)
    given, same = inputs(case), inputs(case)
    for tensors in (given, same):
        tensors["kv_lens"][:] = torch.tensor([1 << 30, -7, 0, 2000, 33, 5, 16])
        table = tensors["page_table"]
        table[..., :2] = torch.tensor([-1, 1 << 30])
        if flat:
            tensors["page_indptr"][2:] = torch.tensor([-4, 1 << 30, 2, 5, 1, 1 << 30])
    out = torch.full(given["q"].shape, torch.nan).half()
    want = torch.full_like(out, torch.nan)
    reference.qk_norm_rope_append(**same, out=want)
    launch(given | {"out": out}, CONFIG, Budget(2, "grid"))
    for name in ("k_cache", "v_cache"):
        assert torch.equal(given[name].isnan(), same[name].isnan())


def test_e4m3_by_hand_is_torchs() -> None:
    """Every half-way case, both ends, zeros, infinities and NaN."""
    every = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.float16)
    every = every.float()
    tokens = every.numel() // 64
    case = Case(((tokens, tokens),), q_heads=0, kv_heads=1, cache_dtype=FP8, page_size=256)
    given = inputs(case)
    given["k"] = every.half().view(tokens, 1, 64)
    launch(given, AppendConfig(16), Budget(1, "grid"))
    pages = given["page_table"][0, : tokens // 256].long()
    got = given["k_cache"].view(torch.uint8)[pages].flatten()
    want = every.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    number = ~every.isnan()
    assert torch.equal(got[number], want[number])
    assert ((got[~number] & 0x7F) == 0x7F).all()
