"""The KV of running sequences: one interface, two ways to hold it."""

from services.rank_worker.kv_cache.rows.interface import BatchView, KVStore
from services.rank_worker.kv_cache.rows.open_store import RowKind, open_store, row_kind

__all__ = ["BatchView", "KVStore", "RowKind", "open_store", "row_kind"]
