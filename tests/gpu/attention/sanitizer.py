"""Run small attention steps under compute-sanitizer; exit 0 if clean and the planted fault caught.

python -m tests.gpu.attention.sanitizer [--tools memcheck,racecheck] [--kernels cuda,triton]
"""

from __future__ import annotations

import click

from tests.gpu.sanitizing import command_of

MODULE = "tests.gpu.attention.sanitizer"


def run_kernel(kernel: str) -> None:
    """Decode, verification and a mixed step; then tables, lengths and ranges of garbage."""
    from dataclasses import replace

    import torch

    from tests.gpu.attention.cases import Case, int32, make_step
    from tests.gpu.attention.support import attend, counters_are_zero, make_plan
    from tests.gpu.attention.truth import check

    decode = Case(kv_lens=(1, 40, 600, 0), q_heads=4, kv_heads=1, head_dim=64)
    mixed = replace(decode, kv_lens=(40, 9, 600, 300), q_lens=(40, 1, 8, 30))
    cases = [
        decode, replace(decode, fp8=True, layout="hnd", flat=True), replace(decode, page_size=1),
        mixed, replace(mixed, window=50, sinks=True, softcap=5.0),
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
    click.echo(f"{kernel}: {len(cases)} cases have the right values")


if __name__ == "__main__":
    command_of(MODULE, run_kernel, "cuda,triton")()
