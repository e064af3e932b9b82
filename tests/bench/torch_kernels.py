"""The kernels of a stock decoder in plain torch: for machines without FlashInfer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from smkern.bench.runtime.stock_kernels import Attend, Cache, Rows


class TorchKernels:
    """See `FlashInferKernels`."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        wide = x.float()
        out.copy_(wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float())

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
        residual += x
        self.rms_norm(residual, weight, eps, x)

    def rope(self, positions: Tensor, q: Tensor, k: Tensor, dim: int, table: Tensor) -> None:
        cos, sin = table[positions][:, None].chunk(2, -1)
        for x in (q, k):
            first, second = x.view(len(x), -1, dim).float().chunk(2, -1)
            turned = [first * cos - second * sin, second * cos + first * sin]
            x.copy_(torch.cat(turned, -1).view_as(x))

    def appender(self, rows: Rows) -> Callable[[Tensor, Tensor, Cache], None]:
        position, request = rows.positions(), rows.requests()
        page = rows.table[request, position // rows.page_size].long()
        slot = position % rows.page_size

        def run(k: Tensor, v: Tensor, cache: Cache) -> None:
            cache[0][page, slot] = k
            cache[1][page, slot] = v

        return run

    def silu_and_mul(self, x: Tensor, out: Tensor) -> None:
        gate, up = x.chunk(2, -1)
        torch.mul(torch.nn.functional.silu(gate), up, out=out)

    def decode(self, rows: Rows) -> Attend:
        return self.chunks(rows)

    def chunks(self, rows: Rows) -> Attend:
        starts = [0, *torch.tensor(rows.counts).cumsum(0).tolist()]

        def run(q: Tensor, cache: Cache, out: Tensor) -> None:
            for i, (count, length) in enumerate(zip(rows.counts, rows.lengths, strict=True)):
                pages = rows.table[i, : rows.num_pages[i]].long()
                k, v = (x[pages].flatten(0, 1)[None, :length].transpose(1, 2) for x in cache)
                own = slice(starts[i], starts[i] + count)
                seen = torch.ones(count, length, dtype=torch.bool, device=q.device)
                mask = seen.tril(length - count)
                out[own] = scaled_dot_product_attention(
                    q[None, own].transpose(1, 2), k, v, attn_mask=mask, enable_gqa=True
                )[0].transpose(0, 1)

        return run

    def sampler(self, rows: int, device: str) -> Callable[[Tensor], None]:
        def run(logits: Tensor) -> None:
            logits.argmax(-1)

        return run
