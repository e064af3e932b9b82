"""Tensor maps of attention's operands, with which TMA gathers queries and pages."""

from __future__ import annotations

import ctypes

from smkern.kernels.attention.args import AttentionArguments
from smkern.kernels.driver import TENSOR_MAP_BYTES, check, encode_tensor_map, replace_address
from smkern.tuning.attention.constraints import cache_bytes
from smkern.tuning.attention.shapes import PREFILL_ROWS, AttentionProblem

_ALIGNMENT = 64
_SWIZZLES = {0: 0, 64: 2, 128: 3}  # CUtensorMapSwizzle, by bytes


class OperandMaps:
    """Maps of q, K and V at `address`, re-encoded when sizes change, moved when addresses do.

    The caller must hold a lock from `point` to the launch that reads the maps.
    """

    def __init__(self, problem: AttentionProblem) -> None:
        self._buffer = ctypes.create_string_buffer(3 * TENSOR_MAP_BYTES + _ALIGNMENT)
        self.address = -(-ctypes.addressof(self._buffer) // _ALIGNMENT) * _ALIGNMENT
        self._problem = problem
        self._keys = tile_keys(problem.shape.head_dim)
        self._swizzle = 128 if problem.shape.head_dim % 64 == 0 else 64
        self._sizes: object = None
        self._where: tuple[int, int, int] = (0, 0, 0)

    def point(self, args: AttentionArguments, q: int, k: int, v: int) -> None:
        """Point the maps to operands with the sizes of `args` at these addresses."""
        where = (q, k, v)
        if args is not self._sizes:
            self._encode(args)
            self._sizes, self._where = args, (0, 0, 0)
        if where != self._where:
            replace = replace_address()
            for i, address in enumerate(where):
                if address != self._where[i]:
                    code = replace(self.address + i * TENSOR_MAP_BYTES, address)
                    if code:
                        check(code, f"cuTensorMapReplaceAddress to {address:#x}")
            self._where = where

    def _encode(self, args: AttentionArguments) -> None:
        shape, dtype = self._problem.shape, self._problem.dtype
        block, dim = self._swizzle // 2, shape.head_dim
        if PREFILL_ROWS % shape.group == 0:  # otherwise the kernel does not use q's map
            token, head = (2 * stride for stride in args.q_strides)
            encode_tensor_map(
                self.address, dtype, (dim, shape.num_q_heads, max(args.num_tokens, 1)),
                (head, token), (block, shape.group, PREFILL_ROWS // shape.group),
                _SWIZZLES[self._swizzle],
            )  # fmt: skip
        size, rows, swizzle = cache_bytes(self._problem), self._keys, self._swizzle
        cached: str = dtype
        if size == 1:  # each of four warps asks for rows of its own, whole ones up to 128 bytes
            cached, rows = "e4m3", self._keys // 4
            swizzle = 128 if dim % 128 == 0 else 0
            block = swizzle or dim
        box = (block, min(shape.page_size, rows), 1, 1)
        for i, strides in enumerate((args.k_strides, args.v_strides), start=1):
            page, token, head = (size * stride for stride in strides)
            encode_tensor_map(
                self.address + i * TENSOR_MAP_BYTES, cached,
                (dim, shape.page_size, shape.num_kv_heads, args.num_pages), (token, head, page),
                box, _SWIZZLES[swizzle],
            )  # fmt: skip


def tile_keys(head_dim: int) -> int:
    """Keys of a prefill tile: kKeys of csrc/attention_prefill_gather.cuh."""
    return 64 if head_dim == 256 else 128
