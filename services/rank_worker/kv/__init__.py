"""The KV of running sequences: one interface, two ways to hold it."""

from services.rank_worker.kv.choose import open_store
from services.rank_worker.kv.interface import BatchView, KVStore

__all__ = ["BatchView", "KVStore", "open_store"]
