"""The sampler: one token a row, on at most so many SMs."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from smkern.ops.checks import as_flag
from smkern.ops.operator import Operator
from smkern.ops.operator_check import check_kinds, check_operator
from smkern.ops.operator_dispatch import OperatorDispatcher, load_dispatcher
from smkern.ops.operator_library import entry, register
from smkern.ops.reference import sample as reference
from smkern.ops.sample.call import Sample, check_sample, choices_of, numbers_of, problem_of
from smkern.ops.sample.check import check_memory
from smkern.tuning.sample import SAMPLE_FAMILY, SampleConfig, SampleProblem, workspace_bytes


@cache
def sample_dispatcher(index: int) -> OperatorDispatcher[SampleProblem, SampleConfig]:
    """The dispatcher of a device that is present: its profile, its table, its kernels."""
    from smkern.kernels.sample import SampleKernels

    return load_dispatcher(index, SampleKernels, SAMPLE_FAMILY.selector)


def by_reference(call: Any) -> Tensor:
    """The reference on a checked call, of any device; brings the state up to date."""
    choices, finished = choices_of(call), call.finished
    over = [False] * len(choices) if finished is None else (finished != 0).tolist()
    drawn = [
        0 if is_over else reference.sample_row(row, choice)
        for row, choice, is_over in zip(call.logits, choices, over, strict=True)
    ]
    tokens = torch.tensor(drawn, dtype=torch.int32, device=call.logits.device)
    return reference.finish_rows(
        tokens, finished=finished, lengths=call.lengths, max_lengths=call.max_lengths,
        stop_tokens=call.stop_tokens, pad_token=int(call.pad_token),
    )  # fmt: skip


SAMPLE: Operator[SampleProblem] = Operator(
    name="sample",
    call=Sample,
    check=check_sample,
    shapes=lambda call: (((call.logits.shape[0],), torch.int32),),
    problem=problem_of,
    numbers=numbers_of,
    reference=by_reference,
    dispatcher=sample_dispatcher,
    vectors=("logits",),
    in_place=(("lengths", "steps"),),
    workspace=workspace_bytes,
)
LIBRARY = register(SAMPLE)
_sample = entry(SAMPLE)


def sample(
    logits: Tensor,
    *,
    temperature: Tensor | float | None = None,
    top_k: Tensor | int | None = None,
    top_p: Tensor | float | None = None,
    min_p: Tensor | float | None = None,
    seeds: Tensor | int | None = None,
    steps: Tensor | int | None = None,
    finished: Tensor | None = None,
    lengths: Tensor | None = None,
    max_lengths: Tensor | None = None,
    stop_tokens: Tensor | None = None,
    pad_token: int = 0,
    out: Tensor | None = None,
    check: bool = False,
    num_sms: int | None = None,
) -> Tensor:
    """One token a row of logits, greedy or drawn, and what it does to its request.

    Filters follow each other as in Hugging Face's generation: temperature, top-k, top-p (the
    smallest set of likeliest tokens that has a share `top_p` of what top-k left), min-p (tokens at
    least `min_p` times as likely as the best). Tokens are ordered by logit, equal ones by id, so
    top-k keeps k tokens and no more. Rows with different parameters, greedy ones among them, are
    one launch, which reads the logits once and sorts nothing. Rows that keep more than 2048 tokens
    are read again, from L2 where it holds them: once to draw, twice for top-k and twice for top-p,
    and once more for both.

    A draw walks what is kept in the order of ids, to the random share of it that Philox gives.

    The token of a row follows from its logits, parameters, seed and step alone: neither the batch
    nor the budget plays a part, to the last bit. Shares are integers in units of 2^-40 of the best
    token's; what is less likely than half of that is never drawn. NaN counts as -inf, +inf as the
    largest float, a row of -inf alone gives token 0.

    Parameters are numbers of all rows, part of the launch like the shapes, or tensors of a value a
    row, read on the device, where values out of range are clamped: a temperature below 1e-5 or NaN
    is greedy, above 1e30 it is 1e30; top_k below 1 or above the vocabulary keeps all; top_p of at
    most 0 keeps the best token, above 1 or NaN it keeps all; min_p of at most 0 or NaN keeps all,
    above 1 it is 1.

    Args:
        logits: [batch, vocab] bf16, fp16 or fp32, inner stride 1; rows may be apart. batch at most
            16384, vocab at most 262144.
        temperature: fp32 [batch] or a number; 0: greedy. None: 0.
        top_k: int32 [batch] or a number; 0: all. None: 0.
        top_p: fp32 [batch] or a number, above 0; 1: all. None: 1.
        min_p: fp32 [batch] or a number, 0 to 1; 0: all. None: 0.
        seeds: int64 [batch] or a number; needed unless all rows are greedy.
        steps: int32 [batch] or a number: which random number of its seed a row draws. None: 0.
            May be `lengths` itself, which counts: it is read before it is brought up to date.
        finished: bool or uint8 [batch], written: a finished row is not read and emits `pad_token`;
            a row becomes finished by a stop token or by its length. None: no row is.
        lengths: int32 [batch], written: grows by 1 in rows that were not finished.
        max_lengths: int32 [batch]: a row whose length reaches it is finished.
        stop_tokens: int32 [batch, n], -1 where a row has fewer; or [n] of all rows.
        pad_token: What finished rows emit.
        out: [batch] int32 to write the tokens into.
        check: Read parameters and logits, and raise for the first row that is wrong. Waits for the
            device; not for captures.
        num_sms: SMs to use at most. None: all that the current stream's partition has.

    Returns:
        [batch] int32: `out`, if given.

    Raises:
        As `smkern.gemm`.

    Source: The Curious Case of Neural Text Degeneration (arXiv 1904.09751) section 3.1, top-p;
        Turning Up the Heat (arXiv 2407.01082) section 3, min-p; Parallel Random Numbers: As Easy as
        1, 2, 3 (SC11) section 3.3, Philox.

    Example:
        >>> import torch, smkern
        >>> logits = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 3.0]])
        >>> smkern.sample(logits)
        tensor([1, 0], dtype=torch.int32)
        >>> smkern.sample(logits, temperature=0.7, top_k=2, seeds=torch.tensor([1, 2]))
        tensor([2, 0], dtype=torch.int32)
    """
    call = Sample(
        logits, temperature, top_k, top_p, min_p, seeds, steps, finished, lengths, max_lengths,
        stop_tokens, pad_token, out, num_sms,
    )  # fmt: skip
    if check is not False and as_flag("check", check):
        check_kinds(SAMPLE, call)
        check_operator(SAMPLE, call)
        check_memory(call)
    found: Tensor = _sample(*call)
    return found
