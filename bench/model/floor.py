"""What a forward pass must move and compute, kernel by kernel, and the least time that takes.

A kernel's floor is the larger of its bytes over the partition's measured bandwidth and its FLOPs
over 8.1 TFLOP/s times the SMs; a step's is the sum. Bytes are weights and cached keys and values,
each once. Activations count where a kernel's own exceed the L2: those of a decode step stay in it,
and a floor that let them off-chip would be too easy. The embedding table is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from smkern.bench.summary import TFLOPS_PER_SM

if TYPE_CHECKING:
    from smkern.models.architecture import MoeConfig
    from smkern.models.config import ModelConfig

ELEMENT_BYTES = 2
"""Of weights, activations and the cache: bf16."""


@dataclass(frozen=True, slots=True)
class Forward:
    """One forward pass of `batch` equal requests.

    `q_len` new tokens each; `kv_len` keys each, the new ones included.
    """

    batch: int
    q_len: int
    kv_len: int

    @property
    def tokens(self) -> int:
        return self.batch * self.q_len

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs under a causal mask."""
        q, kv = self.q_len, self.kv_len
        return self.batch * (q * kv - q * (q - 1) // 2)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One of a pass's operators: what one launch must do, and how often it is launched."""

    name: str
    bytes_moved: int
    flops: int
    count: int = 1

    def floor_us(self, tbps: float, num_sms: int) -> float:
        """Of one launch, us."""
        return max(self.bytes_moved / tbps, self.flops / (TFLOPS_PER_SM * num_sms)) / 1e6


def floor_us(kernels: Iterable[Kernel], tbps: float, num_sms: int) -> float:
    """The least time of all launches, us.

    Args:
        kernels: of `kernels_of`.
        tbps: the partition's measured read bandwidth.
        num_sms: the partition's SMs.
    """
    return sum(kernel.count * kernel.floor_us(tbps, num_sms) for kernel in kernels)


def total_flops(kernels: Iterable[Kernel]) -> int:
    return sum(kernel.count * kernel.flops for kernel in kernels)


def total_bytes(kernels: Iterable[Kernel]) -> int:
    return sum(kernel.count * kernel.bytes_moved for kernel in kernels)


def kernels_of(config: ModelConfig, forward: Forward, *, l2_bytes: int) -> tuple[Kernel, ...]:
    """The operators of one forward pass, in the order in which a layer launches them.

    Args:
        config: the model.
        forward: its requests; the head computes the last token of each.
        l2_bytes: of the device; a kernel's activations up to so many are not off-chip traffic.
    """
    return tuple(_Listing(config, forward, l2_bytes).kernels())


@dataclass(frozen=True, slots=True)
class _Listing:
    config: ModelConfig
    forward: Forward
    l2_bytes: int

    def kernels(self) -> Iterator[Kernel]:
        config, forward = self.config, self.forward
        hidden, layers, tokens = config.hidden_size, config.num_layers, forward.tokens
        q, qkv = config.q_size, config.qkv_size
        yield self._rows("input_norm", hidden, 2 * tokens * hidden, layers)
        yield self._product("qkv", tokens, qkv, hidden, layers)
        yield self._rows("append", 2 * config.head_dim, 2 * tokens * qkv, layers)
        yield self._attention()
        yield self._product("o", tokens, hidden, q, layers, residual=True)
        yield self._rows("post_norm", hidden, 2 * tokens * hidden, layers)
        yield from self._mlp() if config.moe is None else self._experts(config.moe)
        batch = forward.batch
        yield self._rows("final_norm", hidden, 2 * batch * hidden, 1)
        yield self._product("head", batch, config.vocab_size, hidden, 1)
        yield self._rows("sample", 0, batch * config.vocab_size, 1)

    def _mlp(self) -> Iterator[Kernel]:
        config, tokens = self.config, self.forward.tokens
        hidden, inner, layers = config.hidden_size, config.intermediate_size, config.num_layers
        moved = tokens * (hidden + inner)
        yield self._kernel(
            "gate_up", 2 * inner * hidden, moved, 4 * tokens * inner * hidden, layers
        )
        yield self._product("down", tokens, hidden, inner, layers, residual=True)

    def _experts(self, moe: MoeConfig) -> Iterator[Kernel]:
        """Every expert that some token is expected to choose, under even routing."""
        config, tokens = self.config, self.forward.tokens
        hidden, inner, layers = config.hidden_size, moe.intermediate_size, config.num_layers
        experts, chosen = moe.num_experts, moe.top_k
        met = experts * (1 - (1 - chosen / experts) ** tokens)
        rows = tokens * chosen
        up, down = round(met * 2 * inner * hidden), round(met * hidden * inner)
        yield self._product("router", tokens, experts, hidden, layers)
        yield self._rows("route", 0, tokens * experts, layers)
        yield self._rows("permute", 0, (tokens + rows) * hidden, layers)
        yield self._kernel(
            "gate_up", up, rows * (hidden + inner), 4 * rows * inner * hidden, layers
        )
        yield self._kernel("down", down, rows * (hidden + inner), 2 * rows * inner * hidden, layers)
        yield self._rows("unpermute", 0, (rows + 2 * tokens) * hidden, layers)

    def _attention(self) -> Kernel:
        config, forward = self.config, self.forward
        cached = 2 * forward.batch * forward.kv_len * config.kv_size
        moved, flops = 2 * forward.tokens * config.q_size, 4 * config.q_size * forward.pairs
        return self._kernel("attention", cached, moved, flops, config.num_layers)

    def _product(
        self, name: str, m: int, n: int, k: int, count: int, *, residual: bool = False
    ) -> Kernel:
        moved = m * (k + n * (2 if residual else 1))
        return self._kernel(name, n * k, moved, 2 * m * n * k, count)

    def _rows(self, name: str, constant: int, moved: int, count: int) -> Kernel:
        return self._kernel(name, constant, moved, 0, count)

    def _kernel(self, name: str, constant: int, moved: int, flops: int, count: int) -> Kernel:
        """Elements of weights and cache, elements of activations."""
        activations = ELEMENT_BYTES * moved
        off_chip = activations if activations > self.l2_bytes else 0
        return Kernel(name, ELEMENT_BYTES * constant + off_chip, flops, count)
