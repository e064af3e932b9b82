"""What a launch of a model must move and compute, kernel by kernel.

Bytes are weights and cached keys and values, each once; linear layers and caches may be
fp8. Activations count where a kernel's own
exceed the L2: those of a decode step stay in it. The embedding table is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from smkern.latency.work import Size

if TYPE_CHECKING:
    from smkern.latency.sizes import ExpertSizes, ModelSizes
    from smkern.models.architecture import MoeConfig
    from smkern.models.config import ModelConfig

ELEMENT_BYTES = 2
"""Bytes of a number: activations, the cache, and weights that are not fp8, are bf16."""


class Load(NamedTuple):
    """What goes through a model's layers.

    Attributes:
        tokens: New tokens.
        rows: Rows whose logits are computed.
        keys: Keys that their requests read, the new ones included.
        pairs: Visible (query, key) pairs under a causal mask.
        ends: Whether the last layer computes `rows` alone behind attention.
    """

    tokens: int
    rows: int
    keys: int
    pairs: int
    ends: bool = False

    @classmethod
    def of(cls, size: Size) -> Load:
        """The counts of a launch's chunks and decode rows."""
        new = size.new_tokens
        keys = sum(chunk.cached + chunk.new for chunk in size.chunks)
        pairs = sum(visible_pairs(c.new, c.cached + c.new) for c in size.chunks)
        drawn = len(size.chunks) if size.head else 0
        # A decode row sees all of its keys.
        tokens, rows, kv = new + size.batch, drawn + size.batch, size.total_kv
        return cls(tokens, rows, keys + kv, pairs + kv, size.ends)


def visible_pairs(q_len: int, kv_len: int) -> int:
    """(query, key) pairs of a request whose last `q_len` tokens are new, under a causal mask."""
    return q_len * kv_len - q_len * (q_len - 1) // 2


Epilogue = Literal["none", "residual", "swiglu"]


class Product(NamedTuple):
    """What a GEMM multiplies, a [M, K] by w [N, K]: N are the rows of the gate and of up, too."""

    m: int
    n: int
    k: int
    epilogue: Epilogue = "none"


@dataclass(frozen=True, slots=True)
class Kernel:
    """One of a pass's operators: what one launch must do, and how often it is launched.

    `product` is what a GEMM multiplies; None: another operator. `flop_rate` is how many times as
    many FLOPs the device does in its dtype as in bf16.
    """

    name: str
    bytes_moved: int
    flops: int
    count: int = 1
    product: Product | None = None
    flop_rate: int = 1


def total_flops(kernels: Iterable[Kernel]) -> int:
    return sum(kernel.count * kernel.flops for kernel in kernels)


def total_bytes(kernels: Iterable[Kernel]) -> int:
    return sum(kernel.count * kernel.bytes_moved for kernel in kernels)


def kernels_of(
    config: ModelConfig | ModelSizes,
    load: Load,
    *,
    l2_bytes: int,
    layers: int | None = None,
    cache_bytes: int = ELEMENT_BYTES,
) -> tuple[Kernel, ...]:
    """The operators of one forward pass, in the order in which a layer launches them.

    Args:
        config: the model.
        load: its tokens; the head and what is around it are left out where no logits are computed.
        l2_bytes: of the device; a kernel's activations up to so many are not off-chip traffic.
        layers: that it runs; None: all.
        cache_bytes: of a number in the cache.
    """
    return tuple(_Listing(config, load, l2_bytes, layers, cache_bytes).kernels())


class Cost(NamedTuple):
    """What a launch must compute and move."""

    flops: int
    bytes_moved: int


class Costs:
    """The costs of a model's launches, quickly for those that are alike.

    Args:
        config: The model.
        l2_bytes: Size of the device's L2.

    Example:
        >>> from smkern.latency import Size
        >>> from smkern.models import preset
        >>> costs = Costs(preset("qwen3-8b"), l2_bytes=60 << 20)
        >>> costs.of(Size(batch=64, total_kv=64 * 2048)).bytes_moved // 10**9
        34
    """

    def __init__(self, config: ModelConfig | ModelSizes, *, l2_bytes: int) -> None:
        self._config = config
        self._l2_bytes = l2_bytes
        # Steps of one batch differ by their keys, which attention alone reads.
        self._others = lru_cache(maxsize=4096)(self._sum_others)

    def of(self, size: Size) -> Cost:
        """A launch's FLOPs and bytes."""
        load = Load.of(size)
        layers = self._config.num_layers if size.batch else size.layers
        listing = _Listing(self._config, load, self._l2_bytes, layers)
        others = self._others(load.tokens, load.rows, layers, load.ends)
        attention = listing.attention()
        return Cost(
            others.flops + attention.count * attention.flops,
            others.bytes_moved + attention.count * attention.bytes_moved,
        )

    def _sum_others(self, tokens: int, rows: int, layers: int, ends: bool) -> Cost:
        load = Load(tokens, rows, 0, 0, ends)
        listing = _Listing(self._config, load, self._l2_bytes, layers)
        kernels = [kernel for kernel in listing.kernels() if kernel.name != ATTENTION]
        return Cost(total_flops(kernels), total_bytes(kernels))


ATTENTION = "attention"
"""The kernel whose cost depends on the keys."""


@dataclass(frozen=True, slots=True)
class _Listing:
    config: ModelConfig | ModelSizes
    load: Load
    l2_bytes: int
    layers: int | None
    cache_bytes: int = ELEMENT_BYTES

    @property
    def _layers(self) -> int:
        return self.config.num_layers if self.layers is None else self.layers

    def kernels(self) -> Iterator[Kernel]:
        config, load = self.config, self.load
        hidden, layers, tokens = config.hidden_size, self._layers, load.tokens
        qkv = config.qkv_size
        yield self._rows("input_norm", hidden, 2 * tokens * hidden, layers)
        yield self._linear("qkv", tokens, qkv, hidden, layers)
        yield self._rows("append", 2 * config.head_dim, 2 * tokens * qkv, layers)
        yield self.attention()
        yield from self._behind_attention(tokens, layers - load.ends)
        if load.ends and load.rows:
            yield from self._behind_attention(load.rows, 1)
        if rows := load.rows:
            yield self._rows("final_norm", hidden, 2 * rows * hidden, 1)
            yield self._product("head", rows, config.vocab_size, hidden, 1)
            yield self._rows("sample", 0, rows * config.vocab_size, 1)

    def _behind_attention(self, tokens: int, layers: int) -> Iterator[Kernel]:
        config, hidden = self.config, self.config.hidden_size
        yield self._linear("o", tokens, hidden, config.q_size, layers, "residual")
        yield self._rows("post_norm", hidden, 2 * tokens * hidden, layers)
        if config.moe is None:
            yield from self._mlp(tokens, layers)
        else:
            yield from self._experts(config.moe, tokens, layers)

    def _mlp(self, tokens: int, layers: int) -> Iterator[Kernel]:
        config = self.config
        hidden, inner = config.hidden_size, config.intermediate_size
        yield self._linear("gate_up", tokens, 2 * inner, hidden, layers, "swiglu")
        yield self._linear("down", tokens, hidden, inner, layers, "residual")

    def _experts(self, moe: MoeConfig | ExpertSizes, tokens: int, layers: int) -> Iterator[Kernel]:
        """Every expert that some token is expected to choose, under even routing."""
        hidden, inner = self.config.hidden_size, moe.intermediate_size
        experts, chosen = moe.num_experts, moe.top_k
        met = experts * (1 - (1 - chosen / experts) ** tokens)
        rows = tokens * chosen
        up, down = round(met * 2 * inner * hidden), round(met * hidden * inner)
        yield self._product("router", tokens, experts, hidden, layers)
        yield self._rows("route", 0, tokens * experts, layers)
        yield self._rows("permute", 0, (tokens + rows) * hidden, layers)
        moved, flops = rows * (hidden + inner), 2 * rows * inner * hidden
        yield self._in_fp8(self._kernel("gate_up", up, moved, 2 * flops, layers), up)
        yield self._in_fp8(self._kernel("down", down, moved, flops, layers), down)
        yield self._rows("unpermute", 0, (rows + 2 * tokens) * hidden, layers)

    def attention(self) -> Kernel:
        config, load = self.config, self.load
        cached = 2 * load.keys * config.kv_size
        moved, flops = 2 * load.tokens * config.q_size, 4 * config.q_size * load.pairs
        kernel = self._kernel(ATTENTION, cached, moved, flops, self._layers)
        if self.cache_bytes == ELEMENT_BYTES:
            return kernel
        saved = (ELEMENT_BYTES - self.cache_bytes) * cached
        return replace(kernel, bytes_moved=kernel.bytes_moved - saved)

    def _product(
        self, name: str, m: int, n: int, k: int, count: int, epilogue: Epilogue = "none"
    ) -> Kernel:
        columns = {"none": n, "residual": 2 * n, "swiglu": n // 2}[epilogue]
        kernel = self._kernel(name, n * k, m * (k + columns), 2 * m * n * k, count)
        return replace(kernel, product=Product(m, n, k, epilogue))

    def _linear(
        self, name: str, m: int, n: int, k: int, count: int, epilogue: Epilogue = "none"
    ) -> Kernel:
        """A product that a quantized model computes in fp8."""
        return self._in_fp8(self._product(name, m, n, k, count, epilogue), n * k)

    def _in_fp8(self, kernel: Kernel, weights: int) -> Kernel:
        """A kernel whose weights, so many numbers, are fp8 in a quantized model; inputs count as
        bf16 still, for the pass that quantizes them reads those."""
        saved = ELEMENT_BYTES - self.config.linear_bytes
        if not saved:
            return kernel
        return replace(kernel, bytes_moved=kernel.bytes_moved - saved * weights, flop_rate=2)

    def _rows(self, name: str, constant: int, moved: int, count: int) -> Kernel:
        return self._kernel(name, constant, moved, 0, count)

    def _kernel(self, name: str, constant: int, moved: int, flops: int, count: int) -> Kernel:
        """Elements of weights and cache, elements of activations."""
        activations = ELEMENT_BYTES * moved
        off_chip = activations if activations > self.l2_bytes else 0
        return Kernel(name, ELEMENT_BYTES * constant + off_chip, flops, count)
