"""A dense cache [batch, kv_heads, S, head_dim] seen as pages, by its strides."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from smkern.integrations.transformers.step import Step

PAGE = 16
"""Tokens of a page where rows, lengths and pitches are whole pages; else 1. From 16 on the prefill
kernel copies pages by the bulk copy engine."""


class Pages(NamedTuple):
    """K and V as caches of pages.

    Attributes:
        k: [pages, page_size, kv_heads, head_dim], the memory that was given.
        v: Likewise.
        pitch: Tokens from a row's first key to the next row's.
    """

    k: Tensor
    v: Tensor
    pitch: int

    @property
    def page_size(self) -> int:
        return self.k.shape[1]


def as_pages(key: Tensor, value: Tensor, *, whole: bool) -> Pages:
    """K and V seen as pages; nothing is copied where both place their rows alike.

    Rows are an equal number of tokens apart in DynamicCache and StaticCache, and in the projections
    of a forward without cache. Where they are not, or the two differ, both are copied.

    Args:
        key: [batch, kv_heads, S, head_dim], any strides with inner stride 1.
        value: Likewise.
        whole: Take pages of 16 tokens where they fit; else of one token.
    """
    pitch = _pitch(key)
    if pitch is None or pitch != _pitch(value):
        key, value = (x.clone(memory_format=torch.contiguous_format) for x in (key, value))
        pitch = key.shape[1] * key.shape[2]
    length = key.shape[2]
    size = PAGE if whole and length % PAGE == 0 and pitch % PAGE == 0 else 1
    pages = ((key.shape[0] - 1) * pitch + length) // size
    return Pages(_view(key, pages, size), _view(value, pages, size), pitch)


def _pitch(x: Tensor) -> int | None:
    """Tokens between two rows; 0 for one row, None where it is no whole number of tokens."""
    batch, token = x.stride(0), x.stride(2)
    if x.stride(3) != 1:
        return None
    if x.shape[0] == 1:
        return 0
    return None if token == 0 or batch % token else batch // token


def _view(x: Tensor, pages: int, size: int) -> Tensor:
    _, head, token, _ = x.stride()
    shape = (pages, size, x.shape[1], x.shape[3])
    return x.as_strided(shape, (size * token, token, head, 1))


def page_table(step: Step, pages: Pages) -> Tensor:
    """int32 [batch, columns]: each row's pages, in the order of its keys; kept in the step."""
    size = pages.page_size
    found = step.tables.get((pages.pitch, size))
    if found is None:
        found = _table(step, pages.pitch, size)
        step.tables[pages.pitch, size] = found
    return found


def _table(step: Step, pitch: int, size: int) -> Tensor:
    request = step.request
    keys = step.order
    if keys is None:
        columns = request.kv_length // size
        keys = torch.arange(columns, dtype=torch.int32, device=request.device)
        keys = keys.expand(request.batch, -1)
    if not pitch:
        return keys
    ends = request.batch * (pitch // size)
    rows = torch.arange(0, ends, pitch // size, dtype=torch.int32, device=request.device)
    return keys + rows[:, None]
