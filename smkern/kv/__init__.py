"""The paged KV cache: a pool of pages, prefix reuse, numbers sent to the device."""

from smkern.kv.held import PoolUsage
from smkern.kv.page_pool import PagePool
from smkern.kv.pool import KvPool
from smkern.kv.prefix import BlockChain, Event
from smkern.kv.staging import Staging
from smkern.kv.storage import KvSizes
from smkern.kv.virtual import VirtualTokens

__all__ = [
    "KvPool",
    "PagePool",
    "KvSizes",
    "BlockChain",
    "Event",
    "PoolUsage",
    "Staging",
    "VirtualTokens",
]
