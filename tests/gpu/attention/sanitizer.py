"""Run small attention steps under compute-sanitizer; exit 0 if clean and the planted fault caught.

    python -m tests.gpu.attention.sanitizer [--tools memcheck,racecheck] [--kernels cuda,triton]

As tests/gpu/sanitizer.py does it for GEMMs: a process for each (tool, kernel), torch's caching
allocator off, so that pages, tables, plans and workspaces have bounds of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import click

from tests.gpu.sanitizer import FOUND, find_sanitizer, run_planted, verdict


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


def sanitized(sanitizer: str, tool: str, case: str, timeout_s: int) -> tuple[int | None, str]:
    """Exit status (None: out of time) and output of one case under one tool."""
    command = [
        sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "5",
        # cuda-bindings asks for functions of newer drivers: failed look-ups are no memory errors
        "--report-api-errors", "no",
        sys.executable, "-m", "tests.gpu.attention.sanitizer", "--inside", case,
    ]  # fmt: skip
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as late:
        return None, str(late.stdout or "")
    return done.returncode, done.stdout + done.stderr


@click.command()
@click.option("--tools", default="memcheck,racecheck", help="Tools of compute-sanitizer.")
@click.option("--kernels", default="cuda,triton", help="Kernels to check.")
@click.option("--timeout-s", default=150, help="Seconds for one tool on one kernel.")
@click.option("--inside", default=None, help="Run one case in this process (for the tool).")
def main(tools: str, kernels: str, timeout_s: int, inside: str | None) -> None:
    """Check the attention kernels with compute-sanitizer."""
    if inside:
        run_planted() if inside == "planted" else run_kernel(inside)
        return
    sanitizer = find_sanitizer()
    if sanitizer is None:
        raise click.ClickException("no compute-sanitizer here: install the CUDA toolkit's")
    click.echo(sanitizer)
    good = True
    for tool in tools.split(","):
        for case in ["planted"] * (tool == "memcheck") + kernels.split(","):
            started = time.perf_counter()
            status, output = sanitized(sanitizer, tool, case, timeout_s)
            fine, words = verdict(tool, case, status, output)
            good &= fine
            click.echo(f"{tool:10} {case:8} {words} ({time.perf_counter() - started:.0f} s)")
            if not fine:
                click.echo(output[-3000:])
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
