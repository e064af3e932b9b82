"""Calls on e4m3, and what they should give, in fp64 by hand."""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor

from tests.fuzz.operators import DTYPES, Made, maybe, normal

E4M3 = torch.float8_e4m3fn


def spread(scale: Tensor, rows: int, columns: int, blocks: bool) -> Tensor:
    """A scale of any kind as one of each element."""
    if blocks:
        wide = scale.repeat_interleave(128, 1)[:, :columns]
        return wide if len(wide) == rows else wide.repeat_interleave(128, 0)[:rows]
    return scale.reshape(-1, 1).expand(rows, columns)


def scales(random: Random, *shape: int) -> Tensor:
    return normal(random, *shape).contiguous().abs() + 0.1


def scaled_gemm(random: Random) -> Made:
    """Scales of rows or of matrices on either side, or of blocks."""
    m, n, blocks = random.randint(0, 9), random.randint(1, 200), random.random() < 0.4
    k = 128 * random.randint(1, 3) if blocks else random.randint(0, 60)
    a, w = (normal(random, rows, k).to(E4M3) for rows in (m, n))
    a_scale = scales(random, *random.choice(((1,), (m,), (m, 1))))
    w_scale = scales(random, *random.choice(((1,), (n,), (n, 1))))
    if blocks:
        a_scale, w_scale = scales(random, m, k // 128), scales(random, -(-n // 128), k // 128)
        if random.random() < 0.5:
            a_scale = a_scale.t().contiguous().t()
    dtype = random.choice(DTYPES)
    given = maybe(
        random,
        {"a": a, "w": w, "a_scale": a_scale, "w_scale": w_scale, "out_dtype": dtype},
        bias=lambda: normal(random, n, dtype=dtype),
        residual=lambda: normal(random, m, n, dtype=dtype),
        batch_invariant=lambda: True,
        check=lambda: True,
    )
    one = a.double() * spread(a_scale, m, k, blocks).double()
    other = w.double() * spread(w_scale, n, k, blocks).double()
    y = one @ other.T + given.get("bias", torch.zeros(n)).double()
    return Made(given, (y + given.get("residual", torch.zeros(m, n)).double(),))


def quantize(random: Random) -> Made:
    """Powers of two, which e4m3 holds: values and scales are exact."""
    rows, columns = random.randint(1, 9), 128 * random.randint(1, 3)
    kind = random.choice(("tensor", "token", "block", "weight_block"))
    generator = torch.Generator().manual_seed(random.randrange(1 << 30))
    x = 7 * 2.0 ** torch.randint(-4, 3, (rows, columns), generator=generator)
    x[:, ::128] = 28.0  # 7 * 4, the largest: every group has one, and the scale is 28 / 448
    x = x.to(random.choice(DTYPES))
    shape = {
        "tensor": (1,),
        "token": (rows,),
        "block": (rows, columns // 128),
        "weight_block": (1, columns // 128),
    }[kind]
    scale = torch.full(shape, 28.0 / 448)
    return Made({"x": x, "kind": kind}, (x.double() * 16, scale.double()))


def scaled_swiglu(random: Random) -> Made:
    """Whatever it gives; its reference is that of the dequantized matrices."""
    m, n, k = random.randint(0, 9), random.randint(0, 9), random.randint(0, 60)
    more: dict[str, Tensor] = {}
    if random.random() < 0.5:
        n = 128 * random.randint(0, 2)
        more["out_scale"] = out_scale(random, m, n)
        if random.random() < 0.5:
            more["gate_up"] = torch.empty(m, 2 * n, dtype=random.choice(DTYPES))
    a, w = normal(random, m, k).to(E4M3), normal(random, 2 * n, k).to(E4M3)
    given = {"a": a, "w_gate_up": w, "a_scale": scales(random, m), "w_scale": scales(random, 1)}
    return Made(given | more, None)


def scaled_grouped(random: Random) -> Made:
    """As `scaled_swiglu`."""
    rows, experts, k = random.randint(0, 9), random.randint(1, 3), random.randint(1, 60)
    a, w = normal(random, rows, k).to(E4M3), normal(random, experts, 6, k).to(E4M3)
    offsets = torch.tensor([0, *[rows] * experts], dtype=torch.int32)
    w_scale = scales(random, *random.choice(((1,), (experts,), (experts, 6), (experts, 6, 1))))
    given = {"a": a, "w": w, "a_scale": scales(random, rows), "w_scale": w_scale}
    return Made(given | {"expert_offsets": offsets}, None)


def out_scale(random: Random, rows: int, width: int) -> Tensor:
    blocks = random.random() < 0.5
    return torch.empty(rows, width // 128) if blocks else torch.empty(rows)


def scaled_norm(random: Random) -> Made:
    """A norm that writes e4m3."""
    x = normal(random, random.randint(0, 9), 128 * random.randint(1, 3))
    given = {"x": x, "weight": normal(random, x.shape[1]), "out_scale": out_scale(random, *x.shape)}
    return Made(given, None)


def scaled_silu(random: Random) -> Made:
    """SiLU times up that writes e4m3."""
    rows, width = random.randint(0, 9), 128 * random.randint(1, 3)
    x = normal(random, rows, 2 * width)
    return Made({"x": x, "out_scale": out_scale(random, rows, width)}, None)
