"""What the operator suite measures: sizes of Qwen3-8B and Qwen3-30B-A3B, and what they move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from smkern.measure.append import AppendCase, Kind
from smkern.measure.timing import sets_for

BUDGETS = (16, 32, 48, 84, 116, 132)
QUICK_BUDGETS = (16, 132)

DECODE, PREFILL = 64, 8192
HIDDEN, INNER, VOCAB = 4096, 12288, 151936
MOE_HIDDEN, MOE_INNER, EXPERTS, TOP_K = 2048, 768, 128, 8
MOE_PREFILL = 4096


@dataclass(frozen=True, slots=True)
class OpCase:
    """One operator at one size.

    `sizes` are what its operands are made from, by name. `bytes_moved` is every operand read and
    every result written once; of experts, those that have tokens.
    """

    op: str
    sizes: tuple[tuple[str, Any], ...]
    bytes_moved: int
    flops: int = 0

    @property
    def name(self) -> str:
        return f"{self.op}-{'x'.join(str(value) for _, value in self.sizes)}"

    def __getitem__(self, name: str) -> Any:
        return dict(self.sizes)[name]

    @property
    def num_sets(self) -> int:
        """Operands to rotate over, so that a launch finds little of its own in L2; at most 64."""
        return sets_for(self.bytes_moved)

    @property
    def about(self) -> dict[str, Any]:
        """The `case` of a results cell; the same for every provider."""
        return {"name": self.name, **dict(self.sizes), "dtype": "bf16"}


def norm(op: str, tokens: int, hidden: int = HIDDEN) -> OpCase:
    """`rms_norm` reads and writes the rows; `add_rms_norm` the residual's as well."""
    passes = 4 if op == "add_rms_norm" else 2
    moved = 2 * hidden * (passes * tokens + 1)
    return OpCase(op, (("tokens", tokens), ("hidden", hidden)), moved)


def silu_and_mul(tokens: int, inner: int = INNER) -> OpCase:
    return OpCase("silu_and_mul", (("tokens", tokens), ("inner", inner)), 2 * 3 * tokens * inner)


def embedding(tokens: int, hidden: int = HIDDEN, vocab: int = VOCAB) -> OpCase:
    sizes = (("tokens", tokens), ("hidden", hidden), ("vocab", vocab))
    return OpCase("embedding", sizes, tokens * (4 * hidden + 4))


def gemm_swiglu(m: int, n: int = INNER, k: int = HIDDEN) -> OpCase:
    """n columns of the result: the weights have 2n rows."""
    moved = 2 * (2 * n * k + m * k + m * n)
    return OpCase("gemm_swiglu", (("m", m), ("n", n), ("k", k)), moved, 4 * m * n * k)


def gemm_residual(m: int, n: int = HIDDEN, k: int = INNER) -> OpCase:
    moved = 2 * (n * k + m * k + 2 * m * n)
    return OpCase("gemm_residual", (("m", m), ("n", n), ("k", k)), moved, 2 * m * n * k)


def sample(batch: int, vocab: int = VOCAB) -> OpCase:
    """The logits once: what it takes more is more than one read."""
    return OpCase("sample", (("batch", batch), ("vocab", vocab)), 2 * batch * vocab)


def topk_softmax(tokens: int, experts: int = EXPERTS, top_k: int = TOP_K) -> OpCase:
    sizes = (("tokens", tokens), ("experts", experts), ("top_k", top_k))
    return OpCase("topk_softmax", sizes, tokens * (2 * experts + 8 * top_k))


def moe_permute(
    tokens: int, hidden: int = MOE_HIDDEN, experts: int = EXPERTS, top_k: int = TOP_K
) -> OpCase:
    sizes = (("tokens", tokens), ("hidden", hidden), ("experts", experts), ("top_k", top_k))
    moved = 2 * tokens * hidden * (1 + top_k) + 8 * tokens * top_k
    return OpCase("moe_permute", sizes, moved)


def moe_unpermute(tokens: int, hidden: int = MOE_HIDDEN, top_k: int = TOP_K) -> OpCase:
    """With the residual: the sum is added to it."""
    sizes = (("tokens", tokens), ("hidden", hidden), ("top_k", top_k))
    moved = 2 * tokens * hidden * (2 + top_k) + 8 * tokens * top_k
    return OpCase("moe_unpermute", sizes, moved)


def grouped_gemm(
    tokens: int,
    routing: str,
    *,
    swiglu: bool,
    hidden: int = MOE_HIDDEN,
    inner: int = MOE_INNER,
    experts: int = EXPERTS,
    top_k: int = TOP_K,
) -> OpCase:
    """Gate-up with SwiGLU, or down; `routing`: "even" or "skewed" (`expert_counts`)."""
    n, k = (inner, hidden) if swiglu else (hidden, inner)
    rows, columns = tokens * top_k, 2 * n if swiglu else n
    met = sum(count > 0 for count in expert_counts(rows, experts, routing))
    sizes = (
        ("rows", rows), ("n", n), ("k", k), ("experts", experts), ("routing", routing),
        ("swiglu", swiglu),
    )  # fmt: skip
    moved = 2 * (met * columns * k + rows * (k + n))
    return OpCase("grouped_gemm", sizes, moved, 2 * rows * columns * k)


def expert_counts(rows: int, experts: int, routing: str) -> tuple[int, ...]:
    """Rows of each expert: as equal as they go, or half of all at the first eighth and an eighth
    of the experts with none.

    Raises:
        ValueError: a routing that is not there.
    """
    if routing == "even":
        return _equal(rows, experts)
    if routing == "skewed":
        few = max(1, experts // 8)
        busy, rest = _equal(rows // 2, few), _equal(rows - rows // 2, experts - 2 * few)
        return (*busy, *rest, *(0,) * few)
    raise ValueError(f'routing is "even" or "skewed", not {routing!r}')


def _equal(rows: int, experts: int) -> tuple[int, ...]:
    return tuple(rows // experts + (i < rows % experts) for i in range(experts))


BOTH = (DECODE, PREFILL)
CASES: tuple[OpCase, ...] = (
    *(norm("rms_norm", tokens) for tokens in BOTH),
    *(norm("add_rms_norm", tokens) for tokens in BOTH),
    *(silu_and_mul(tokens) for tokens in BOTH),
    *(embedding(tokens) for tokens in BOTH),
    *(gemm_swiglu(tokens) for tokens in BOTH),
    *(gemm_residual(tokens) for tokens in BOTH),
    *(sample(batch) for batch in (1, 32, 128)),
    *(topk_softmax(tokens) for tokens in (DECODE, MOE_PREFILL)),
    *(moe_permute(tokens) for tokens in (DECODE, MOE_PREFILL)),
    grouped_gemm(DECODE, "even", swiglu=True),
    grouped_gemm(DECODE, "skewed", swiglu=True),
    grouped_gemm(MOE_PREFILL, "even", swiglu=True),
    grouped_gemm(MOE_PREFILL, "skewed", swiglu=True),
    grouped_gemm(DECODE, "even", swiglu=False),
    grouped_gemm(MOE_PREFILL, "even", swiglu=False),
    *(moe_unpermute(tokens) for tokens in (DECODE, MOE_PREFILL)),
)
KINDS: tuple[Kind, ...] = ("plain", "norm-rope", "fp8")
APPENDS = tuple(AppendCase(kind, tokens) for kind in KINDS for tokens in (8, 64, 512, 2048, 8192))
"""The operator between the projection and attention, which has operands of its own."""
USUAL_CASES: tuple[OpCase | AppendCase, ...] = (
    *CASES,
    *(c for c in APPENDS if c.kind == "norm-rope" and c.tokens in BOTH),
)
MORE_CASES = tuple(case for case in APPENDS if case not in USUAL_CASES)
"""Measured where they are named."""
QUICK_CASES = (norm("add_rms_norm", PREFILL), silu_and_mul(DECODE), sample(128))
