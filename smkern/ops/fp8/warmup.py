"""The part of a warmup that is on e4m3: products with scales, and rows that become e4m3."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch

from smkern.errors import ArgumentError
from smkern.ops import checks
from smkern.ops.annotated import check_fields
from smkern.ops.bounded_cache import librarys_rows, steps_to
from smkern.ops.checks import FP8, FP8_BLOCK
from smkern.ops.fp8.call import ScaledGrouped
from smkern.ops.fp8.dispatch import ScaledDispatcher, fp8_dispatcher
from smkern.ops.fp8.grouped import SCALED_GROUPED
from smkern.ops.fp8.permute import SCALED_PERMUTE, ScaledPermute
from smkern.ops.fp8.quantize import QUANTIZE, QUANTIZE_BY, Quantize, QuantizeBy
from smkern.ops.fp8.rows import (
    SCALED_ADD_RMS_NORM,
    SCALED_RMS_NORM,
    SCALED_SILU_AND_MUL,
    ScaledAddRmsNorm,
    ScaledRmsNorm,
    ScaledSiluAndMul,
)
from smkern.ops.gemm.warmup import epilogue_from, residual_pointers
from smkern.ops.operator import Operator
from smkern.ops.operator_dispatch import Compile
from smkern.ops.operator_eager import workspaces_of
from smkern.ops.operator_warmup import joined, work_of_calls
from smkern.ops.streams import runtime_streams
from smkern.ops.warming import Target, Work, check_shapes, room
from smkern.tuning import constraints, fp8
from smkern.tuning.config import Budget, Epilogue, GemmConfig
from smkern.tuning.fp8 import ScaledProblem, Scales

Choice = tuple[ScaledProblem, GemmConfig, Budget]


@dataclass(frozen=True, slots=True)
class Fp8Calls:
    """Calls on e4m3 to come, for `smkern.warmup`: what a model fixes; tokens are free.

    Args:
        shapes: (N, K) of the weights of `gemm`.
        epilogues: What `gemm` does to products: "none", "bias", "residual", ...
        swiglu: (I, K) of the weights of `gemm_swiglu`; its `silu_and_mul` is `smkern.RowsCalls`'.
        quantized_swiglu: The same with `out_scale`; nothing else is needed for it.
        experts: (experts, n, k, swiglu) of `grouped_gemm`.
        permuted: (hidden, experts, top_k) of `moe_permute` with `out_scale`.
        blocks: Whether scales are of 1 x 128 by 128 x 128; otherwise they are of rows or matrices.
        max_m: Largest M of a product.
        batch_invariant: `batch_invariant` of products: False, True or both.
        hidden: Widths of `rms_norm` with `out_scale`.
        added: Widths of `add_rms_norm` with `out_scale`.
        gated: I of `silu_and_mul` with `out_scale`.
        quantized: Widths of `quantize`, of the kind that `blocks` says.
        static: Widths of `quantize` by a given scale.
        dtype: Dtype of rows and results: torch.bfloat16 or torch.float16.

    Raises:
        ArgumentError: sizes or dtypes that cannot be.

    Example:
        >>> import smkern
        >>> calls = smkern.Fp8Calls(shapes=[(6144, 4096)], blocks=True, hidden=[4096])
        >>> smkern.warmup(calls=[calls], budgets=[32, 100])  # doctest: +SKIP
    """

    shapes: Sequence[tuple[int, int]] = ()
    epilogues: Sequence[str] = ("none",)
    swiglu: Sequence[tuple[int, int]] = ()
    quantized_swiglu: Sequence[tuple[int, int]] = ()
    experts: Sequence[tuple[int, int, int, bool]] = ()
    permuted: Sequence[tuple[int, int, int]] = ()
    blocks: bool = False
    max_m: int = 8192
    batch_invariant: Sequence[bool] = (False,)
    hidden: Sequence[int] = ()
    added: Sequence[int] = ()
    gated: Sequence[int] = ()
    quantized: Sequence[int] = ()
    static: Sequence[int] = ()
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        check_fields(self)
        checks.as_int("max_m", self.max_m, 1)
        shapes = (*self.shapes, *self.swiglu, *self.quantized_swiglu)
        check_shapes(shapes)
        for shape in shapes:
            if self.blocks and shape[1] % FP8_BLOCK:
                raise ArgumentError(
                    f"shapes has {shape}: K is a multiple of {FP8_BLOCK} with block scales"
                )
        for op, call in self.calls(torch.device("meta"), True):
            op.check(call)
        list(self.problems(True))

    def problems(self, aligned: bool) -> Iterator[ScaledProblem]:
        """The products, each with M = 1."""
        dtype = checks.dtype_name(self.dtype)
        plain = [(shape, epilogue_from(key)) for shape, key in product(self.shapes, self.epilogues)]
        both = (*self.swiglu, *self.quantized_swiglu)
        gated = [((2 * width, k), epilogue_from("none")) for width, k in both]
        if self.blocks:
            one = Epilogue(swiglu=True)
            gated += [((2 * width, k), one) for width, k in self.quantized_swiglu]
        for ((n, k), epilogue), same in product((*plain, *gated), self.batch_invariant):
            whole = aligned and n % 8 == 0 and k % 16 == 0
            scales: Scales = "block" if self.blocks else "mixed"
            yield ScaledProblem(1, n, k, dtype, epilogue, scales, whole, same)

    def calls(self, device: torch.device, aligned: bool) -> list[tuple[Operator[Any], Any]]:
        """A call of one row of each kind, on tensors of its own."""
        found: list[tuple[Operator[Any], Any]] = []
        ones = partial(torch.ones, dtype=torch.float32, device=device)  # whatever the default is

        def rows(width: int, dtype: torch.dtype = self.dtype) -> torch.Tensor:
            return room((1, width), dtype, aligned, device)

        def scale(width: int) -> torch.Tensor:
            shape = (1, width // FP8_BLOCK) if self.blocks else (1,)
            return ones(shape)

        def weight(width: int) -> torch.Tensor:
            return room((width,), self.dtype, aligned, device)

        for width in self.hidden:
            call: Any = ScaledRmsNorm(rows(width), weight(width), scale(width))
            found.append((SCALED_RMS_NORM, call))
        for width in self.added:
            call = ScaledAddRmsNorm(rows(width), rows(width), weight(width), scale(width))
            found.append((SCALED_ADD_RMS_NORM, call))
        for width in {*self.gated, *(width for width, _ in self.quantized_swiglu)}:
            call = ScaledSiluAndMul(rows(2 * width), scale(width))
            found.append((SCALED_SILU_AND_MUL, call))
        for width in self.quantized:
            found.append((QUANTIZE, Quantize(rows(width), "block" if self.blocks else "token")))
        for width in self.static:
            found.append((QUANTIZE_BY, QuantizeBy(rows(width), ones(1))))
        for width, experts, top_k in self.permuted:
            chosen = torch.zeros(1, top_k, dtype=torch.int32, device=device)
            scales = (top_k, width // FP8_BLOCK) if self.blocks else (top_k,)
            call = ScaledPermute(rows(width), chosen, ones(scales), experts)
            found.append((SCALED_PERMUTE, call))
        for experts, n, k, swiglu in self.experts:
            high = n * (1 + swiglu)
            w = torch.empty(experts, high, k, dtype=FP8, device=device)
            shape = (experts, -(-high // FP8_BLOCK), k // FP8_BLOCK) if self.blocks else (experts,)
            offsets = torch.zeros(experts + 1, dtype=torch.int32, device=device)
            call = ScaledGrouped(
                rows(k, FP8), w, scale(k), ones(shape), offsets, swiglu, self.dtype
            )
            found.append((SCALED_GROUPED, call))
        return found

    def work(self, target: Target) -> Work:
        """What these calls need on a device."""
        return joined([self._products(target), work_of_calls(self.calls, target)])

    def _products(self, target: Target) -> Work:
        kinds = [p for aligned in target.aligned for p in self.problems(aligned)]
        if not kinds:
            return Work(0, 0, [], [])
        dispatcher = fp8_dispatcher(target.index)
        kernels: Any = dispatcher.kernels()
        smallest: dict[Any, Choice] = {}
        count = 0
        for problem, config, budget in choices(dispatcher, kinds, self.max_m, target.budgets):
            count += 1
            smallest.setdefault(kernels.variant(problem, config), (problem, config, budget))
        new = [v for v, (p, config, _) in smallest.items() if not kernels.is_loaded(p, config)]
        library = [*librarys(dispatcher, kinds, self.max_m, target.budgets)]
        launches: list[Callable[[], None]] = [
            partial(_launch_once, dispatcher, *choice) for choice in (*smallest.values(), *library)
        ]
        count += len(library)
        return Work(count, len(smallest), [Compile(variant) for variant in new], launches)


def choices(
    dispatcher: ScaledDispatcher,
    kinds: Sequence[ScaledProblem],
    max_m: int,
    budgets: Sequence[Budget],
) -> Iterator[Choice]:
    """Every choice that dispatch can make for these products: one for all M of a step."""
    capability = dispatcher.profile.info.capability
    for problem, budget, rows in product(kinds, budgets, steps_to(max_m)):
        found = replace(problem, m=rows)
        if not problem.epilogue.swiglu or fp8.serves_gated(found, capability):
            yield found, dispatcher.select(found, budget), budget


def librarys(
    dispatcher: ScaledDispatcher,
    kinds: Sequence[ScaledProblem],
    max_m: int,
    budgets: Sequence[Budget],
) -> Iterator[Choice]:
    """Every choice of cuBLASLt, which picks a kernel for each; a capture takes none that is new."""
    plain = [problem for problem in kinds if not problem.blocks]
    numbers = librarys_rows(max_m)
    for problem, budget, rows, scales in product(plain, budgets, numbers, fp8.LIBRARY_ROWS):
        found = replace(problem, m=rows, scales=scales)
        if fp8.is_librarys(found, budget, dispatcher.profile):
            yield found, constraints.CUBLASLT, budget


def _launch_once(
    dispatcher: ScaledDispatcher, problem: ScaledProblem, config: GemmConfig, budget: Budget
) -> None:
    """Load a choice's kernel and launch it on the current stream, on tensors of its own."""
    from smkern.kernels.fp8.gated_launch import GatedStrides
    from smkern.kernels.fp8.gemm_launch import Strides

    if config != constraints.CUBLASLT:
        budget = Budget(dispatcher.profile.info.num_sms, "mask", True)
    plan = dispatcher.launch_by(config, problem, budget, False)
    m, n, k = problem.m, problem.n, problem.k
    device = torch.device("cuda", dispatcher.index)
    pitch, dtype = -(-k // 16) * 16, checks.DTYPES[problem.out_dtype]
    a, w = (torch.zeros(rows, pitch, dtype=torch.uint8, device=device) for rows in (m, n))
    out, residual, bias = (torch.zeros(rows, n, dtype=dtype, device=device) for rows in (m, m, 1))
    count = max((max(m, n) // FP8_BLOCK + m + 1) * (k // FP8_BLOCK + 1), n)
    scales = torch.ones(count, dtype=torch.float32, device=device)
    stream = runtime_streams().current_stream(dispatcher.index)
    needed = plan.workspace_bytes
    workspace = workspaces_of(dispatcher.index).pointer(stream, needed) if needed else 0
    blocks = problem.blocks
    steps = (k // FP8_BLOCK, 1, k // FP8_BLOCK) if blocks else (0, 0, 0)
    if problem.epilogue.swiglu:
        gated = plan.bind(GatedStrides(pitch, pitch, n, n // FP8_BLOCK, 1, *steps))
        found = torch.empty(m * n, dtype=torch.float32, device=device)
        gated(
            a.data_ptr(), w.data_ptr(), scales.data_ptr(), scales.data_ptr(), found.data_ptr(),
            out.data_ptr(), stream,
        )  # fmt: skip
        return
    launch = plan.bind(Strides(pitch, pitch, n, n, *steps))
    for added in residual_pointers(problem.epilogue, config, residual, out):
        launch(
            a.data_ptr(), w.data_ptr(), scales.data_ptr(), scales.data_ptr(), out.data_ptr(),
            bias.data_ptr() if problem.epilogue.bias else 0, added, workspace, stream,
        )  # fmt: skip
