"""Memory that `out` may share with other arguments, through the public operator on CPU tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import smkern
from smkern.errors import ArgumentError

M, N, K, PITCH = 4, 8, 16, 16


def matrix(buffer: Tensor, offset: int, pitch: int = PITCH) -> Tensor:
    """[M, N] of a flat buffer."""
    return torch.as_strided(buffer, (M, N), (pitch, 1), offset)


@pytest.fixture(name="ab")
def _ab() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(rows, K, generator=generator) for rows in (M, N))
    return a, b


def test_residual_may_be_out_itself_or_columns_beside_it(ab: tuple[Tensor, Tensor]) -> None:
    a, w = ab
    for offset in (0, N):
        buffer = torch.ones(M * PITCH + N)
        exact = a @ w.T + matrix(buffer, offset)
        out = smkern.gemm(a, w, residual=matrix(buffer, offset), out=matrix(buffer, 0))
        torch.testing.assert_close(out, exact)


@pytest.mark.parametrize(
    ("offset", "pitch"),
    [
        pytest.param(0, 2 * PITCH, id="the same address with another pitch"),
        pytest.param(PITCH - 4, PITCH, id="its last columns are out's first of the next row"),
        pytest.param(N - 1, PITCH, id="one column of each row"),
    ],
)
def test_any_other_overlap_is_refused(ab: tuple[Tensor, Tensor], offset: int, pitch: int) -> None:
    a, w = ab
    buffer = torch.zeros(2 * M * PITCH + N)
    with pytest.raises(ArgumentError, match=r"out .* overlaps residual .*pass a tensor of its own"):
        smkern.gemm(a, w, residual=matrix(buffer, offset, pitch), out=matrix(buffer, 0))


def test_a_wider_argument_that_wraps_into_outs_next_row_is_refused() -> None:
    """Both step by 32 elements; a's 16 columns begin behind out's 8 and end in out's next row."""
    buffer, w = torch.zeros(M * 2 * PITCH + K), torch.zeros(N, K)
    a = torch.as_strided(buffer, (M, K), (2 * PITCH, 1), 20)
    with pytest.raises(ArgumentError, match=r"out .* overlaps a "):
        smkern.gemm(a, w, out=matrix(buffer, 0, 2 * PITCH))


def test_rows_of_out_that_overlap_each_other_are_refused(ab: tuple[Tensor, Tensor]) -> None:
    a, w = ab
    with pytest.raises(ArgumentError, match="two of its elements share an address"):
        smkern.gemm(a, w, out=matrix(torch.zeros(M * PITCH), 0, pitch=4))
