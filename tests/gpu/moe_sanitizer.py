"""Run the experts' operators under compute-sanitizer; exit 0 when clean, the planted one caught.

python -m tests.gpu.moe_sanitizer [--tools memcheck,racecheck]
"""

from __future__ import annotations

import click
import torch

from tests.gpu.sanitizing import command_of

MODULE = "tests.gpu.moe_sanitizer"


def run_kernel(kernel: str) -> None:
    """A layer of few tokens and of many, choices and offsets of garbage, rows that are apart."""
    import smkern
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
    click.echo(f"{kernel}: the experts' operators have the right values")


if __name__ == "__main__":
    command_of(MODULE, run_kernel, "triton")()
