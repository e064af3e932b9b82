"""Run small samplings under compute-sanitizer; exit 0 when clean and the planted fault was caught.

python -m tests.gpu.sample_sanitizer [--tools memcheck,racecheck]
"""

from __future__ import annotations

import click

from tests.gpu.sanitizing import command_of

MODULE = "tests.gpu.sample_sanitizer"


def run_kernel(kernel: str) -> None:
    """Rows of every kind, spread and flat, whole 16 bytes and not, with state, in two budgets."""
    import torch

    import smkern
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
    click.echo(f"{kernel}: all kinds of rows have the right values")


if __name__ == "__main__":
    command_of(MODULE, run_kernel, "cuda")()
