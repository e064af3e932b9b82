"""Measured cases of the KV append: tokens, bytes, operands, and the reference result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from smkern.measure.timing import sets_for
from smkern.ops.append.call import Call as Arguments
from smkern.ops.append.operators import APPEND, APPEND_KV
from smkern.ops.operator_warmup import aligned
from smkern.ops.reference import append as reference
from smkern.rope import Rope
from smkern.tuning.append import AppendProblem

Kind = Literal["plain", "rope", "norm-rope", "fp8"]
Layout = Literal["HND", "NHD"]

PREFIX = 64
"""Keys that each request already has in the cache."""
EPS = 1e-6
K_SCALE, V_SCALE = 0.02, 0.03
TOLERANCE = {"bf16": 1e-2, "fp8": 5e-2}
"""|x - reference| / |reference|: bf16 rounds to 2e-3, e4m3 to 3e-2."""


@dataclass(frozen=True, slots=True)
class AppendCase:
    """The append of one step: one token per request (decode), or up to 2,048 (prefill).

    "plain" appends K and V only; "rope" also rotates q and k, "norm-rope" norms them first, "fp8"
    is "norm-rope" into an fp8 cache. `rotary_dim`: rotated dimensions of a head; 0: all.
    """

    kind: Kind
    tokens: int
    num_q_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 16
    rotary_dim: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.tokens}"

    @property
    def is_decode(self) -> bool:
        return self.tokens <= 64

    @property
    def q_lens(self) -> tuple[int, ...]:
        if self.is_decode:
            return (1,) * self.tokens
        longest = min(self.tokens, 2048)
        return (longest,) * (self.tokens // longest)

    @property
    def kv_lens(self) -> tuple[int, ...]:
        return tuple(PREFIX + q_len for q_len in self.q_lens)

    @property
    def turns(self) -> bool:
        return self.kind != "plain"

    @property
    def norms(self) -> bool:
        return self.kind in ("norm-rope", "fp8")

    @property
    def cache_dtype(self) -> Literal["bf16", "fp8"]:
        return "fp8" if self.kind == "fp8" else "bf16"

    @property
    def bytes_moved(self) -> int:
        """q, k and v read and written once, plus each token's cosines and sines in fp32."""
        written = 1 if self.kind == "fp8" else 2
        head = self.tokens * self.head_dim
        kv = 2 * head * self.num_kv_heads * (2 + written)
        return kv + (head * self.num_q_heads * 4 + head * 4 if self.turns else 0)

    @property
    def problem(self) -> AppendProblem:
        """The case as dispatch sees it, without what only tensors decide."""
        turned = (self.rotary_dim or self.head_dim) if self.turns else 0
        return AppendProblem(
            self.tokens, len(self.q_lens), self.num_q_heads if self.turns else 0,
            self.num_kv_heads, self.head_dim, self.page_size, "bf16", self.cache_dtype, turned,
            norm=self.norms, ragged=not self.is_decode,
        )  # fmt: skip

    @property
    def flops(self) -> int:
        """Zero: negligible beside the bytes."""
        return 0

    @property
    def num_sets(self) -> int:
        """Operand sets to rotate over: a launch finds little of its own in L2; at most 64."""
        return sets_for(self.bytes_moved)

    @property
    def about(self) -> dict[str, Any]:
        """The `case` of a results cell; the same for every provider."""
        return {
            "kind": self.kind,
            "name": self.name,
            "batch": len(self.q_lens),
            "tokens": self.tokens,
            "q_heads": self.num_q_heads if self.turns else 0,
            "kv_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "page_size": self.page_size,
            "dtype": "bf16",
            "cache_dtype": self.cache_dtype,
        }

    @property
    def op(self) -> str:
        return "qk_norm_rope_append" if self.turns else "append_kv"


@dataclass(frozen=True, slots=True)
class AppendSet:
    """One set of operands: views of a qkv matrix, caches in each layout, the output for q."""

    q: Tensor
    k: Tensor
    v: Tensor
    caches: dict[Layout, tuple[Tensor, Tensor]]
    out: Tensor

    def cache(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """K and V as [pages, page_size, kv_heads, d] views."""
        k, v = self.caches[layout]
        return (k.transpose(1, 2), v.transpose(1, 2)) if layout == "HND" else (k, v)


@dataclass(slots=True)
class AppendOperands:
    """The operands of a case, shared by all budgets and providers.

    `table` [batch, max_pages], `kv_lens` [batch] and `cu_q_lens` [batch + 1] are int32, `positions`
    [tokens], `page` and `slot` [tokens] int64: what engines compute once per step for such kernels.
    """

    case: AppendCase
    device: str = "cuda"
    table: Tensor = field(init=False)
    kv_lens: Tensor = field(init=False)
    cu_q_lens: Tensor = field(init=False)
    places: reference.Places = field(init=False)
    cos_sin: Tensor = field(init=False)
    q_norm: Tensor = field(init=False)
    k_norm: Tensor = field(init=False)
    sets: list[AppendSet] = field(init=False)
    _wanted: tuple[Tensor, Tensor, Tensor] | None = None

    def __post_init__(self) -> None:
        case, device = self.case, self.device
        generator = torch.Generator().manual_seed(case.tokens)
        columns = -(-max(case.kv_lens) // case.page_size)
        batch = len(case.kv_lens)
        pages = batch * columns
        table = torch.randperm(pages, generator=generator).int().view(batch, columns)
        self.table = table.to(device)
        self.kv_lens = torch.tensor(case.kv_lens, dtype=torch.int32, device=device)
        cu = torch.tensor([0, *case.q_lens]).cumsum(0).int()
        self.cu_q_lens = cu.to(device)
        self.places = reference.locate(
            case.tokens, self.table, self.kv_lens, page_size=case.page_size, num_pages=pages,
            cu_q_lens=self.cu_q_lens,
        )  # fmt: skip
        self.cos_sin = Rope(case.rotary_dim or case.head_dim, 5e5).table(max(case.kv_lens), device)
        weights = torch.rand(2, case.head_dim, generator=generator).add_(0.5)
        self.q_norm, self.k_norm = weights.bfloat16().to(device)
        self.sets = [self._set(pages, index) for index in range(case.num_sets)]

    def _set(self, pages: int, seed: int) -> AppendSet:
        case, device = self.case, self.device
        generator = torch.Generator(device).manual_seed(seed)
        heads = (case.num_q_heads, case.num_kv_heads, case.num_kv_heads)
        qkv = torch.randn(
            case.tokens, sum(heads), case.head_dim, generator=generator, device=device,
            dtype=torch.bfloat16,
        )  # fmt: skip
        q, k, v = qkv.split(heads, 1)
        dtype = torch.float8_e4m3fn if case.cache_dtype == "fp8" else torch.bfloat16
        caches: dict[Layout, tuple[Tensor, Tensor]] = {}
        inner = (case.page_size, case.num_kv_heads)
        layouts: tuple[tuple[Layout, tuple[int, ...]], ...] = (("HND", inner[::-1]), ("NHD", inner))
        for layout, middle in layouts:
            shape = (pages, *middle, case.head_dim)
            caches[layout] = tuple(torch.empty(shape, dtype=dtype, device=device) for _ in "kv")  # type: ignore[assignment]
        return AppendSet(
            q, k, v, caches, torch.empty_like(q, memory_format=torch.contiguous_format)
        )

    @property
    def scales(self) -> dict[str, Any]:
        """Scales that values are divided by before they go into an fp8 cache."""
        return {"k_scale": K_SCALE, "v_scale": V_SCALE} if self.case.kind == "fp8" else {}

    @property
    def where(self) -> dict[str, Any]:
        """Append options of the case: which request each token belongs to, and scales."""
        return self.scales | ({} if self.case.is_decode else {"cu_q_lens": self.cu_q_lens})

    @property
    def turning(self) -> dict[str, Any]:
        """Options for the norm and RoPE."""
        norm = {"q_norm": self.q_norm, "k_norm": self.k_norm, "eps": EPS}
        return (norm if self.case.norms else {}) | {"cos_sin": self.cos_sin}

    def rows(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """The new tokens' rows in set 0's caches, fp32 [tokens, kv_heads, d]."""
        found = []
        for cache in self.sets[0].cache(layout):
            bits = cache.view(torch.uint8) if cache.element_size() == 1 else cache
            found.append(bits[self.places.page, self.places.slot].view(cache.dtype).float())
        return found[0], found[1]

    def wanted(self) -> tuple[Tensor, Tensor, Tensor]:
        """The reference result for set 0: q and the rows of K and V."""
        if self._wanted is None:
            one, case = self.sets[0], self.case
            k, v = one.cache("HND")
            where: dict[str, Any] = {"cu_q_lens": self.cu_q_lens} | self.scales
            if case.turns:
                where |= self.turning
                out = reference.qk_norm_rope_append(
                    one.q, one.k, one.v, k, v, self.table, self.kv_lens, **where
                )
            else:
                reference.append_kv(one.k, one.v, k, v, self.table, self.kv_lens, **where)
                out = one.q
            self._wanted = (out.float(), *self.rows("HND"))
        return self._wanted

    def poison(self) -> None:
        """Fill set 0's caches and output with NaN, so that rows left unwritten show."""
        one = self.sets[0]
        one.out.fill_(float("nan"))
        for pair in one.caches.values():
            for cache in pair:
                cache.view(torch.uint8).fill_(255)

    def error(self, layout: Layout) -> float:
        """The largest |x - reference| / |reference| of q, K and V; NaN where rows are missing."""
        got = (
            self.sets[0].out.float() if self.case.turns else self.wanted()[0],
            *self.rows(layout),
        )
        norm = torch.linalg.vector_norm
        errors = [float(norm(x - y) / norm(y)) for x, y in zip(got, self.wanted(), strict=True)]
        return float("nan") if any(x != x for x in errors) else max(errors)


def call_of(ops: AppendOperands, index: int) -> Arguments:
    """The operator's arguments for one set."""
    one, case = ops.sets[index], ops.case
    k, v = one.cache("HND")
    options: dict[str, Any] = dict(ops.where)
    if case.turns:
        options |= ops.turning | {"out": one.out}
    q = one.q if case.turns else None
    return Arguments(q, one.k, one.v, k, v, ops.table, ops.kv_lens, **options)


def problem_of_case(ops: AppendOperands) -> AppendProblem:
    """The case as dispatch sees it."""
    call = call_of(ops, 0)
    op = APPEND if ops.case.turns else APPEND_KV
    problem = op.problem(call, aligned(op, call))
    assert problem is not None
    return problem
