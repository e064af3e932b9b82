"""The same model with stock kernels on both sides: cuBLAS's, FlashInfer's, cuDNN's, torch's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from smkern.bench.model.model import Model
from smkern.bench.runtime.cases import STOCK, RuntimePlan
from smkern.bench.runtime.model_steps import Forward, MixedRows, ModelSteps, PartitionOf
from smkern.bench.runtime.stamps import Stamps
from smkern.bench.runtime.stock_kernels import Attend, Cache, Rows
from smkern.models.layers import DenseLayer
from smkern.runtime.place import Place


class StockForward:
    """One forward's buffers and kernels; layers are launched one by one.

    Args:
        model: Its weights and caches are read.
        kernels: Other libraries' (`FlashInferKernels`).
        rows: Requests, those that decode last.
        attend: Attention of all rows.
        logit_rows: [n] int64: rows of which logits are made.
        reads_new_keys: Whether attention is given the new keys and values instead of the cache.

    Attributes:
        logits: [n, vocab_size] of the last forward.
    """

    def __init__(
        self, model: Model, kernels: Any, rows: Rows, attend: Attend, logit_rows: Tensor, *,
        reads_new_keys: bool = False,
    ) -> None:  # fmt: skip
        config, tokens = model.config, rows.tokens
        self._weights, self._caches = model.decoder.weights, model.caches.layers
        self._config, self._kernels, self._attend = config, kernels, attend
        self._cos_sin, self._positions = model.decoder.cos_sin, rows.positions()
        self._append = kernels.appender(rows)
        self._logit_rows, self._reads_new_keys = logit_rows, reads_new_keys
        self._sample = kernels.sampler(len(logit_rows), model.device)
        self.token_ids = torch.arange(tokens, device=model.device) % config.vocab_size

        def make(width: int) -> Tensor:
            return torch.empty(tokens, width, dtype=config.dtype, device=model.device)

        self._x, self._residual = make(config.hidden_size), make(config.hidden_size)
        self._qkv, self._attended = make(config.qkv_size), make(config.q_size)
        self._q, self._k, self._v = make(config.q_size), make(config.kv_size), make(config.kv_size)
        wanted = (len(logit_rows), config.vocab_size)
        self.logits = torch.empty(wanted, dtype=config.dtype, device=model.device)
        self._wide, self._gated = make(2 * config.intermediate_size), make(config.intermediate_size)

    def embed(self) -> None:
        torch.index_select(self._weights.embed, 0, self.token_ids, out=self._x)

    def layer(self, index: int) -> None:
        """One layer; between layers `_x` is to be added to `_residual`."""
        layer, config, kernels = self._weights.layers[index], self._config, self._kernels
        assert isinstance(layer, DenseLayer), "stock kernels of dense models only"
        eps, x = config.rms_eps, self._x
        if index == 0:
            self._residual.copy_(x)
            kernels.rms_norm(self._residual, layer.input_norm, eps, x)
        else:
            kernels.add_rms_norm(x, self._residual, layer.input_norm, eps)
        torch.mm(x, layer.qkv.t(), out=self._qkv)
        self._attention(layer, self._caches[index])
        torch.mm(self._attended, layer.o.t(), out=x)
        kernels.add_rms_norm(x, self._residual, layer.post_norm, eps)
        torch.mm(x, layer.gate_up.t(), out=self._wide)
        kernels.silu_and_mul(self._wide, self._gated)
        torch.mm(self._gated, layer.down.t(), out=x)

    def head(self) -> Tensor:
        """Logits of the rows wanted, and their draw."""
        weights = self._weights
        self._kernels.add_rms_norm(
            self._x, self._residual, weights.final_norm, self._config.rms_eps
        )
        torch.mm(self._x[self._logit_rows], weights.lm_head.t(), out=self.logits)
        self._sample(self.logits)
        return self.logits

    def whole(self) -> Tensor:
        self.embed()
        for index in range(self._config.num_layers):
            self.layer(index)
        return self.head()

    def _attention(self, layer: DenseLayer, cache: Cache) -> None:
        config, kernels, dim = self._config, self._kernels, self._config.head_dim
        q, k, v = self._qkv.split([config.q_size, config.kv_size, config.kv_size], 1)
        self._v.copy_(v)
        for x, norm, out in ((q, layer.q_norm, self._q), (k, layer.k_norm, self._k)):
            out.copy_(x)
            if norm is not None:
                heads = out.view(-1, dim)
                kernels.rms_norm(heads, norm, config.rms_eps, heads)
        kernels.rope(self._positions, self._q, self._k, dim, self._cos_sin)
        new_k, new_v = (x.view(-1, config.num_kv_heads, dim) for x in (self._k, self._v))
        self._append(new_k, new_v, cache)
        shape = (-1, config.num_q_heads, dim)
        keys = (new_k, new_v) if self._reads_new_keys else cache
        self._attend(self._q.view(shape), keys, self._attended.view(shape))


class DenseAttention:
    """Causal attention of one prompt over keys and values [tokens, kv_heads, head_dim].

    Args:
        groups: Query heads of a key head; a backend that refuses such gets copies of keys and
            values, a head for each query head.
        is_cpu: Whether cuDNN is out of the question.
    """

    def __init__(self, groups: int, *, is_cpu: bool) -> None:
        self._groups = groups
        self._backend = SDPBackend.MATH if is_cpu else SDPBackend.CUDNN_ATTENTION
        self._copies = False

    def __call__(self, q: Tensor, new: Cache, out: Tensor) -> None:
        if not self._copies:
            try:
                self._run(q, *new, out)
                return
            except RuntimeError:
                self._copies = True
        k, v = (x.repeat_interleave(self._groups, 1) for x in new)
        self._run(q, k, v, out)

    def _run(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        q, k, v = (x[None].transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel([self._backend]):
            made = scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=not self._copies
            )
        out.copy_(made[0].transpose(0, 1))


class StockSteps(ModelSteps):
    """Stock kernels on the runtime's places; see `ModelSteps`.

    Args:
        kernels: Other libraries' (`FlashInferKernels`).

    Attributes:
        prompt, step: The prompt's forward, and the decode step's.
    """

    provider = STOCK

    def __init__(
        self, plan: RuntimePlan, model: Model, stamps: Stamps, partition: PartitionOf, kernels: Any
    ) -> None:
        super().__init__(plan, model, stamps, partition)
        self._kernels = kernels
        self.step = self._decode_forward()
        self.prompt = self._prompt_forward()

    def prepare(self, place: Place) -> None:
        # captured with memory of its own, as cuBLAS keeps a workspace in it
        self._graphs.prepare(place, lambda partition: self.step.whole)

    def layers(self, first: int, count: int, place: Place) -> None:
        if first == 0:
            self.prompt.embed()
        for index in range(first, first + count):
            self.prompt.layer(index)
        if first + count == self.num_layers:
            self.prompt.head()

    def mixed(self, chunk: int, start: int) -> Forward:
        mixed = MixedRows.of(self._plan, self._model, chunk, start)
        rows = self._rows(mixed.counts, mixed.lengths, mixed.table)
        first = self._kernels.chunks(rows.part(0, mixed.pieces))
        others = self._kernels.decode(rows.part(mixed.pieces, len(mixed.counts)))

        def attend(q: Tensor, cache: Cache, out: Tensor) -> None:
            first(q[:chunk], cache, out[:chunk])
            others(q[chunk:], cache, out[chunk:])

        last = (torch.tensor(mixed.counts).cumsum(0) - 1).to(self._model.device)
        forward = StockForward(self._model, self._kernels, rows, attend, last)
        # of 320 rows a graph would save 0.4% (8B) and 1.7% (32B)
        return Forward(forward.whole, forward.token_ids, forward.logits)

    def _rows(self, counts: tuple[int, ...], lengths: tuple[int, ...], table: Tensor) -> Rows:
        config = self._model.config
        heads = (config.num_q_heads, config.num_kv_heads, config.head_dim)
        return Rows(counts, lengths, table, self._model.caches.layers[0][0].shape[1], heads)

    def _decode_forward(self) -> StockForward:
        batch, context = self._plan.batch, self._plan.context
        table = self._model.caches.decode[:batch]
        rows = self._rows((1,) * batch, (context,) * batch, table)
        every = torch.arange(batch, device=self._model.device)
        return StockForward(self._model, self._kernels, rows, self._kernels.decode(rows), every)

    def _prompt_forward(self) -> StockForward:
        """With nothing cached: dense attention over its own keys, which cuDNN does best."""
        tokens, config = self._plan.tokens, self._model.config
        rows = self._rows((tokens,), (tokens,), self._model.caches.prefill)
        last = torch.tensor([tokens - 1], device=self._model.device)
        groups = config.num_q_heads // config.num_kv_heads
        attend = DenseAttention(groups, is_cpu=not self._on_gpu)
        return StockForward(self._model, self._kernels, rows, attend, last, reads_new_keys=True)
