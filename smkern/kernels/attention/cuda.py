"""Launches of the CUDA attention kernels of `csrc/`: variant, grid, parameters."""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import log2
from typing import Any

from smkern.errors import ArgumentError
from smkern.kernels.aot import KernelSet
from smkern.kernels.attention.args import (
    NUM_ADDRESSES,
    AttentionArguments,
    Bind,
    Launch,
    WorkspaceLayout,
)
from smkern.kernels.attention.items import PlanLayout
from smkern.kernels.attention.maps import OperandMaps, tile_keys
from smkern.kernels.compile import Artifact
from smkern.kernels.cuda_source import compile_cuda
from smkern.kernels.driver import check, launcher, may_overlap
from smkern.tuning.attention.constraints import (
    CUDA_CAPABILITY,
    CUDA_TEAM_THREADS,
    NARROW_ROWS,
    cache_bytes,
    cuda_team_bytes,
    most_teams,
)
from smkern.tuning.attention.shapes import (
    PREFILL_ROWS,
    AttentionConfig,
    AttentionProblem,
    AttentionShape,
    Budget,
)
from smkern.tuning.constraints import shared_limit

PlanLaunch = Callable[[int, int, int, int, int], None]
"""launch(kv_lens, cu_q_lens or 0, plan, workspace, stream): addresses."""

MAX_BATCH = 16_384
"""The most requests of a plan: starts of their row blocks are in shared memory."""
PLAN_STATIC_BYTES = 42_400
"""Other shared memory of the plan's kernel, bytes: sizeof(Shared) of csrc/attention_plan.cu."""
MIN_BOX = 16
"""Page size from which TMA gathers prefill's keys; threads copy smaller pages."""
ROW_UNIT = 32
"""Unit of cache strides, bytes: 2**32 of them cover 128 GiB."""
_PLAN_THREADS = 1024
_PREFILL_THREADS = 384
_PARAMS, _ADDRESSES = struct.Struct("12Q 6q 4q 2I 12i 4f"), struct.Struct("12Q")
_ADDRESS, _SCALES = struct.Struct("Q"), struct.Struct("Q 2q")
"""What follows `_PARAMS` where the output has scales: their address and steps."""


@dataclass(frozen=True, slots=True, order=True)
class CudaVariant:
    """One compiled attention kernel: "attention_decode" or "attention_prefill" (mixed too)."""

    kernel: str
    head_dim: int
    fp16: bool
    fp8_cache: bool
    softcap: bool
    rows8: int
    teams: int
    tma: bool
    capability: int
    scaled: bool = False
    rows4: bool = False
    brief: bool = False

    @property
    def defines(self) -> tuple[str, ...]:
        sizes = {"HEAD_DIM": self.head_dim, "FP16": self.fp16, "KV8": self.fp8_cache,
                 "SOFTCAP": self.softcap, "ROWS8": self.rows8, "TEAMS": self.teams,
                 "TMA": self.tma, "OUT8": self.scaled, "ROWS4": self.rows4,
                 "BRIEF": self.brief}  # fmt: skip
        return tuple(f"{name}={int(value)}" for name, value in sizes.items())

    @property
    def threads(self) -> int:
        decode = self.kernel == "attention_decode"
        return CUDA_TEAM_THREADS * self.teams if decode else _PREFILL_THREADS

    def compile(self) -> Artifact:
        """Compile it (or take it from the disk cache). Needs no GPU."""
        cubin = compile_cuda(f"{self.kernel}.cu", self.defines, _arch(self.capability))
        return Artifact(self.kernel, cubin, self.threads, shared_limit(CUDA_CAPABILITY), (), ())


@dataclass(frozen=True, slots=True)
class PlanVariant:
    """The kernel that makes plans."""

    capability: int

    def compile(self) -> Artifact:
        """Compile it (or take it from the disk cache). Needs no GPU."""
        cubin = compile_cuda("attention_plan.cu", (), _arch(self.capability))
        shared = 4 * most_requests(self.capability) + 64
        return Artifact("attention_plan", cubin, _PLAN_THREADS, shared, (), ())


def most_requests(capability: int) -> int:
    """The most requests of a plan: fewer where a CTA has less shared memory (sm_86, sm_89)."""
    left = shared_limit(divmod(capability, 10)) - PLAN_STATIC_BYTES - 64
    return min(MAX_BATCH, left // 4)


def prefill_bytes(head_dim: int, fp8_cache: bool) -> int:
    """Shared memory of the prefill path: kSharedBytes of csrc/attention_prefill_gather.cuh."""
    queries = (1 if head_dim == 256 else 2) * PREFILL_ROWS * head_dim
    tile = tile_keys(head_dim) * head_dim
    return 1024 + 2 * (queries + 2 * 2 * tile) + 2 * tile * fp8_cache + 320


def variant_of(problem: AttentionProblem, config: AttentionConfig, capability: int) -> CudaVariant:
    """The kernel variant that runs `problem` by `config`."""
    shape = problem.shape
    prefill = shape.has_prefill
    variant = CudaVariant(
        kernel="attention_prefill" if prefill else "attention_decode",
        head_dim=shape.head_dim,
        fp16=problem.dtype == "fp16",
        fp8_cache=problem.cache_dtype == "fp8",
        softcap=problem.softcap,
        rows8=-(-shape.decode_rows // 8),
        teams=3 if prefill else config.teams,
        tma=prefill and shape.page_size >= MIN_BOX,
        capability=capability,
        scaled=problem.scaled,
        rows4=shape.decode_rows <= NARROW_ROWS,
        brief=not shape.has_decode,
    )
    most = most_teams(shape.head_dim, cache_bytes(problem), shape.decode_rows)
    return replace(variant, teams=max(1, min(variant.teams, most)))


def shared_bytes(variant: CudaVariant, rows: int) -> int:
    """Dynamic shared memory of a launch with `rows` packed rows per decode item."""
    size = 1 if variant.fp8_cache else 2
    decode = variant.teams * cuda_team_bytes(variant.head_dim, size, rows, variant.teams)
    if variant.kernel == "attention_decode":
        return decode
    return max(decode, prefill_bytes(variant.head_dim, variant.fp8_cache))


def violations(args: AttentionArguments, problem: AttentionProblem) -> tuple[str, ...]:
    """Reasons why the CUDA kernels cannot take these addresses and strides; empty if they can.

    They need equal strides of K and V, strides of pages and tokens in multiples of 32 bytes and of
    heads in multiples of 16, a cache within 128 GiB, 16-byte aligned rows of q and out, and nothing
    expanded (a stride of 0).
    """
    size = cache_bytes(problem)
    page, token, head = (size * stride for stride in args.k_strides)
    found = []
    if args.k_strides != args.v_strides:
        found.append(f"K strides {args.k_strides} and V strides {args.v_strides} differ")
    if page % ROW_UNIT or token % ROW_UNIT or head % 16 or (args.k | args.v) % 16:
        found.append("pages or tokens of the cache are not 32 bytes aligned")
    if args.num_pages * page >= ROW_UNIT << 32:
        found.append(f"the cache spans {args.num_pages * page} bytes, over 128 GiB")
    if min(*args.k_strides, *args.v_strides, *args.q_strides) <= 0:
        found.append("q or the cache is expanded: a stride is 0")
    if any(2 * stride % 16 for stride in args.q_strides) or args.q % 16:
        found.append("rows of q are not 16 bytes aligned")
    out_bytes = 1 if problem.scaled else 2
    if any(out_bytes * stride % 16 for stride in args.out_strides) or args.out % 16:
        found.append("rows of out are not 16 bytes aligned")
    return tuple(found)


def params_of(problem: AttentionProblem, args: AttentionArguments) -> bytes:
    """`AttentionParams` of csrc/attention.cuh; addresses come first, an output's scales last."""
    shape, size = problem.shape, cache_bytes(problem)
    workspace, plan = WorkspaceLayout.of(shape), PlanLayout.of(shape)
    page, token, head = args.k_strides
    k_scale = args.k_scale if problem.cache_dtype == "fp8" else 1.0
    packed = _PARAMS.pack(
        *args.addresses, *args.q_strides, *args.out_strides, args.table_stride, size * head,
        workspace.decode_out, workspace.decode_stats, workspace.prefill_out,
        workspace.prefill_stats, size * page // ROW_UNIT, size * token // ROW_UNIT,
        args.table_len, args.num_pages, args.num_tokens, shape.num_kv_heads, shape.group,
        int(log2(shape.page_size)), int(shape.causal), shape.window, shape.decode_rows,
        plan.decode_at, plan.prefill_at, -(-65_536 // shape.group),
        args.scale * k_scale * 1.4426950408889634, args.softcap, args.k_scale, args.v_scale,
    )  # fmt: skip
    return packed + _SCALES.pack(0, *args.scale_steps) if problem.scaled else packed


def _arch(capability: int) -> str:
    return f"sm_{capability}" + ("a" if capability >= 90 else "")


def prepare_cuda(
    problem: AttentionProblem, config: AttentionConfig, budget: Budget, capability: int,
    kernels: KernelSet,
) -> Bind:  # fmt: skip
    """Returns bind(sizes) for a problem's launches; loads its kernel if new."""
    variant = variant_of(problem, config, capability)
    function = kernels.load(variant, variant.compile).function
    grid, shared = budget.num_sms, shared_bytes(variant, problem.shape.decode_rows)
    overlap = may_overlap(config.overlap, budget, capability)
    run = launcher(function, grid, variant.threads, shared, overlap=overlap)
    maps, lock = OperandMaps(problem), threading.Lock()
    uses_maps, scaled, pack = variant.tma, variant.scaled, _ADDRESSES.pack_into

    def bind(sizes: tuple[Any, ...]) -> Launch:
        args = AttentionArguments.of([0] * NUM_ADDRESSES, sizes)
        packed = params_of(problem, args)
        params = ctypes.create_string_buffer(packed, len(packed))
        pointers = (ctypes.c_void_p * 2)(ctypes.addressof(params), maps.address)

        def launch(
            stream: int, q: int, k: int, v: int, out: int, lse: int, table: int, indptr: int,
            sinks: int, k_scale: int, v_scale: int, plan: int, workspace: int,
            kv_lens: int = 0, cu_q_lens: int = 0, scratch: int = 0, out_scale: int = 0,
        ) -> None:  # fmt: skip
            with lock:
                pack(params, 0, q, k, v, out, lse, table, indptr, sinks, k_scale, v_scale,
                     plan, workspace)  # fmt: skip
                if scaled:
                    _ADDRESS.pack_into(params, _PARAMS.size, out_scale)
                if uses_maps:
                    maps.point(args, q, k, v)
                code = run(stream, pointers)
            if code:
                check(code, f"launching {grid} CTAs of {variant}")

        return launch

    return bind


def prepare_plan(
    shape: AttentionShape, budget: Budget, capability: int, kernels: KernelSet
) -> PlanLaunch:
    """The launch, of one CTA, that makes a plan of `shape` for `budget`.

    Raises:
        ArgumentError: the batch has more requests than a plan can hold.
    """
    most = most_requests(capability)
    if shape.batch > most:
        raise ArgumentError(
            f"a plan of {shape.batch} requests: at most {most} fit the shared memory of sm_"
            f"{capability}; split the batch"
        )
    variant = PlanVariant(capability)
    function = kernels.load(variant, variant.compile).function
    layout, shared = PlanLayout.of(shape), 4 * (shape.batch + 1)
    overlap = may_overlap(True, budget, capability)
    run = launcher(function, 1, _PLAN_THREADS, shared, overlap=overlap)
    lock = threading.Lock()
    numbers = (
        shape.batch, shape.group, shape.num_kv_heads, shape.max_q_len, shape.max_kv_len,
        shape.max_tokens, int(shape.causal), shape.window, shape.decode_rows, layout.decode_at,
        layout.prefill_at, layout.max_decode_items, layout.max_prefill_items,
        layout.decode_slots, layout.prefill_slots, layout.num_counters, budget.num_sms,
    )  # fmt: skip
    packing = struct.Struct("4Q 17i 4x")

    def launch(kv_lens: int, cu_q_lens: int, plan: int, workspace: int, stream: int) -> None:
        packed = packing.pack(kv_lens, cu_q_lens, plan, workspace, *numbers)
        params = ctypes.create_string_buffer(packed, packing.size)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        with lock:
            code = run(stream, pointers)
        if code:
            check(code, f"launching the plan of {shape}")

    return launch
