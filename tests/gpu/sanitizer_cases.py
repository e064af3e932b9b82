"""What compute-sanitizer looks at: small calls of every kernel, their values checked.

Inputs hold garbage too, where a kernel must not follow it: tables, lengths, ranges, positions, ids.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

import smkern
from smkern.kernels.cute.compile import is_there


def gemm(kernel: str) -> None:
    """The cases of one kernel: whole and split K, swapped, ragged, with an epilogue."""
    from smkern.tuning.config import STREAM_K, Budget, Epilogue, GemmConfig
    from tests.gpu.gemm_support import Case, check, operands, run_config

    tile = {"tma": (64, 64, 64, 4, 3), "pointer": (64, 64, 64, 4, 3), "ws": (128, 128, 64, 8, 3)}
    full = Epilogue(True, True, "silu")
    cases = [
        (GemmConfig(kernel, *tile[kernel]), Case(130, 264, 200)),
        (GemmConfig(kernel, *tile[kernel], split=2), Case(70, 136, 520, epilogue=full)),
        (GemmConfig(kernel, *tile[kernel], split=STREAM_K), Case(300, 264, 520)),
    ]
    if kernel == "pointer":
        cases.append((GemmConfig(kernel, *tile[kernel]), Case(65, 77, 129, padding=1)))
    else:
        swapped = GemmConfig(kernel, 16, 128, 64, 4, 3, swap=True, split=3)
        cases.append((swapped, Case(7, 264, 1032, epilogue=full)))
    for config, case in cases:
        x = operands(case)
        for budget in (Budget(7, "grid"), Budget(16, "grid")):
            run_config(case, x, config, budget)
        check(case, x.on_host())


def fp8_cutlass() -> None:
    """Scales in fours and apart, steps that are left, ragged rows and columns, an epilogue."""
    from smkern.tuning.config import Budget
    from tests.gpu.fp8_support import Case, check, operands, run_config
    from tests.gpu.test_fp8_cutlass import CONFIGS, FULL

    for config in CONFIGS:
        for seed, kind in enumerate(("block", "block", "row", "tensor")):
            for case in (Case(70, 264, 1152, kind), Case(33, 136, 640, kind, epilogue=FULL)):
                x = operands(case, seed)
                run_config(case, x, config, Budget(3, "grid"))
                check(case, x)


def cutlass() -> None:
    """Both orientations, a ragged product with an epilogue, SwiGLU."""
    from smkern.tuning.config import Budget, Epilogue
    from tests.gpu import swiglu_support
    from tests.gpu.gemm_support import Case, check, operands, run_config
    from tests.gpu.test_cutlass import CONFIGS, GLU

    full = Epilogue(True, True, "silu")
    for config in CONFIGS:
        for case in (Case(130, 264, 200), Case(70, 136, 520, epilogue=full)):
            x = operands(case)
            run_config(case, x, config, Budget(7, "grid"))
            check(case, x.on_host())
    for config in GLU:
        case = swiglu_support.Case(77, 136, 200)
        x = swiglu_support.operands(case)
        run_config(case, x, config, Budget(7, "grid"))
        swiglu_support.check(case, x.on_host())


def swiglu(kernel: str) -> None:
    """The cases of one kernel: whole and split K, swapped, odd widths, ragged, unfused."""
    from smkern.tuning.config import STREAM_K, Budget, GemmConfig
    from tests.gpu.gemm_support import run_config
    from tests.gpu.swiglu_support import Case, check, operands

    tile = (64, 64, 64, 4, 3) if kernel != "ws" else (128, 192, 64, 8, 3)
    cases = [
        (GemmConfig(kernel, *tile), Case(130, 136, 200)),
        (GemmConfig(kernel, *tile, split=STREAM_K), Case(300, 136, 520)),
    ]
    if kernel == "pointer":
        cases.append((GemmConfig(kernel, *tile), Case(65, 77, 129, spacing=1)))
    else:
        swapped = GemmConfig(kernel, 16, 128, 64, 4, 3, swap=True, split=3)
        cases.append((swapped, Case(7, 136, 1032)))
    for config, case in cases:
        x = operands(case)
        for budget in (Budget(7, "grid"), Budget(16, "grid")):
            run_config(case, x, config, budget)
        check(case, x.on_host())
    case = Case(7, 136, 1032)
    x = operands(case)
    smkern.gemm_swiglu(x.a, x.w, out=x.out, backend="unfused")
    check(case, x.on_host(), unfused=True)


def attention(kernel: str) -> None:
    """Decode, verification and a mixed step; then tables, lengths and ranges of garbage."""
    from tests.gpu.attention.cases import Case, int32, make_step
    from tests.gpu.attention.support import attend, counters_are_zero, make_plan
    from tests.gpu.attention.test_e4m3 import scaled_attention
    from tests.gpu.attention.truth import check

    decode = Case(kv_lens=(1, 40, 600, 0), q_heads=4, kv_heads=1, head_dim=64)
    mixed = replace(decode, kv_lens=(40, 9, 600, 300), q_lens=(40, 1, 8, 30))
    cases = [
        decode, replace(decode, fp8=True, layout="hnd", flat=True), replace(decode, page_size=1),
        mixed, replace(mixed, window=50, sinks=True, softcap=5.0),
        replace(decode, kv_lens=(1, 40, 2600, 0), q_heads=20), replace(mixed, q_heads=20),
        replace(decode, kv_lens=(1, 17_000, 600, 0)),
        replace(decode, kv_lens=(1, 40, 2600, 0), q_heads=8),  # warps add to each other's sums
    ]  # fmt: skip
    for case in cases:
        step = make_step(case, 1)
        for num_sms in (7, None):
            plan = make_plan(step, num_sms=num_sms)
            attend(step, plan=plan, num_sms=num_sms, backend=kernel)
            torch.cuda.synchronize()
            assert counters_are_zero(plan)
        attend(step, backend=kernel)
        check(step.on_host())
        scaled_attention(step, backend=kernel)
    for case in (mixed, replace(mixed, flat=True)):
        step = make_step(case, 1)
        step.page_table.copy_(int32([-1, 2**31 - 1, 5]).repeat(step.page_table.numel())
                              [: step.page_table.numel()].view_as(step.page_table))  # fmt: skip
        step.kv_lens.copy_(int32([2**31 - 1, -1, 700, 31]))
        if step.page_indptr is not None:
            step.page_indptr.copy_(int32([-9, 2**31 - 1, 3, 2, 10**6]))
        attend(step, backend=kernel)
        step.cu_q_lens.copy_(int32([-5, 30, 2, 10**6, 3]))
        attend(step, backend=kernel)
        torch.cuda.synchronize()


def append() -> None:
    """Small steps of every kind; then tables, lengths, ranges and positions of garbage."""
    from smkern.rope import Rope
    from tests.gpu.append_support import run, run_plain
    from tests.ops.append_cases import FP8, Case, make, plain_options

    base = Case(((3, 40), (0, 5), (9, 9), (1, 1)), rope=Rope(64), norm=True)
    cases = [
        base,
        replace(base, cache_dtype=FP8, heads_first=True, flat=True),
        replace(base, head_dim=96, rope=Rope(48), page_size=1),
        replace(base, rope=Rope(32, interleaved=True), requests=((1, 7), (1, 30))),
    ]
    for case in cases:
        for num_sms in (3, None):
            run(case, num_sms=num_sms)
            run_plain(case, num_sms=num_sms)
    junk = [-1, 2**31 - 1, 5, 10**6, 0]
    for case in (base, replace(base, flat=True)):
        args, options = make(case, "cuda")
        for x in (args[5], args[6], options["cu_q_lens"], options.get("page_indptr")):
            if x is not None:
                x.view(-1).copy_(torch.tensor(junk * x.numel(), dtype=torch.int32)[: x.numel()])
        where = torch.tensor([-(2**40), 2**40, 7] * case.tokens, device="cuda")[: case.tokens]
        smkern.qk_norm_rope_append(*args, **options, positions=where)
        smkern.append_kv(*args[1:], **plain_options(options))
        torch.cuda.synchronize()


def experts() -> None:
    """A layer of few tokens and of many, choices and offsets of garbage, rows that are apart."""
    from tests.gpu.moe_support import BF16, Experts, permuted, routed

    for tokens, experts, top_k, hidden in ((3, 8, 2, 264), (5, 128, 8, 261), (1100, 16, 8, 64)):
        x = torch.randn(tokens, hidden, device="cuda").to(BF16)
        logits = torch.randn(tokens, experts, device="cuda").to(BF16)
        weights, _ = smkern.topk_softmax(logits, top_k, num_sms=3)
        chosen = routed(tokens, experts, top_k)
        chosen[0, 0], chosen[1, 1] = -1, 2**31 - 1
        rows, _, index = permuted(x, chosen, experts, num_sms=3)
        index[:2] = torch.tensor([2**31 - 1, -(2**31)])
        smkern.moe_unpermute(rows, index, weights, residual=x, num_sms=3)
    for padding in (0, 3):
        for swiglu in (False, True):
            case = Experts([3, 0, 70, 1], 72, 136, swiglu, padding=padding)
            case.run()
            garbage = torch.tensor([-5, 2**31 - 1, 3, 80, -(2**31)], device="cuda")
            smkern.grouped_gemm(case.a, case.w, garbage.int(), swiglu=swiglu, num_sms=3)


def rows() -> None:
    """Every operator, whole rows and not, in place, ids of garbage among those of embeddings."""
    from tests.gpu.rows_support import OPERATORS, make, run

    for op in OPERATORS:
        for width in (8, 261, 5120):
            for pad in (0, 3):
                run(make(op, 5, width, pad=pad), num_sms=3)
                run(make(op, 5, width, pad=pad))
        if "norm" in op:
            call = make(op, 5, 4096)
            run(call._replace(out=call.x))


def sample() -> None:
    """Rows of every kind, spread and flat, whole 16 bytes and not, with state, in two budgets."""
    from tests.ops.sample_cases import KINDS, logits_of, odd_rows, options_of, wrong_rows

    for dtype in (torch.bfloat16, torch.float32):
        for kind in KINDS:
            options, on_host = options_of(kind, 8, "cuda"), options_of(kind, 8)
            cases = [logits_of(8, vocab, dtype, s) for vocab in (7, 5000) for s in (3.0, 0.0)]
            cases.append(odd_rows(dtype, 2999))
            cases.append(logits_of(8, 2900, dtype)[:, 1:])
            for logits in cases:
                for num_sms in (3, None):
                    state = {
                        "finished": torch.zeros(8, dtype=torch.bool, device="cuda"),
                        "lengths": torch.zeros(8, dtype=torch.int32, device="cuda"),
                        "max_lengths": torch.ones(8, dtype=torch.int32, device="cuda"),
                        "stop_tokens": torch.full((8, 2), -1, dtype=torch.int32, device="cuda"),
                    }
                    got = smkern.sample(logits.cuda(), **options, **state, num_sms=num_sms)
                    wrong = wrong_rows(logits, got.cpu(), **on_host)
                    assert not wrong, (dtype, kind, wrong)
                    assert state["finished"].all()
    torch.cuda.synchronize()


def fp8_gemm(kernel: str) -> None:
    """Whole and split K, swapped, ragged, with an epilogue, scales of rows and of blocks."""
    from smkern.tuning.config import STREAM_K, Budget, Epilogue, GemmConfig
    from tests.gpu.fp8_support import Case, check, operands, run_config

    full = Epilogue(True, True, "silu")
    configs = [GemmConfig("pointer", 64, 64, 64, 8, 3)]
    if kernel == "ws":
        configs = [
            GemmConfig("ws", 128, 128, 64, 8, 3, split=STREAM_K, eager=True),
            GemmConfig("ws", 64, 64, 64, 4, 3, split=2, eager=True),
            GemmConfig("ws", 16, 128, 64, 8, 3, True, split=3, eager=True),
        ]
    for config in configs:
        for kind in ("row", "block"):
            case = Case(7 if config.swap else 130, 264, 640, kind, epilogue=full)
            x = operands(case)
            run_config(case, x, config, Budget(7, "grid"))
            check(case, x)


def fp8_rows() -> None:
    """Quantising of every kind, and what writes e4m3; whole rows and not."""
    from smkern.ops.reference import fp8

    for width, pad in ((512, 0), (640, 8), (1000, 3)):
        x = torch.randn(37, width + pad, device="cuda").bfloat16()[:, :width]
        for kind in ("tensor", "token", "block", "weight_block"):
            if "block" in kind and width % 128:
                continue
            found, wanted = smkern.quantize(x, kind, num_sms=3), fp8.quantize(x.cpu(), kind)
            assert torch.equal(found[0].cpu().float(), wanted[0].float())
        weight, scale = torch.ones(width, device="cuda").bfloat16(), torch.empty(37, device="cuda")
        smkern.add_rms_norm(x, x.clone(), weight, out_scale=scale, num_sms=3)
        smkern.silu_and_mul(x, out_scale=scale, num_sms=3)
    torch.cuda.synchronize()


CASES: dict[str, Callable[[], None]] = {
    **{f"gemm-{kernel}": partial(gemm, kernel) for kernel in ("tma", "ws", "pointer")},
    **({"cutlass": cutlass, "fp8-cutlass": fp8_cutlass} if is_there() else {}),
    **{f"swiglu-{kernel}": partial(swiglu, kernel) for kernel in ("ws", "tma", "pointer")},
    **{f"attention-{kernel}": partial(attention, kernel) for kernel in ("cuda", "triton")},
    **{f"fp8-{kernel}": partial(fp8_gemm, kernel) for kernel in ("ws", "pointer")},
    "append": append,
    "fp8-rows": fp8_rows,
    "experts": experts,
    "rows": rows,
    "sample": sample,
}
