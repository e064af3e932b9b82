"""Run small operators over rows under compute-sanitizer; exit 0 when clean, the planted one caught.

python -m tests.gpu.rows_sanitizer [--tools memcheck,racecheck]
"""

from __future__ import annotations

import click

from tests.gpu.sanitizing import command_of

MODULE = "tests.gpu.rows_sanitizer"
WIDTHS = (8, 261, 5120)


def run_kernel(kernel: str) -> None:
    """Every operator, whole rows and not, in place, ids of garbage among those of embeddings."""
    from tests.gpu.rows_support import OPERATORS, make, run

    for op in OPERATORS:
        for width in WIDTHS:
            for pad in (0, 3):
                run(make(op, 5, width, pad=pad), num_sms=3)
                run(make(op, 5, width, pad=pad))
        if "norm" in op:
            call = make(op, 5, 4096)
            run(call._replace(out=call.x))
    click.echo(f"{kernel}: {len(OPERATORS)} operators have the right values")


if __name__ == "__main__":
    command_of(MODULE, run_kernel, "triton")()
