"""The append kernel under compute-sanitizer, which runs `python -m tests.gpu.append_sanitizer`.

Torch's caching allocator is off there, so that rows, caches and tables have bounds of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.gpu.sanitizer import FOUND


def run_cases() -> None:
    """Small steps of every kind; then tables, lengths, ranges and positions of garbage."""
    from dataclasses import replace

    import torch

    import smkern
    from smkern.ops.rope import Rope
    from tests.gpu.append_support import plain_options, run, run_plain
    from tests.ops.append_cases import FP8, Case, make

    base = Case(((3, 40), (0, 5), (9, 9), (1, 1)), rope=Rope(64), norm=True)
    cases = [
        base, replace(base, cache_dtype=FP8, heads_first=True, flat=True),
        replace(base, head_dim=96, rope=Rope(48), page_size=1),
        replace(base, rope=Rope(32, interleaved=True), requests=((1, 7), (1, 30))),
    ]  # fmt: skip
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
    print(f"{len(cases)} cases have the right values")


def sanitized(sanitizer: str, tool: str, timeout_s: int) -> tuple[int | None, str]:
    """Exit status (None: out of time) and output of the cases under one tool."""
    command = [
        sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "5",
        # cuda-bindings asks for functions of newer drivers: failed look-ups are no memory errors
        "--report-api-errors", "no", sys.executable, "-m", "tests.gpu.append_sanitizer",
    ]  # fmt: skip
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired as late:
        return None, str(late.stdout or "")
    return done.returncode, done.stdout + done.stderr


if __name__ == "__main__":
    run_cases()
