"""Launches of the sampler, `csrc/sample.cu`: variant, grid, parameters."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass

from smkern.kernels.aot import FamilyKernels, Launch
from smkern.kernels.compile import Artifact
from smkern.kernels.cuda_source import compile_cuda
from smkern.kernels.driver import OVERLAP_FROM, check, launcher, may_overlap
from smkern.tuning.constraints import COUNTER_BYTES
from smkern.tuning.sample import (
    MAX_VOCAB,
    WARPS,
    Budget,
    Grid,
    SampleConfig,
    SampleDtype,
    SampleProblem,
    grid_of,
)

CANDIDATES = 2048
"""Tokens that fit the shared-memory search: kCandidates of csrc/sample_select.cuh."""
_PARAMS = struct.Struct("15Q 3q 8i 3f 4x")
_DTYPES = {"bf16": 0, "fp16": 1, "fp32": 2}
"""The first capability with programmatic dependent launch."""


@dataclass(frozen=True, slots=True, order=True)
class SampleVariant:
    """One compiled kernel."""

    dtype: SampleDtype
    aligned: bool
    num_warps: int
    capability: int

    @property
    def defines(self) -> tuple[str, ...]:
        pdl = self.capability >= OVERLAP_FROM
        sizes = {"DTYPE": _DTYPES[self.dtype], "ALIGNED": self.aligned,
                 "THREADS": 32 * self.num_warps, "PDL": pdl}  # fmt: skip
        return tuple(f"{name}={int(value)}" for name, value in sizes.items())

    def compile(self) -> Artifact:
        """Compile it (or take it from the disk cache). Needs no GPU."""
        arch = f"sm_{self.capability}" + ("a" if self.capability >= 90 else "")
        cubin = compile_cuda("sample.cu", self.defines, arch)
        most = shared_bytes(SampleProblem(1, MAX_VOCAB, self.dtype, self.aligned))
        return Artifact("sample", cubin, 32 * self.num_warps, most, (), ())


def shared_bytes(problem: SampleProblem) -> int:
    """Dynamic shared memory, bytes: all groups' keys or candidate tokens, then a list of groups."""
    return max(8 * CANDIDATES, 4 * problem.groups) + 2 * problem.groups


def params_packer(problem: SampleProblem, grid: Grid) -> Callable[..., bytes]:
    """Packs `SampleParams` of csrc/sample.cuh.

    Returns:
        pack(logits, temperature, top_k, top_p, min_p, seeds, steps, finished, lengths, max_lengths,
        stop_tokens, out, workspace, row_bytes, stop_stride, num_stop, pad_token, temperature,
        top_k, top_p, min_p, seed, step): addresses (0: absent), then numbers; a number named twice
        is used where its address is 0.
    """
    keys_bytes = 4 * problem.rows * problem.groups
    sizes = problem.rows, problem.vocab, problem.pieces, grid.per_row

    def pack(
        logits: int, temperature: int, top_k: int, top_p: int, min_p: int, seeds: int, steps: int,
        finished: int, lengths: int, max_lengths: int, stop_tokens: int, out: int, workspace: int,
        row_bytes: int, stop_stride: int, num_stop: int, pad_token: int, all_temperature: float,
        all_top_k: int, all_top_p: float, all_min_p: float, seed: int, step: int,
    ) -> bytes:  # fmt: skip
        keys = workspace + COUNTER_BYTES
        return _PARAMS.pack(
            logits, out, temperature, top_k, top_p, min_p, seeds, steps, finished, lengths,
            max_lengths, stop_tokens, workspace, keys, keys + keys_bytes, row_bytes, stop_stride,
            seed, *sizes, num_stop, pad_token, all_top_k, step, all_temperature, all_top_p,
            all_min_p,
        )  # fmt: skip

    return pack


def variants_of(problem: SampleProblem, capability: int) -> tuple[SampleVariant, ...]:
    """The kernels for a kind of problem: all CTA sizes, so that no budget compiles another."""
    return tuple(
        SampleVariant(problem.dtype, problem.aligned, warps, capability) for warps in WARPS
    )


class SampleKernels(FamilyKernels[SampleProblem]):
    """The sampler's kernels on one device."""

    def variants(self, problem: SampleProblem) -> tuple[SampleVariant, ...]:
        return variants_of(problem, self.capability)

    def prepare(self, problem: SampleProblem, config: SampleConfig, budget: Budget) -> Launch:
        """launch(stream, *addresses, workspace, *numbers): see `params_packer`; loads all of the
        problem's kind on first use."""
        self._load(problem)
        variant = SampleVariant(problem.dtype, problem.aligned, config.num_warps, self.capability)
        grid, lock = grid_of(problem, config, budget), threading.Lock()
        overlap = may_overlap(config.pdl, budget, self.capability)
        run = launcher(
            self._set.load(variant, variant.compile).function, grid.num_ctas,
            32 * config.num_warps, shared_bytes(problem), overlap=overlap,
        )  # fmt: skip
        pack = params_packer(problem, grid)
        buffer = ctypes.create_string_buffer(_PARAMS.size)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(buffer))

        def launch(stream: int, *values: int | float) -> None:
            with lock:
                ctypes.memmove(buffer, pack(*values), _PARAMS.size)
                code = run(stream, pointers)
            if code:
                check(code, f"launching {grid.num_ctas} CTAs of {variant}")

        return launch
