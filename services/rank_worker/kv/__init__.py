"""The KV of running sequences: one interface, two ways to hold it."""

from services.rank_worker.kv.choose import RowKind, open_store, row_kind
from services.rank_worker.kv.interface import BatchView, KVStore

__all__ = ["BatchView", "KVStore", "RowKind", "open_store", "row_kind"]
