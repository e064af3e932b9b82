"""The eager path of `smkern.gemm` on one device: a dictionary look-up, then the launch.

All that a call's sizes, strides, dtypes, devices and budget imply is checked and prepared once and
kept under a key of those numbers. What depends on addresses is looked at in every call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from smkern.ops import aliasing, validate
from smkern.ops.bounded_cache import keep
from smkern.ops.gemm.dispatch import Dispatcher, epilogue_of
from smkern.ops.reference import gemm as reference
from smkern.ops.streams import Streams, runtime_streams
from smkern.ops.workspace import Workspaces, check_workspace, scratch_of_streams
from smkern.tuning.config import Budget, Epilogue, GemmConfig, GemmProblem


@dataclass(frozen=True, slots=True)
class Record:
    """A validated combination of numbers with its launch; `launch` is None where nothing runs.

    The spans are the bytes from a tensor's first element to
    behind its last.
    """

    launch: Callable[..., None] | None
    size: tuple[int, int]
    a_bytes: int
    w_bytes: int
    out_bytes: int
    bias_bytes: int
    residual_bytes: int
    workspace_bytes: int


class EagerGemm:
    """Launches GEMMs on one device; a family with the same operands derives from it.

    Args:
        index: The device's index.
        dispatcher: Chooses and prepares launches.
        workspaces: Gives each stream and capture its own.
        streams: The current stream and its budget.
    """

    weights = "w"
    """What the operator calls its weights, for messages."""

    def __init__(
        self, index: int, dispatcher: Dispatcher, workspaces: Workspaces, streams: Streams
    ) -> None:
        self.index = index
        self.dispatcher = dispatcher
        self.workspaces = workspaces
        self.streams = streams
        self._current_device = streams.current_device
        self._current_stream = streams.current_stream
        self._budget = streams.budget
        self._records: dict[Any, Record] = {}

    def __call__(
        self,
        a: Tensor,
        w: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        activation: Any,
        out: Tensor | None,
        workspace: Tensor | None,
        batch_invariant: bool,
        backend: Any,
        num_sms: Any,
        static_weights: bool = False,
    ) -> Tensor:
        index = self.index
        if self._current_device() != index:
            with torch.cuda.device(index):
                return self(
                    a, w, bias, residual, activation, out, workspace,
                    batch_invariant, backend, num_sms, static_weights,
                )  # fmt: skip
        stream = self._current_stream(index)
        budget = self._budget(stream, index)
        a_ptr = a.data_ptr()
        w_ptr = w.data_ptr()
        out_ptr = bias_ptr = residual_ptr = 0
        out_key = bias_key = residual_key = None
        if out is not None:
            out_ptr = out.data_ptr()
            out_key = (out.shape, out.stride(), out.dtype, out.get_device())
        if bias is not None:
            bias_ptr = bias.data_ptr()
            bias_key = (bias.shape, bias.stride(), bias.dtype, bias.get_device())
        if residual is not None:
            residual_ptr = residual.data_ptr()
            residual_key = (
                residual.shape, residual.stride(), residual.dtype, residual.get_device(),
            )  # fmt: skip
        aligned = not (a_ptr | w_ptr | out_ptr | bias_ptr | residual_ptr) & 15
        key = (
            a.shape, a.stride(), a.dtype, w.shape, w.stride(), w.dtype, w.get_device(),
            out_key, bias_key, residual_key, activation, batch_invariant, backend, static_weights,
            num_sms, num_sms.__class__, budget.num_sms, budget.confined, budget.clusters, aligned,
        )  # fmt: skip
        try:
            record = self._records.get(key)
        except TypeError:
            record = None
        if record is None:
            record = self._prepare(
                key, a, w, bias, residual, activation, out, batch_invariant, backend, num_sms,
                static_weights, budget, aligned,
            )  # fmt: skip
        if out is None:
            out = a.new_empty(record.size)
            out_ptr = out.data_ptr()
        else:
            out_end = out_ptr + record.out_bytes
            if (
                (out_ptr < a_ptr + record.a_bytes and a_ptr < out_end)
                or (out_ptr < w_ptr + record.w_bytes and w_ptr < out_end)
                or (out_ptr < bias_ptr + record.bias_bytes and bias_ptr < out_end)
                or (out_ptr < residual_ptr + record.residual_bytes and residual_ptr < out_end)
            ):
                aliasing.check_overlap(
                    out, {"a": a, self.weights: w, "bias": bias, "residual": residual}
                )
        launch = record.launch
        if launch is None:
            return self.without_kernel(a, w, bias, residual, activation, out)
        workspace_ptr = 0
        if workspace is not None:
            workspace_ptr = check_workspace(workspace, record.workspace_bytes, a.device)
            aliasing.check_disjoint(
                workspace,
                {"a": a, self.weights: w, "bias": bias, "residual": residual, "out": out},
            )
        elif record.workspace_bytes:
            workspace_ptr = self.workspaces.pointer(stream, record.workspace_bytes)
        try:
            launch(a_ptr, w_ptr, out_ptr, bias_ptr, residual_ptr, workspace_ptr, stream)
        except BaseException:
            self.workspaces.discard(stream)
            raise
        return out

    def _prepare(
        self,
        key: Any,
        a: Tensor,
        w: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        activation: Any,
        out: Tensor | None,
        batch_invariant: bool,
        backend: Any,
        num_sms: Any,
        static_weights: bool,
        stream_budget: Budget,
        aligned: bool,
    ) -> Record:
        """Validate a combination of numbers and prepare its launch; keep it unless in a capture.

        In a capture the dispatcher may have had to choose differently: such a record is not kept.
        """
        m, n, k, epilogue = self.check(a, w, bias, residual, out, activation, backend)
        columns = n // 2 if epilogue.swiglu else n
        info = self.dispatcher.profile.info
        validate.check_cuda(a, info.capability)
        budget = validate.resolve_budget(num_sms, stream_budget, info.num_sms)
        capturing = self.streams.capturing()
        launch, workspace_bytes = None, 0
        if m and n and k:
            problem = GemmProblem(
                m,
                n,
                k,
                validate.dtype_name(a.dtype),
                epilogue,
                aligned and aliasing.rows_aligned(columns, k, [a, w, out, residual]),
                bool(batch_invariant),
            )
            plan = self.dispatcher.plan(problem, budget, backend, capturing=capturing)
            launch = plan.bind(
                aliasing.row_stride(a),
                aliasing.row_stride(w),
                columns if out is None else aliasing.row_stride(out),
                aliasing.row_stride(residual),
                static_weights=bool(static_weights),
            )
            workspace_bytes = plan.workspace_bytes
        record = Record(
            launch=launch,
            size=(m, columns),
            a_bytes=aliasing.span_bytes(a),
            w_bytes=aliasing.span_bytes(w),
            out_bytes=aliasing.span_bytes(out),
            bias_bytes=aliasing.span_bytes(bias),
            residual_bytes=aliasing.span_bytes(residual),
            workspace_bytes=workspace_bytes,
        )
        if not capturing:
            keep(self._records, key, record)
        return record

    def check(
        self, a: Any, w: Any, bias: Any, residual: Any, out: Any, activation: Any, backend: Any
    ) -> tuple[int, int, int, Epilogue]:
        """All that must hold of a call but addresses and budget: (M, rows of w, K), epilogue."""
        m, n, k = validate.check_tensors(a, w, bias, residual, out, activation, backend)
        return m, n, k, epilogue_of(bias, residual, activation)

    def keep_measured(self, problem: GemmProblem, budget: Budget, config: GemmConfig) -> None:
        """As `Dispatcher.keep_measured`; calls seen before are prepared anew."""
        self.dispatcher.keep_measured(problem, budget, config)
        self._records.clear()

    def without_kernel(
        self,
        a: Tensor,
        w: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        activation: str | None,
        out: Tensor,
    ) -> Tensor:
        """M, N or K of 0: nothing to write, or the epilogue of zeros."""
        if out.numel():
            with torch.no_grad():
                reference.gemm(a, w, bias=bias, residual=residual, activation=activation, out=out)
        return out


def load_dispatcher(index: int) -> Dispatcher:
    """The dispatcher of a device that is present: its profile, its tables, its kernels."""
    from smkern.profile import load_profile
    from smkern.tuning.cost_constants import load_constants
    from smkern.tuning.select import GEMM

    profile = load_profile(index)
    major, minor = profile.info.capability

    def kernels() -> Any:
        from smkern.kernels.gemm_launch import GemmKernels

        return GemmKernels(index, 10 * major + minor)

    def library() -> Any:
        from smkern.kernels.cublaslt import CublasLt

        return CublasLt(index)

    def silu() -> Any:
        from smkern.ops.rows.dispatch import rows_dispatcher
        from smkern.ops.swiglu.unfused import RowsSilu

        return RowsSilu(rows_dispatcher(index))

    gpu = profile.info.name
    return Dispatcher(
        profile,
        GEMM.load(gpu),
        kernels,
        library,
        load_constants(gpu, profile.info.capability),
        silu,
    )


@cache
def eager_gemm(index: int) -> EagerGemm:
    """The eager path of a device, made at its first GEMM and kept for the process."""
    from smkern.partition.streams import stream_budgets

    streams = runtime_streams()
    workspaces = Workspaces(
        torch.device("cuda", index), streams.capturing, shared=scratch_of_streams(index)
    )
    # a partition that closes must not find our workspace among its stream's live tensors
    stream_budgets(index).at_close(workspaces.discard)
    return EagerGemm(index, load_dispatcher(index), workspaces, streams)
