"""CUTLASS's GEMMs of e4m3: values against float64, Gluon's bits, places, overlap."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import smkern
from smkern.kernels.cute.compile import absent, compile_many, is_there
from smkern.kernels.fp8.gemm_compile import variant_of
from smkern.models import SamplingParams, preset
from smkern.ops.fp8.dispatch import fp8_dispatcher
from smkern.profile import load_profile
from smkern.server.model import EngineOptions, open_runtime
from smkern.tuning import fp8, fp8_cutlass
from smkern.tuning.config import Budget, Epilogue, GemmConfig
from smkern.tuning.fp8 import ScaledProblem
from tests.gpu.fp8_support import KINDS, Case, Operands, check, operands, run_config
from tests.gpu.gemm_support import Holder, check_chain

pytestmark = pytest.mark.skipif(not is_there(), reason=f"no cubins, and {absent()}")

CONFIGS = [
    config
    for config in fp8_cutlass.variants((9, 0))
    if (config.block_n, config.ctas_per_sm) in {(48, 1), (80, 2), (128, 2), (176, 1), (256, 1)}
]
FULL = Epilogue(True, True, "silu")
EPILOGUES = [Epilogue(), Epilogue(bias=True), Epilogue(residual=True, activation="gelu"), FULL]
RAGGED = [
    (1, 8, 128), (7, 264, 1024), (16, 512, 4096), (33, 4096, 128), (64, 1032, 2048),
    (77, 776, 640), (129, 136, 4096), (300, 520, 384), (257, 2056, 1408),
]  # fmt: skip
CHAINED = ScaledProblem(64, 1024, 1024, "bf16", scales="row")
"""What the test of a chain asks `smkern.gemm` for."""


def wanted():
    """Every variant here: what is to be compiled where the tests run elsewhere."""
    for scales in ("block", "row"):
        base = ScaledProblem(64, 256, 512, scales=scales)
        for config in CONFIGS:
            for epilogue in EPILOGUES:
                yield variant_of(replace(base, epilogue=epilogue), config, 90)
            yield variant_of(replace(base, out_dtype="fp16"), config, 90)
    for scales, num_sms in (("row", 16), ("row", 116), ("block", 16)):
        asked = replace(CHAINED, scales=scales, kernel="cutlass")
        chosen = fp8.choose(asked, Budget(num_sms, "mask", True), load_profile())
        yield variant_of(asked, chosen, 90)


@pytest.fixture(scope="module", autouse=True)
def _compiled(cutlass_is_there) -> None:
    compile_many(wanted(), workers=8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("epilogue", EPILOGUES, ids=lambda epilogue: epilogue.key)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_values(config, epilogue, kind):
    for size in ((64, 1024, 1152), (50, 520, 4096), (300, 776, 1024)):
        case = Case(*size, kind, epilogue=epilogue)
        for num_sms in (5, 132):
            x = operands(case)
            run_config(case, x, config, Budget(num_sms, "grid"))
            assert check(case, x) < 0.0025


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", RAGGED, ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_ragged_sizes(config, size, kind):
    for seed, dtype in ((0, "bf16"), (1, "fp16")):
        case = Case(*size, kind, dtype)
        x = operands(case, seed)
        run_config(case, x, config, Budget(7, "grid"))
        check(case, x)


@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_those_of_gluon(kind):
    """Both promote after every 128 products, in order, and scale alike."""
    case, found = Case(64, 1032, 4096, kind), []
    for config in (*CONFIGS, GemmConfig("ws", 64, 128, 64, 4, 4, ctas_per_sm=1, eager=True)):
        x = operands(case, seed=3)
        run_config(case, x, config, Budget(24, "grid"))
        found.append(x.out)
    assert all(torch.equal(x, found[-1]) for x in found)


@pytest.mark.parametrize("kind", ["row", "block"])
def test_nothing_waits_for_sms_of_the_other_partition(ladder, kind):
    case, split, holder = Case(64, 8192, 1024, kind), ladder.split(decode=16), Holder()
    for mine, other in ((split.decode, split.prefill), (split.prefill, split.decode)):
        x = operands(case)

        def run(x: Operands = x, mine: Any = mine) -> None:
            with torch.cuda.stream(mine.stream):
                run_config(case, x, CONFIGS[2], Budget(mine.num_sms, "mask"), checked=False)

        holder.check_inside(mine, other, run, x.out)
        check(case, x)


def test_launches_that_overlap_read_what_the_one_before_wrote(ladder):
    """A chain in a graph in a partition, each from the last one's output, against one by one."""
    m, n, split = CHAINED.m, CHAINED.n, ladder.split(decode=16)
    made = [smkern.quantize(torch.randn(n, n, device="cuda").bfloat16(), "token") for _ in range(8)]
    a = torch.randn(m, n, device="cuda").bfloat16()
    rooms = [torch.empty_like(a) for _ in made]
    torch.cuda.synchronize()

    def chain(synchronize: bool) -> torch.Tensor:
        x = a
        for (w, w_scale), out in zip(made, rooms, strict=True):
            given, scale = smkern.quantize(x, "token")
            x = smkern.gemm(
                given, w, a_scale=scale, w_scale=w_scale, out=out, backend="cutlass",
                static_weights=True,
            )  # fmt: skip
            if synchronize:
                torch.cuda.synchronize()
        return x

    check_chain(split, chain, rooms)


@pytest.mark.parametrize("kind", ["row", "block"])
def test_dispatch_takes_them_where_they_are_asked_for(kind):
    case = Case(64, 1024, 1024, kind)
    problem = replace(CHAINED, scales=kind, kernel="cutlass")
    assert fp8_dispatcher(0).select(problem, Budget(16, "mask", True)).kernel == "cutlass"
    x = operands(case)
    run_config(case, x, CONFIGS[2], Budget(16, "grid"))
    check(case, x)


def test_a_model_is_served_with_them():
    """Prompts of few and of many rows on 52 SMs, where gate and up of many have a kernel of ours,
    beside decode steps on the others."""
    fp8_dispatcher(0)._choices.clear()  # made where tests hide the extra
    options = EngineOptions(
        preset("qwen3-8b").replace(num_layers=2, vocab_size=8192), policy="static_split:80",
        rungs=(80,), max_running=32, max_prefill=4, max_tokens=1024, max_context=1024,
        num_pages=4000, quantization="fp8-block",
    )  # fmt: skip
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    with open_runtime(options) as (mux, _):
        handles = [mux.submit([7] * rows, params) for rows in range(17, 513, 16)]
        for output in mux.run():
            assert output.error is None
        places = {span.place.num_sms for span in mux.timeline.trace().spans}
    assert {52, 80} <= places
    assert all(len(handle.tokens) == 24 for handle in handles)
    chosen = fp8_dispatcher(0)._choices.values()
    assert any(getattr(choice, "kernel", "") == "cutlass" for choice in chosen)
