"""Run small GEMMs with SwiGLU under compute-sanitizer; exit 0 when clean, the planted fault caught.

python -m tests.gpu.swiglu_sanitizer [--tools memcheck,racecheck] [--kernels ws,tma,pointer]
"""

from __future__ import annotations

import click

from tests.gpu.sanitizing import command_of

MODULE = "tests.gpu.swiglu_sanitizer"


def run_kernel(kernel: str) -> None:
    """The cases of one kernel: whole and split K, swapped, odd widths, ragged, unfused."""
    import smkern
    from smkern.tuning.config import STREAM_K, Budget, GemmConfig
    from tests.gpu.swiglu_support import Case, check, operands, run_config

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
    click.echo(f"{kernel}: {len(cases)} cases have the right values")


if __name__ == "__main__":
    command_of(MODULE, run_kernel, "ws,tma,pointer")()
