"""Merging of attention states interpreted: against fp64, with states that saw nothing."""

from __future__ import annotations

import pytest
import torch

from smkern.kernels.attention.merge_triton import MergeVariant, merge_states


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 96, 256])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_values(n: int, head_dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(n)
    tokens, heads = 37, 3
    outs = torch.randn(n, tokens, heads, head_dim + 8, generator=generator).to(dtype)
    outs = outs[..., :head_dim]
    lses = 5 * torch.randn(n, tokens, heads, generator=generator)
    unseen = torch.rand(n, tokens, heads, generator=generator) < 0.3
    unseen[:, 0] = True
    lses[unseen] = -torch.inf
    outs[unseen] = torch.nan
    out = torch.full((tokens, heads, head_dim), torch.nan, dtype=dtype)
    lse = torch.full((tokens, heads), torch.nan)
    merge_states[(3,)](
        outs, lses, out, lse, *outs.stride()[:3], *out.stride()[:2], n, tokens, heads, 1,
        **MergeVariant(head_dim, "fp16", False, 80).constants,
    )  # fmt: skip
    exact_lse = torch.logsumexp(lses.double(), 0)
    weight = torch.exp(lses.double() - exact_lse).nan_to_num(0.0)
    exact = (weight[..., None] * outs.double().nan_to_num(0.0)).sum(0)
    assert torch.isneginf(lse[0]).all()
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out.double(), exact, atol=1e-3, rtol=1e-3)
