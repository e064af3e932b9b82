"""From a GEMM of e4m3 to its plan on one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from smkern.errors import ArgumentError, DeviceError, WarmupError
from smkern.limits import check_fp8_capability
from smkern.ops.bounded_cache import model_rows
from smkern.ops.checks import dtype_name
from smkern.ops.fp8.call import out_dtype_of
from smkern.ops.fp8.scales import block_steps, kind_of, row_step
from smkern.ops.gemm.call import row_stride
from smkern.ops.gemm.extras import Extras
from smkern.ops.operator import Bound
from smkern.ops.operator_dispatch import OperatorDispatcher, absent_kernels
from smkern.tuning import constraints, fp8, fp8_cutlass
from smkern.tuning.config import Budget, Epilogue, GemmConfig
from smkern.tuning.fp8 import ScaledProblem, Scales, predict_us, ranked
from smkern.tuning.fp8_table import FP8_FAMILY
from smkern.tuning.select import Selection

if TYPE_CHECKING:
    from smkern.profile import Profile


class ScaledDispatcher(OperatorDispatcher[ScaledProblem, GemmConfig]):
    """As others, but each configuration's kernel is loaded for itself: there are dozens a kind; and
    cuBLASLt may be chosen, and CUTLASS's kernels where the extra is there.
    """

    def __init__(self, index: int, profile: Profile, kernels: Callable[[], Any]) -> None:
        self.index, self.table = index, FP8_FAMILY.load(profile)
        self._extras = Extras(profile)
        super().__init__(profile, kernels, self._chosen, of_step)

    def tuned(self, problem: ScaledProblem, budget: Budget) -> GemmConfig | None:
        """The table's choice, if it has one."""
        return self.table.lookup(problem, budget, self.profile.info.capability, self._serves)

    def _serves(self, problem: ScaledProblem, config: GemmConfig) -> bool:
        return not problem.kernel and self._extras.serve(problem, config)

    def _chosen(self, problem: ScaledProblem, budget: Budget) -> GemmConfig:
        config = FP8_FAMILY.config(problem, budget, self.profile, self.table, self._serves)
        if problem.kernel == "cutlass":
            if config.kernel != "cutlass":
                raise ArgumentError(
                    f"backend='cutlass' cannot run {problem.m}x{problem.n}x{problem.k} in "
                    f"{problem.dtype}: it takes 16-byte aligned rows on sm_90, and this is "
                    f"sm_{self.capability}; leave backend at None"
                )
            self._extras.check(problem, config)
        other = problem.kernel or problem.epilogue.swiglu or config.kernel != "ws"
        if other or not fp8_cutlass.pays(problem.m):
            return config
        is_tuned = self.tuned(problem, budget) is not None
        is_sure = fp8_cutlass.is_sure(problem.m, problem.blocks)
        if is_tuned and (self.table.has_extras or not is_sure):
            return config

        def best(kernels: object) -> Selection:
            us, config = min(ranked(problem, budget, self.profile, "cutlass"), key=itemgetter(0))
            return Selection(config, "model", us)

        us = predict_us(problem, config, budget, self.profile)
        found = Selection(config, "table" if is_tuned else "model", us)
        return self._extras.faster(problem, found, best).config

    def predicted_us(self, problem: ScaledProblem, budget: Budget) -> float:
        """The model's time of a problem by what serves it, us; of cuBLASLt's by our own kernels."""
        config = self.select(problem, budget)
        if config == constraints.CUBLASLT:
            config = self.select(replace(problem, kernel="own"), budget)
        return predict_us(problem, config, budget, self.profile)

    def launch_by(
        self, config: GemmConfig, problem: ScaledProblem, budget: Budget, capturing: bool
    ) -> Any:
        """The plan of a problem by a configuration.

        cuBLASLt gives way to our kernels where it cannot, and in a capture where it never ran.
        """
        kernels: Any = self.kernels()
        library = config == constraints.CUBLASLT
        ran = library and (problem, config, budget) in self._launches
        if capturing and not ran and (library or not kernels.is_loaded(problem, config)):
            if library and not problem.kernel:
                return self.launch(replace(problem, kernel="own"), budget, capturing=True)
            raise WarmupError(
                f"gemm {problem.m}x{problem.n}x{problem.k} in e4m3 on {budget.num_sms} SMs needs "
                "a kernel that is not loaded, and a graph capture cannot load one: call it once "
                "before with as many rows in this budget, or warm up by smkern.Fp8Calls"
            )
        try:
            return super().launch_by(config, problem, budget, False)
        except DeviceError as error:
            # no cuBLASLt, or one before 12.9, which has no scales of rows; or none of CUTLASS's
            if problem.kernel or not (library or config.kernel in constraints.OPTIONAL):
                raise
            if not library:
                self._extras.refuse(error)
                self._choices.clear()
            return self.launch(replace(problem, kernel="own"), budget, capturing=capturing)


@cache
def fp8_dispatcher(index: int) -> ScaledDispatcher:
    """The dispatcher of a device that is present.

    Raises:
        DeviceError: a GPU without e4m3.
    """
    from smkern.profile import load_profile

    profile = load_profile(index)
    check_fp8_capability(profile.info.sm)

    def kernels() -> Any:
        from smkern.kernels.fp8.gemm_launch import ScaledGemmKernels

        return ScaledGemmKernels(profile.info.sm, index)

    return ScaledDispatcher(index, profile, kernels)


def offline_dispatcher(profile: Profile) -> ScaledDispatcher:
    """A dispatcher that chooses for a device that may be absent; it cannot launch."""
    return ScaledDispatcher(-1, profile, absent_kernels)


def of_step(problem: ScaledProblem) -> ScaledProblem:
    """The problem with the rows that the choice of a whole step is made for."""
    return replace(problem, m=model_rows(problem.m))


def problem_of(call: Any, aligned: bool) -> ScaledProblem | None:
    """What chooses the kernel of a checked call; None where nothing is multiplied.

    Args:
        aligned: Whether matrices and bias begin at whole 16 bytes.
    """
    epilogue = Epilogue(call.bias is not None, call.residual is not None, call.activation)
    return problem_from(call, call.w, epilogue, [call.out, call.residual], aligned)


def problem_from(
    call: Any, w: Tensor, epilogue: Epilogue, results: list[Tensor | None], aligned: bool
) -> ScaledProblem | None:
    """The problem of a product of `call.a` and w.

    Args:
        results: Matrices of the result's dtype and width.
        aligned: Whether all begin at whole 16 bytes.

    Raises:
        ArgumentError: fp32 results, which only the reference gives; a backend that cannot run.
    """
    (m, k), n, dtype = call.a.shape, w.shape[0], out_dtype_of(call)
    if dtype is torch.float32:
        raise ArgumentError("out_dtype torch.float32 on a GPU: use torch.bfloat16 or float16")
    if not (m and n and k):
        return None
    whole = aligned and not (n % 8 or k % 16 or row_stride(call.a) % 16 or row_stride(w) % 16)
    whole = whole and not any(row_stride(x) % 8 for x in results)
    whole = whole and row_stride(call.a) >= k and row_stride(w) >= k
    scales = scales_of(w, call.a_scale, call.w_scale)
    problem = ScaledProblem(
        m, n, k, dtype_name(dtype), epilogue, scales, whole, bool(call.batch_invariant)
    )
    return replace(problem, kernel=kernel_of(call.backend, problem))


def scales_of(w: Tensor, a_scale: Tensor, w_scale: Tensor) -> Scales:
    """What each scale of a product counts; "row" of vectors that begin at whole 16 bytes, as
    cuBLASLt may read several at once, and "mixed" of others."""
    if kind_of(w, w_scale) == "block":
        return "block"
    steps = row_step(a_scale), row_step(w_scale)
    if steps == (0, 0):
        return "matrix"
    apart = (a_scale.data_ptr() | w_scale.data_ptr()) % 16
    return "mixed" if apart or steps != (1, 1) else "row"


def kernel_of(backend: str | None, problem: ScaledProblem) -> str:
    """What a backend names, as `ScaledProblem.kernel` has it.

    Raises:
        ArgumentError: one that cannot run the problem.
    """
    kernel = "" if backend is None else str(backend)
    known = kernel in ("", "own", "model", "ws", "pointer", "cublaslt", "cutlass")
    if not known or (kernel in ("ws", "cutlass") and not problem.aligned):
        raise ArgumentError(
            f"backend={kernel!r} cannot run {problem.m}x{problem.n}x{problem.k} in e4m3 (16-byte "
            f"aligned: {problem.aligned}): leave backend at None"
        )
    return kernel


def fuses(
    problem: ScaledProblem,
    capability: tuple[int, int],
    backend: str | None,
    *,
    into_blocks: bool,
) -> bool:
    """Whether one kernel multiplies, does SwiGLU and quantizes.

    Args:
        problem: The product of gate and up.
        capability: The GPU's.
        backend: As in `smkern.gemm_swiglu` with `out_scale`.
        into_blocks: Whether results have scales of blocks and rows that the kernel can store.

    Raises:
        ArgumentError: a backend that there is not, or "own" where no such kernel fits.
    """
    if backend not in (None, "own", "unfused"):
        raise ArgumentError(
            f"backend={backend!r}: gemm_swiglu with out_scale has None, 'own' (one kernel) "
            "and 'unfused' (two)"
        )
    forced = backend == "own"
    some = replace(problem, m=fp8.GATED_ROWS) if forced else problem
    fits = into_blocks and fp8.serves_gated(some, capability)
    if forced and not fits:
        raise ArgumentError(
            f"backend='own' cannot run gemm_swiglu of {problem.m}x{problem.n}x{problem.k} with "
            "out_scale: it takes scales of blocks, I in multiples of 128 and rows of 16 bytes on "
            "sm_90, and is not batch-invariant; leave backend at None"
        )
    return fits and backend != "unfused"


def bind_gemm(
    dispatcher: ScaledDispatcher, call: Any, problem: ScaledProblem, budget: Budget, capturing: bool
) -> Bound:
    """The launch of a call of `gemm` with scales."""
    plan = dispatcher.launch(problem, budget, capturing=capturing)
    out_stride = problem.n if call.out is None else row_stride(call.out)
    return bind_plan(plan, call, call.w, out_stride, row_stride(call.residual))


def bind_plan(plan: Any, call: Any, w: Tensor, out_stride: int, residual_stride: int = 0) -> Bound:
    """A plan's launch for the operands of a call."""
    from smkern.kernels.fp8.gemm_launch import Strides

    if plan.problem.blocks:
        steps = (*block_steps(call.a_scale), int(call.w_scale.stride(0)))
    else:
        steps = (row_step(call.a_scale), 0, row_step(call.w_scale))
    strides = Strides(row_stride(call.a), row_stride(w), out_stride, residual_stride, *steps)
    launch = plan.bind(strides, static_weights=bool(call.static_weights))
    return Bound(launch, workspace_bytes=plan.workspace_bytes)
