"""The memory of a KV pool: one tensor for all layers, sized from what is free."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from smkern.errors import ArgumentError, OutOfPagesError
from smkern.limits import shown
from smkern.ops.checks import MAX_SIZE, as_float, as_int, check_page_size

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class KvSizes:
    """The sizes of a KV pool that do not depend on how many pages it has.

    Attributes:
        num_layers: Layers with a cache.
        num_kv_heads: KV heads of each; those of this device under tensor parallelism.
        head_dim: Elements of a head.
        page_size: Tokens of a page: 1, 16, 32, 64, 128 or 256.
        dtype: bf16, fp16, fp32 (CPU tensors only serve it) or float8_e4m3fn.

    Raises:
        ArgumentError: a size that cannot be.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim"):
            as_int(name, getattr(self, name), 1)
        check_page_size(self.page_size)
        if not isinstance(self.dtype, torch.dtype) or self.dtype not in DTYPES:
            names = ", ".join(str(dtype) for dtype in DTYPES)
            raise ArgumentError(f"dtype={shown(self.dtype)}: a KV pool holds {names}")

    @property
    def page_shape(self) -> tuple[int, int, int]:
        """Shape of a page's keys or values in one layer: heads first, a head's tokens together."""
        return self.num_kv_heads, self.page_size, self.head_dim

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: keys and values of all layers."""
        return 2 * self.num_layers * prod(self.page_shape) * self.dtype.itemsize


def pages_in_free_memory(
    sizes: KvSizes, device: torch.device, fraction: float, reserved_bytes: int = 0
) -> int:
    """Pages that fit in `fraction` of the GPU memory that is free now, but for what is reserved.

    Raises:
        ArgumentError: a fraction outside (0, 1], or a device whose free memory is nobody's to take.
        OutOfPagesError: not one page fits.
    """
    share = as_float("memory_fraction", fraction)
    if not 0 < share <= 1:
        raise ArgumentError(f"memory_fraction={fraction!r}: pass a number above 0, at most 1")
    if device.type != "cuda":
        raise ArgumentError(
            f"num_pages=None on {device}: only a GPU's pool is sized from free memory; pass "
            "num_pages"
        )
    # What torch keeps for later is free for a pool too.
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    left = max(free - reserved_bytes, 0)
    pages = int(left * share) // sizes.page_bytes
    if pages < 1:
        raise OutOfPagesError(
            f"a page takes {sizes.page_bytes} bytes, {share:g} of the {left} free of {total} on "
            f"{device} are less: free memory, or raise memory_fraction"
        )
    return min(pages, MAX_SIZE)


def allocate_storage(sizes: KvSizes, num_pages: int, device: torch.device) -> Tensor:
    """[layers, 2, pages, kv_heads, page_size, head_dim], keys then values, zeros.

    Raises:
        OutOfPagesError: the device has not so much memory.
    """
    shape = (sizes.num_layers, 2, num_pages, *sizes.page_shape)
    try:
        # Zeros, for a page's unused slots must hold finite numbers; 20 ms for 80 GB.
        return torch.zeros(shape, dtype=sizes.dtype, device=device)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError) and "alloc" not in str(error):
            raise
        raise OutOfPagesError(
            f"{num_pages} pages of {sizes.page_bytes} bytes do not fit on {device}: lower "
            f"num_pages ({str(error).splitlines()[0]})"
        ) from None
