"""The append's part of a warmup: every kernel of a model's appends, launched once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch

from smkern.errors import WarmupError
from smkern.kernels.append_launch import AppendVariant, compile_append, variants_of
from smkern.ops.append.call import Call, check_call, is_aligned, problem_of
from smkern.ops.append.eager import EagerAppend, eager_append
from smkern.ops.warming import Target, Work, room
from smkern.tuning.append import AppendProblem, Budget


@dataclass(frozen=True, slots=True)
class AppendCalls:
    """Appends to come, for `smkern.warmup`: what a model fixes; tokens, batch and lengths are free.

    Args:
        num_q_heads: Query heads; 0 for `smkern.append_kv`.
        num_kv_heads: KV heads; those of this device under tensor parallelism.
        head_dim: 64, 96, 128 or 256.
        page_size: Tokens of a page.
        rotary_dim: Dimensions that turn; 0: calls have no `cos_sin`.
        interleaved: As in `smkern.qk_norm_rope_append`.
        norm: Whether calls have `q_norm` and `k_norm`.
        dtype: Of q, k and v: torch.bfloat16 or torch.float16.
        cache_dtype: None (dtype's) or torch.float8_e4m3fn.
        table_dtype: Of `cos_sin`.
        weight_dtype: Of the norms. None: dtype's.
        ragged: Whether calls have `cu_q_lens`: False, True or both.
        flat: Whether calls have `page_indptr`: False, True or both.

    Raises:
        ArgumentError: numbers or dtypes that cannot be.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    rotary_dim: int = 0
    interleaved: bool = False
    norm: bool = False
    dtype: torch.dtype = torch.bfloat16
    cache_dtype: torch.dtype | None = None
    table_dtype: torch.dtype = torch.float32
    weight_dtype: torch.dtype | None = None
    ragged: Sequence[bool] = (False, True)
    flat: Sequence[bool] = (False,)

    def __post_init__(self) -> None:
        problem_of(self.call(torch.device("meta"), False, False, True), 1, aligned=True)

    def call(self, device: torch.device, ragged: bool, flat: bool, aligned: bool) -> Call:
        """A call that appends one token of one request, on tensors of its own.

        Raises:
            ArgumentError: see `smkern.qk_norm_rope_append`.
        """
        dim, count = self.head_dim, self.num_q_heads
        heads = count + 2 * self.num_kv_heads
        qkv = room((1, heads, dim), self.dtype, aligned, device)
        q, k, v = qkv.split([count, self.num_kv_heads, self.num_kv_heads], 1)
        pages = (2, 1, self.page_size, self.num_kv_heads, dim)
        caches = torch.empty(pages, dtype=self.cache_dtype or self.dtype, device=device)
        table = torch.zeros((1,) if flat else (1, 1), dtype=torch.int32, device=device)
        lens = torch.ones(1, dtype=torch.int32, device=device)
        starts = torch.arange(2, dtype=torch.int32, device=device)
        cos_sin, weights = None, None
        if self.rotary_dim:
            cos_sin = torch.zeros(1, self.rotary_dim, dtype=self.table_dtype, device=device)
        if self.norm:
            weights = torch.zeros(dim, dtype=self.weight_dtype or self.dtype, device=device)
        call = Call(
            q if count else None, k, v, caches[0], caches[1], table, lens, cos_sin,
            self.interleaved, weights, weights, page_indptr=starts if flat else None,
            cu_q_lens=starts if ragged else None,
        )  # fmt: skip
        check_call(call)
        return call

    def work(self, target: Target) -> Work:
        """What these calls need on a device."""
        return work_of(eager_append(target.index), self, target)


@dataclass(frozen=True, slots=True)
class Compile:
    """A kernel to compile into this user's cache."""

    variant: AppendVariant

    def __call__(self) -> None:
        compile_append(self.variant)


def work_of(eager: EagerAppend, calls: AppendCalls, target: Target) -> Work:
    """One call of each kind; it loads the kernels of every size and budget."""
    device = torch.device("cpu" if eager.index < 0 else f"cuda:{eager.index}")
    major, minor = eager.dispatcher.profile.info.capability
    kinds = product(calls.ragged, calls.flat, target.aligned)
    made = [calls.call(device, *kind) for kind in kinds]
    budget = Budget(target.num_sms, "mask", True)
    variants: dict[AppendVariant, None] = {}
    new: dict[AppendVariant, None] = {}
    for call in made:
        problem = problem_of(call, 1, aligned=is_aligned(call))
        found = dict.fromkeys(variants_of(problem, 10 * major + minor))
        variants |= found
        if not _is_loaded(eager, problem, budget):
            new |= found
    return Work(
        choices=len(made),
        variants=len(variants),
        compile=[Compile(variant) for variant in new],
        launches=[partial(_launch_once, eager, call) for call in made],
    )


def _is_loaded(eager: EagerAppend, problem: AppendProblem, budget: Budget) -> bool:
    """Whether a problem's kernels are: whether a capture could have its launch."""
    try:
        eager.dispatcher.launch(problem, budget, capturing=True)
    except WarmupError:
        return False
    return True


def _launch_once(eager: EagerAppend, call: Call) -> None:
    eager(call)
