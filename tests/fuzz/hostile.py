"""Values where they do not belong."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

THINGS: tuple[Callable[[], Any], ...] = (
    lambda: None,
    lambda: "3",
    lambda: "",
    lambda: b"1",
    list,
    lambda: [1.0],
    lambda: (2, 3),
    dict,
    object,
    lambda: np.ones(3),
    lambda: np.array([[1]]),
    lambda: np.float64(0.5),
    lambda: np.int64(-4),
    lambda: 2**70,
    lambda: -(2**70),
    lambda: 10**5000,
    lambda: -1,
    lambda: 0,
    lambda: 7,
    lambda: True,
    lambda: 0.5,
    lambda: float("nan"),
    lambda: float("inf"),
    lambda: 1e-46,
    lambda: 1e39,
    lambda: 1j,
    lambda: torch.tensor(2),
    lambda: torch.tensor([0.5]),
    lambda: torch.zeros(()),
    lambda: torch.zeros(2, 3),
    lambda: torch.zeros(2, 3, device="meta"),
    lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)]),
    lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(4)], layout=torch.jagged),
    lambda: torch.eye(3).to_sparse(),
    lambda: torch.eye(3).to_sparse_csr(),
    lambda: torch.float32,
    lambda: [torch.ones(2), torch.ones(3)],
)


class Marked(Tensor):
    """A subclass with nothing of its own."""


def _nested(x: Tensor) -> Tensor:
    return torch.nested.nested_tensor([x.reshape(-1), x.reshape(-1)[:1]])


CHANGES: tuple[Callable[[Tensor], Any], ...] = (
    lambda x: x.to("meta"),
    lambda x: x.to(torch.float64),
    lambda x: x.to(torch.int32),
    lambda x: x.to(torch.int64),
    lambda x: x.to(torch.complex64),
    lambda x: x.to(torch.bool),
    lambda x: x.bfloat16(),
    lambda x: x.T if x.dim() == 2 else x.flip(0),
    lambda x: x[None],
    lambda x: x.flatten(),
    lambda x: x[:0],
    lambda x: x[1:],
    lambda x: x[..., ::2],
    lambda x: x[:1].expand(x.shape) if len(x) else x,
    lambda x: torch.cat([x, x]),
    lambda x: x.to_sparse(),
    _nested,
    lambda x: x.numpy() if x.dtype not in (torch.bfloat16, torch.float8_e4m3fn) else x.tolist(),
    lambda x: x.tolist(),
    lambda x: x.clone().as_subclass(Marked),
    lambda x: torch.nn.Parameter(x.float()),
    lambda x: x.clone().requires_grad_(),
    lambda x: x.clone().fill_(-3),
    lambda x: x.clone().fill_(2**30),
)


def changed(random: Random, value: Any) -> Any:
    """Another value in its place; of a tensor mostly one that resembles it."""
    if isinstance(value, Tensor) and random.random() < 0.7:
        try:
            return random.choice(CHANGES)(value)
        except (RuntimeError, TypeError, IndexError, ValueError):
            return None  # torch cannot do that to this tensor
    return random.choice(THINGS)()
