"""Run small appends under compute-sanitizer; exit 0 when clean and the planted fault was caught.

python -m tests.gpu.append_sanitizer [--tools memcheck,racecheck]
"""

from __future__ import annotations

import click

from tests.gpu.sanitizing import command_of

MODULE = "tests.gpu.append_sanitizer"


def run_kernel(kernel: str) -> None:
    """Small steps of every kind; then tables, lengths, ranges and positions of garbage."""
    from dataclasses import replace

    import torch

    import smkern
    from smkern.ops.rope import Rope
    from tests.gpu.append_support import plain_options, run, run_plain
    from tests.ops.append_cases import FP8, Case, make

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
    click.echo(f"{kernel}: {len(cases)} cases have the right values")


if __name__ == "__main__":
    command_of(MODULE, run_kernel, "triton")()
