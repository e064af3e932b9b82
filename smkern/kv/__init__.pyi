from smkern.kv.held import PoolUsage as PoolUsage
from smkern.kv.page_pool import PagePool as PagePool
from smkern.kv.pool import KvPool as KvPool
from smkern.kv.prefix import BlockChain as BlockChain
from smkern.kv.prefix import Event as Event
from smkern.kv.staging import Staging as Staging
from smkern.kv.storage import KvSizes as KvSizes
from smkern.kv.virtual import VirtualTokens as VirtualTokens
