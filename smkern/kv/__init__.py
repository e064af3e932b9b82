"""The paged KV cache: a pool of pages, prefix reuse, numbers sent to the device."""

from __future__ import annotations

from smkern.lazy import attach_stub

# A pool without memory loads no torch.
__getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
