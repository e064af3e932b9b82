"""The paged KV pool: the memory of keys and values, and the pages that requests hold."""

from __future__ import annotations

import torch
from torch import Tensor

from smkern.device import torch_device
from smkern.kv.page_pool import PagePool
from smkern.kv.storage import KvSizes, allocate_storage, pages_in_free_memory
from smkern.ops.checks import as_int


class KvPool(PagePool):
    """Pages of keys and values for all layers of a model, shared by requests.

    `PagePool` says how requests get, share and give back pages.

    Args:
        sizes: Layers, heads, page size and dtype.
        num_pages: Pages. None: as many as fit in `memory_fraction` of the GPU's free memory.
        memory_fraction: Share of the memory that is free now, when `num_pages` is None.
        reserved_bytes: Free memory to leave to others, when `num_pages` is None.
        device: Where the pages lie.
        reuse: Whether prefixes are found again.

    Attributes:
        sizes: As given.
        num_pages: Pages.
        device: Where the pages lie.
        storage: [layers, 2, pages, kv_heads, page_size, head_dim]: one head's tokens of a page
            are contiguous, which bulk copies like.

    Raises:
        ArgumentError: sizes that cannot be; no `num_pages` without a GPU.
        OutOfPagesError: the device has not the memory.

    Source: PagedAttention (arXiv 2309.06180) section 4; prefixes found by the hash of their
        blocks, as in SGLang's RadixAttention (arXiv 2312.07104) section 3 but flat.

    Example:
        >>> from smkern.kv import KvPool, KvSizes
        >>> pool = KvPool(KvSizes(2, num_kv_heads=1, head_dim=64), num_pages=8, device="cpu")
        >>> prompt = list(range(40))
        >>> pool.allocate("a", prompt)
        0
        >>> pool.commit("a", prompt)
        >>> pool.allocate("b", prompt)
        32
        >>> pool.pages("a")[:2] == pool.pages("b")[:2]
        True
        >>> pool.release("a"), pool.release("b"), pool.usage
        (None, None, PoolUsage(held=0, cached=2, free=6))
    """

    has_memory = True

    def __init__(
        self,
        sizes: KvSizes,
        *,
        num_pages: int | None = None,
        memory_fraction: float = 0.9,
        reserved_bytes: int = 0,
        device: torch.device | str = "cuda",
        reuse: bool = True,
    ) -> None:
        where = torch_device(device)
        if num_pages is None:
            num_pages = pages_in_free_memory(sizes, where, memory_fraction, reserved_bytes)
        self.sizes = sizes
        # the storage first: what the device has no room for is refused before pages are listed
        self.storage = allocate_storage(sizes, as_int("num_pages", num_pages, 1), where)
        super().__init__(num_pages, sizes.page_size, reuse=reuse)
        self.device = self.storage.device
        views = self.storage.transpose(3, 4)  # as operators take them
        self._layers = [(views[i, 0], views[i, 1]) for i in range(sizes.num_layers)]

    def __repr__(self) -> str:
        held, cached, free = self.usage
        return (
            f"KvPool({self.num_pages} pages of {self.sizes.page_size} tokens on {self.device}: "
            f"{held} held, {cached} cached, {free} free)"
        )

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """k_cache and v_cache of a layer: [pages, page_size, kv_heads, head_dim] views."""
        return self._layers[index]
