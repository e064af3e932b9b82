"""The paged KV cache: a pool of pages, prefix reuse, page tables on the device."""

from smkern.kv.page_pool import PagePool, PoolUsage
from smkern.kv.pool import KvPool
from smkern.kv.prefix import BlockChain, Event
from smkern.kv.staging import Staging
from smkern.kv.storage import KvSizes
from smkern.kv.tables import PageTables

__all__ = [
    "KvPool",
    "PagePool",
    "KvSizes",
    "PageTables",
    "BlockChain",
    "Event",
    "PoolUsage",
    "Staging",
]
