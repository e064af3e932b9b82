"""Run small GEMMs under compute-sanitizer; exit 0 when clean and the planted fault was caught.

python -m tests.gpu.sanitizer [--tools memcheck,racecheck] [--kernels tma,ws,pointer]
"""

from __future__ import annotations

import click

from tests.gpu.sanitizing import command_of

MODULE = "tests.gpu.sanitizer"


def run_kernel(kernel: str) -> None:
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
    click.echo(f"{kernel}: {len(cases)} cases have the right values")


if __name__ == "__main__":
    command_of(MODULE, run_kernel, "tma,ws,pointer")()
